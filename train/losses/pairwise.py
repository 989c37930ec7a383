"""Everything quadratic in the batch, at memory linear in it: scores exist one tile at a time, twice.

Legend: b rows and m columns of this rank, M columns of all ranks, D width; logits a_ij = scale · <x_i, y_j>.

Schedule (one strip): a rank owns its rows against all columns, so each logit is computed once per pass on the whole
cluster: 2 matmuls of 2·b·M·D flops forward and backward for the logits, 2 for the gradients. Sent: the gathered y and
its gradient (by Layout.gather), the M column sums, and the columns' M incoming gradients.

Two ways to sum. Bounded: |a_ij| ≤ scale·max|x|·max|y| gives one shift that every rank knows, so one exp per logit and
plain sums, over tiles and over ranks. General: a running maximum per row and column, two exps. The first hands over to
the second when a sum underflows or the bound is too wide for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.losses.gather import Layout

TILE = 1024  # rows and columns of a tile: a tile of scores and its operands stay in cache


@dataclass(frozen=True)
class Exclusion:
    """Pairs (row i, column j) that leave both sums.

    keys: (row keys (b,), column keys (M,)) int64; a pair is left out when any of these has equal keys. The own column
    of row i, the i-th of this rank's, is left out if `own`, and stays whatever its keys otherwise.
    """

    keys: tuple[tuple[Tensor, Tensor], ...]
    own: bool

    def apply_(self, a: Tensor, rows: slice, columns: slice, first_own: int) -> None:
        """Set the excluded logits of the tile a[rows, columns] to −inf; `first_own` is the own column of row 0."""
        own = a.diagonal(first_own + rows.start - columns.start)
        kept = own.clone()
        for row_keys_b, column_keys_M in self.keys:
            row_keys, column_keys = row_keys_b[rows], column_keys_M[columns]
            if torch.isin(row_keys, column_keys).any():  # rarely: sparing a comparison of all pairs pays
                a.masked_fill_(row_keys[:, None] == column_keys, -math.inf)
        own.copy_(torch.full_like(kept, -math.inf) if self.own else kept)


def log_partition(
    x_bD: Tensor, y_MD: Tensor, scale: Tensor, layout: Layout, exclusion: Exclusion | None = None
) -> tuple[Tensor, Tensor]:
    """log Σ_j exp(a_ij) of own rows i over all columns, and log Σ_i exp(a_ij) of own columns j over all ranks' rows.

    x_bD, y_MD: float32 or float64, alike; y_MD = layout.gather(own y); scale: 0-d, same on every rank; layout: of the
    columns. Returns (b,) and (m,), −inf (with zero gradient) where everything is excluded. Differentiable in x, y and
    scale; the gradients of y and scale are this rank's share, to be summed over ranks (Layout.gather does so for y).
    A collective, forward and backward: every rank calls it, with any number of rows.
    """
    with torch.autocast(x_bD.device.type, enabled=False):
        return _LogPartition.apply(x_bD, y_MD, scale, layout, exclusion)  # pyright: ignore[reportReturnType]


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_bD: Tensor, y_MD: Tensor, scale: Tensor, layout: Layout, exclusion: Exclusion | None
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(x_bD, y_MD, scale, layout.own.start, exclusion)
        shift = _constant_shift(x_bD, y_MD, scale, layout)
        sums = None if shift is None else _bounded_sums(tiles, shift, layout)
        rows_b, columns_M = sums or _general_sums(tiles, layout)
        ctx.shift = shift if sums else None
        ctx.layout, ctx.exclusion = layout, exclusion
        ctx.save_for_backward(x_bD, y_MD, scale, rows_b, columns_M)
        return rows_b.clone(), columns_M[layout.own].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, row_gradient_b: Tensor, column_gradient_m: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_bD, y_MD, scale, rows_b, columns_M = ctx.saved_tensors
        # exp(−inf − inf) = 0: an empty row or column pulls at nothing
        rows_b, columns_M = (v.masked_fill(v == -math.inf, math.inf) for v in (rows_b, columns_M))
        column_gradient_M = ctx.layout.gather(column_gradient_m)
        tiles = _Tiles(x_bD, y_MD, scale, ctx.layout.own.start, ctx.exclusion)
        if ctx.shift is None:
            gradients = _general_gradients(tiles, rows_b, columns_M, row_gradient_b, column_gradient_M)
        else:
            u_b = row_gradient_b * (ctx.shift - rows_b).exp()
            v_M = column_gradient_M * (ctx.shift - columns_M).exp()
            gradients = _bounded_gradients(tiles, ctx.shift, u_b, v_M)
        with torch.autocast(x_bD.device.type, enabled=False):
            dx_bD, dy_MD = _embedding_gradients(x_bD, y_MD, gradients)
        # ∂a_ij/∂scale = <x_i, y_j>, so Σ_ij G_ij <x_i, y_j> = Σ_i <x_i, (G y)_i>
        dscale = sum(((x_bD[rows] * dx_bD[rows]).sum() for rows in _strips(len(x_bD))), start=torch.zeros_like(scale))
        return dx_bD.mul_(scale), dy_MD.mul_(scale), dscale, None, None


class _Tiles:
    """The logits of one problem, tile by tile, in memory that the next tile overwrites."""

    def __init__(self, x_bD: Tensor, y_MD: Tensor, scale: Tensor, first_own: int, exclusion: Exclusion | None) -> None:
        self.x_bD, self.y_MD, self.scale, self.first_own, self.exclusion = x_bD, y_MD, scale, first_own, exclusion

    def logits(self, shift: float) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, columns, a_ij − shift), −inf where excluded. The caller may overwrite the tile."""
        space = self.scratch()
        for rows in _strips(len(self.x_bD)):
            scaled = self.x_bD[rows] * self.scale
            for columns in _strips(len(self.y_MD)):
                y = self.y_MD[columns]
                a = torch.mm(scaled, y.T, out=shaped(space, len(scaled), len(y))).sub_(shift)
                if self.exclusion:
                    self.exclusion.apply_(a, rows, columns, self.first_own)
                yield rows, columns, a

    def scratch(self) -> Tensor:
        """Memory for one tile, to be `shaped`."""
        return self.x_bD.new_empty(min(TILE, len(self.x_bD)) * min(TILE, len(self.y_MD)))


def shaped(space: Tensor, rows: int, columns: int) -> Tensor:
    return space[: rows * columns].view(rows, columns)


def _strips(count: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, count)) for start in range(0, count, TILE))


def _constant_shift(x_bD: Tensor, y_MD: Tensor, scale: Tensor, layout: Layout) -> float | None:
    """c such that no row or column sum of exp(a_ij − c) can exceed e^0.72 log(max), the same on every rank.

    Not nearer to the largest number: backward divides by the sums, and gradient / sum must stay a normal number.
    None where the bound is so wide that ordinary sums would underflow, or infinite.
    """
    room = 0.72 * math.log(torch.finfo(x_bD.dtype).max)
    largest = [torch.cat([e.new_zeros(1), torch.linalg.vector_norm(e, dim=1)]).max() for e in (x_bD, y_MD)]
    # float64: row counts must be exact. Rows lie on the ranks as they like, so W · (most rows on a rank) bounds them
    shared = layout.max_(torch.stack([largest[0].double(), torch.tensor(len(x_bD), device=x_bD.device).double()]))
    longest_x, most_rows = shared.tolist()
    bound = abs(float(scale)) * longest_x * float(largest[1])
    terms = max(most_rows * layout.world_size, len(y_MD), 1)
    return max(0.0, bound + math.log(terms) - room) if bound < 2 * room else None


def _bounded_sums(tiles: _Tiles, shift: float, layout: Layout) -> tuple[Tensor, Tensor] | None:
    """Rows (b,) and columns (M,) of log Σ exp from plain sums; None, on all ranks alike, if one of them underflows."""
    x_bD, y_MD = tiles.x_bD, tiles.y_MD
    info = torch.finfo(x_bD.dtype)
    least = info.tiny / info.eps
    row_sums_b = x_bD.new_zeros(len(x_bD))
    shared = x_bD.new_zeros(len(y_MD) + 1)
    column_sums_M, lost = shared[:-1], shared[-1:]  # one all-reduce for the sums and the decision
    for rows, columns, a in tiles.logits(shift):
        e = a.exp_()
        row_sums_b[rows] += e.sum(1)
        column_sums_M[columns] += e.sum(0)
    lost += (~(row_sums_b > least)).sum()  # negated: NaN counts as lost
    layout.sum_(shared)
    if lost > 0 or not (column_sums_M > least).all():
        return None
    return shift + row_sums_b.log(), shift + column_sums_M.log()


def _general_sums(tiles: _Tiles, layout: Layout) -> tuple[Tensor, Tensor]:
    """Rows (b,) and columns (M,) of log Σ exp for logits of any size."""
    rows_b = tiles.x_bD.new_full((len(tiles.x_bD),), -math.inf)
    columns_M = tiles.y_MD.new_full((len(tiles.y_MD),), -math.inf)
    for rows, columns, a in tiles.logits(0.0):
        rows_b[rows] = torch.logaddexp(rows_b[rows], a.logsumexp(1))
        columns_M[columns] = torch.logaddexp(columns_M[columns], a.logsumexp(0))
    highest_M = layout.max_(columns_M.clone())
    highest_M.masked_fill_(highest_M == -math.inf, 0.0)  # −inf − (−inf) is not a number
    return rows_b, highest_M + layout.sum_((columns_M - highest_M).exp_()).log_()


Gradients = Iterator[tuple[slice, slice, Tensor]]


def _bounded_gradients(tiles: _Tiles, shift: float, u_b: Tensor, v_M: Tensor) -> Gradients:
    """∂L/∂a_ij = e^(a_ij − c) (u_i + v_j), u and v = incoming gradient / sum."""
    space = tiles.scratch()
    for rows, columns, a in tiles.logits(shift):
        yield rows, columns, a.exp_().mul_(torch.add(u_b[rows, None], v_M[columns], out=shaped(space, *a.shape)))


def _general_gradients(
    tiles: _Tiles, rows_b: Tensor, columns_M: Tensor, row_gradient_b: Tensor, column_gradient_M: Tensor
) -> Gradients:
    """∂L/∂a_ij = g_i e^(a_ij − LSE_i) + h_j e^(a_ij − LSE_j)."""
    space = tiles.scratch()
    for rows, columns, a in tiles.logits(0.0):
        by_column = torch.sub(a, columns_M[columns], out=shaped(space, *a.shape))
        by_column.exp_().mul_(column_gradient_M[columns])
        by_row = a.sub_(rows_b[rows, None]).exp_().mul_(row_gradient_b[rows, None])
        yield rows, columns, by_row.add_(by_column)


def _embedding_gradients(x_bD: Tensor, y_MD: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """G y and Gᵀ x for tiles of G = ∂L/∂a."""
    dx_bD, dy_MD = torch.zeros_like(x_bD), torch.zeros_like(y_MD)
    for rows, columns, g in gradients:
        dx_bD[rows].addmm_(g, y_MD[columns])
        dy_MD[columns].addmm_(g.T, x_bD[rows])
    return dx_bD, dy_MD

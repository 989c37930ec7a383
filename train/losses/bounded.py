"""log-sum-exp of rows and columns where all logits are bounded: one exponential per score, plain sums.

|a_ij| ≤ scale·max|x|·max|y| gives one shift c that every rank knows, so that sums over tiles and over ranks are plain
additions. On a GPU in half precision the same is done by the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from train.losses.gather import Layout
from train.losses.logits import Logits, Pulls, sum_of_products
from train.losses.tiles import Exclusion, Gradients, Tiles, shaped


@dataclass(frozen=True)
class Bound:
    """shift c: no sum of E_ij = exp(a_ij − c) overflows; the largest log-weights, which are taken out of the sums."""

    shift: float
    row_weight: float
    column_weight: float


def find_bound(tiles: Tiles, logits: Logits, layout: Layout) -> Bound | None:
    """A shift such that no row or column sum can exceed e^0.72 log(max), the same on every rank.

    Not nearer to the largest number: backward divides by the sums, and gradient / sum must stay a normal number.
    None where the bound is so wide that ordinary sums would underflow, or infinite, and for Scales.
    """
    if logits.column_scale_M is not None:
        return None
    x_bD, y_MD = tiles.x_bD, tiles.y_MD
    room = 0.72 * math.log(torch.finfo(tiles.dtype).max)
    longest_y = _largest(torch.linalg.vector_norm(y_MD, dim=1, dtype=tiles.dtype), 0.0)
    # float64: row counts must be exact. Rows lie on the ranks as they like, so W · (most rows on a rank) bounds them
    own = [
        _largest(torch.linalg.vector_norm(x_bD, dim=1, dtype=tiles.dtype), 0.0),
        torch.tensor(len(x_bD), device=x_bD.device),
        _largest(logits.row_weights_b, -math.inf),
    ]
    shared = layout.max_(torch.stack([value.to(x_bD.device, torch.float64) for value in own]))
    longest_x, most_rows, row_weight = shared.tolist()
    bound = abs(float(logits.row_scale)) * longest_x * float(longest_y)
    if not bound < 2 * room:
        return None
    terms = max(most_rows * layout.world_size, len(y_MD), 1)
    column_weight = float(_largest(logits.column_weights_M, -math.inf))
    finite = [value if math.isfinite(value) else 0.0 for value in (row_weight, column_weight)]
    return Bound(max(0.0, bound + math.log(terms) - room), *finite)


def bounded_sums(tiles: Tiles, logits: Logits, bound: Bound, layout: Layout) -> tuple[Tensor, Tensor] | None:
    """Rows (b,) and columns (M,) of log Σ exp from plain sums; None, on all ranks alike, if one of them underflows."""
    info = torch.finfo(tiles.dtype)
    least = info.tiny / info.eps
    row_sums_b, column_sums_M = _sums(tiles, logits, bound)
    lost = (~(row_sums_b > least)).sum()  # negated: NaN counts as lost
    shared = layout.sum_(torch.cat([column_sums_M, lost[None].to(column_sums_M)]))  # the sums and the decision
    if shared[-1] > 0 or not (shared[:-1] > least).all():
        return None
    rows_b, columns_M = row_sums_b.log_(), shared[:-1].log_()
    return rows_b.add_(bound.shift + bound.column_weight), columns_M.add_(bound.shift + bound.row_weight)


def bounded_gradients(tiles: Tiles, logits: Logits, bound: Bound, pulls: Pulls) -> tuple[Tensor | None, ...]:
    """∂L/∂a_ij = E_ij (u_i w_j + v_j w'_i): u, v = incoming gradient / sum; w, w' the weights.

    ∂a_ij/∂scale = s_ij, so Σ_ij G_ij s_ij = Σ_i <x_i, (G y)_i>.
    """
    u_b = pulls.row_gradient_b * (bound.shift + bound.column_weight - pulls.rows_b).exp()
    v_M = pulls.column_gradient_M * (bound.shift + bound.row_weight - pulls.columns_M).exp()
    fused = _fused(tiles, logits)
    found = fused.gradients(float(logits.row_scale), bound.shift, u_b, v_M) if fused else None
    gradients = Gradients(tiles, found)
    d_weights: tuple[Tensor | None, ...] = (None, None)
    if not logits.alike:
        d_weights = _add_weighted(gradients, tiles, logits, bound, u_b, v_M)
    elif not fused:
        space = tiles.scratch()
        for rows, columns, e in _exponentials(tiles, logits, bound):
            e.mul_(torch.add(u_b[rows, None], v_M[columns], out=shaped(space, *e.shape)))
            gradients.add(rows, columns, e)
    dscale = sum_of_products(tiles.x_bD, gradients.dx_bD).to(logits.row_scale)
    return *gradients.scaled(logits.row_scale), dscale, None, *d_weights


def _exponentials(tiles: Tiles, logits: Logits, bound: Bound) -> Iterator[tuple[slice, slice, Tensor]]:
    """E_ij tile by tile, 0 where left out."""
    for rows, columns, a in tiles.scores(logits.row_scale, bound.shift):
        e = a.exp_()
        tiles.leave_out_(rows, columns, 0.0, e)
        yield rows, columns, e


def _sums(tiles: Tiles, logits: Logits, bound: Bound) -> tuple[Tensor, Tensor]:
    """Σ_j E_ij w_j of own rows and Σ_i E_ij w'_i over own rows of all columns."""
    if fused := _fused(tiles, logits):
        return fused.sums(float(logits.row_scale), bound.shift)
    row_factors_b, column_factors_M = _factors(logits, bound)
    row_sums_b, column_sums_M = (e.new_zeros(len(e), dtype=tiles.dtype) for e in (tiles.x_bD, tiles.y_MD))
    for rows, columns, e in _exponentials(tiles, logits, bound):
        row_sums_b[rows] += e.sum(1) if column_factors_M is None else e @ column_factors_M[columns]
        column_sums_M[columns] += e.sum(0) if row_factors_b is None else row_factors_b[rows] @ e
    return row_sums_b, column_sums_M


def _add_weighted(
    gradients: Gradients, tiles: Tiles, logits: Logits, bound: Bound, u_b: Tensor, v_M: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients with log-weights, and those of the log-weights of rows and columns."""
    row_factors_b, column_factors_M = _factors(logits, bound)
    d_rows_b, d_columns_M = (
        None if w is None else torch.zeros_like(w) for w in (logits.row_weights_b, logits.column_weights_M)
    )
    for rows, columns, e in _exponentials(tiles, logits, bound):
        by_row, by_column = u_b[rows, None], v_M[columns]
        if column_factors_M is not None and d_columns_M is not None:
            by_row = by_row * column_factors_M[columns]
            d_columns_M[columns] += column_factors_M[columns] * (u_b[rows] @ e)
        if row_factors_b is not None and d_rows_b is not None:
            by_column = by_column * row_factors_b[rows, None]
            d_rows_b[rows] += row_factors_b[rows] * (e @ v_M[columns])
        gradients.add(rows, columns, e.mul_(by_row + by_column))
    return d_rows_b, d_columns_M


def _factors(logits: Logits, bound: Bound) -> tuple[Tensor | None, Tensor | None]:
    """w' of rows and w of columns, at most 1."""
    pairs = ((logits.row_weights_b, bound.row_weight), (logits.column_weights_M, bound.column_weight))
    rows, columns = (None if weights is None else (weights - largest).exp() for weights, largest in pairs)
    return rows, columns


def _largest(values: Tensor | None, least: float) -> Tensor:
    if values is None:
        return torch.tensor(least)
    return torch.cat([values.detach(), values.new_tensor([least])]).max()


@dataclass(frozen=True)
class _Fused:
    """The same sums and gradients by kernels."""

    kernels: ModuleType
    tiles: Tiles
    exclusion: Any

    def sums(self, scale: float, shift: float) -> tuple[Tensor, Tensor]:
        return self.kernels.exp_sums(self.tiles.x_bD, self.tiles.y_MD, scale, shift, self.exclusion)

    def gradients(self, scale: float, shift: float, u_b: Tensor, v_M: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.gradients(self.tiles.x_bD, self.tiles.y_MD, scale, shift, u_b, v_M, self.exclusion)


def _fused(tiles: Tiles, logits: Logits) -> _Fused | None:
    """Where the kernels serve: half precision on a GPU, no weights, no pairs left out one by one."""
    if not logits.alike or tiles.x_bD.dtype not in (torch.bfloat16, torch.float16):
        return None
    from train.losses import kernels  # triton takes its time, and a CPU has no use for it

    exclusion = tiles.exclusion or Exclusion()
    listed = [pairs for pairs in (exclusion.kept, exclusion.dropped) if pairs]
    one_by_one = len(listed) > 1 or any(pairs.own is None for pairs in listed)
    if one_by_one or len(exclusion.keys) > kernels.KEYS or not kernels.available(tiles.x_bD, tiles.y_MD):
        return None
    first_own = listed[0].own if listed else len(tiles.y_MD)  # beyond all columns: no own
    assert first_own is not None
    return _Fused(kernels, tiles, kernels.KernelExclusion(exclusion.keys, first_own, exclusion.dropped is not None))

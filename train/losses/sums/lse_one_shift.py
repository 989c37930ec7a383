"""log-sum-exp of rows and columns with one shift for all logits: one exponential per score, plain sums.

Legend: a_ij logits, b rows of this rank, M columns of all ranks. |a_ij| ≤ scale·max|x|·max|y| gives one shift c that
every rank knows. Let E_ij = exp(a_ij − c), 0 where a pair is left out, w_j and w'_i the weights of columns and rows
(exp of the log-weights, divided by their largest). Then the row sums Σ_j E_ij w_j and column sums Σ_i E_ij w'_i are
plain additions over tiles and ranks. On a GPU in half precision the Triton kernels of lse_triton.py compute the same;
where they cannot (see _kernels), such as with log-weights, the functions of fused_tiles.py do for bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import holds, may_assume
from dyad.train.losses.sums.fused_tiles import exp_gradients, exp_sums
from dyad.train.losses.sums.logits import Logits, Shares, UpstreamGradients, sum_of_products
from dyad.train.losses.sums.tiles import Block, Exclusion, Gradients, Tiles, part_of, shaped

if TYPE_CHECKING:
    from dyad.train.losses.sums.lse_triton import KernelExclusion


ROUNDED = 1.01  # no unit vector rounded to half precision is longer than this


@dataclass(frozen=True)
class Bound:
    """One shift c for all logits a_ij, and the largest log-weights of the rows and of the columns: 0-d float64 tensors.

    No sum of exp(a_ij − c) over a row or column overflows. Sums use the weights exp(log-weight − largest), at most 1;
    the largest log-weight is added to the log of the sum. row_weight, column_weight: None without log-weights.
    """

    shift: Tensor
    row_weight: Tensor | None
    column_weight: Tensor | None

    @property
    def of_rows(self) -> Tensor:
        """The shift plus the largest log-weight of columns, 0-d: what to add to the log of a row's sum."""
        return self.shift if self.column_weight is None else self.shift + self.column_weight

    @property
    def of_columns(self) -> Tensor:
        """The shift plus the largest log-weight of rows, 0-d: what to add to the log of a column's sum."""
        return self.shift if self.row_weight is None else self.shift + self.row_weight


def find_bound(tiles: Tiles, logits: Logits, layout: Layout, row_weights_B: Tensor | None) -> Bound | None:
    """Find one shift such that no row or column sum of w · exp(scale · score − shift) can exceed max^0.72.

    w is exp(log-weight − largest log-weight) ≤ 1, or 1 without log-weights. max is the largest finite float of the type
    of the sums. The limit is below max because backward divides by the sums, and gradient / sum must not underflow.
    tiles: the embeddings x of this rank's rows and y of all columns. logits: the scales of the scores, and the
    log-weights of the columns. layout: how the columns are distributed over ranks. row_weights_B: the log-weights of
    the rows of all ranks; None: all 0. Returns a Bound: the shift, the same on every rank, and the largest log-weight
    of the rows and of the columns. Returns None if each row and column has its own scale, or if the limit scale ·
    max|x| · max|y| of |scale · score| is infinite or too large for one shift; within collect_checks(speculative=True)
    of conditions.py it is assumed not to be. Every rank must call it.
    """
    if logits.column_scale_M is not None:
        return None
    x_bD, y_MD = tiles.x_bD, tiles.y_MD
    room = 0.72 * math.log(torch.finfo(tiles.dtype).max)
    longest_x, longest_y = (_largest(torch.linalg.vector_norm(e, dim=1, dtype=tiles.dtype), 0.0) for e in (x_bD, y_MD))
    # ranks may hold different numbers of rows: W · (most rows of a rank) is at least the number of rows of all ranks
    rows = torch.full_like(longest_x, len(x_bD))
    if layout.world_size > 1:
        longest, most = ROUNDED * longest_y, max(layout.sizes)
        if may_assume((longest_x <= longest) & (rows <= most)):
            longest_x, rows = longest, torch.full_like(rows, most)  # known to all ranks, so no collective is needed
        else:  # one maximum over ranks serves both numbers, in float64, in which row counts are exact
            longest_x, rows = layout.max_(torch.stack([longest_x, rows])).unbind()
    bound = logits.row_scale.detach().abs().double() * longest_x * longest_y
    if not holds(bound < 2 * room):
        return None
    terms = (rows * layout.world_size).clamp(min=max(len(y_MD), 1))
    weights = (row_weights_B, logits.column_weights_M)
    finite = (None if w is None else _largest(w, -math.inf).nan_to_num(0.0, 0.0, 0.0) for w in weights)
    return Bound((bound + terms.log() - room).clamp(min=0), *finite)


def one_shift_sums(
    tiles: Tiles,
    logits: Logits,
    bound: Bound,
    layout: Layout,
    shares: Shares,
    rows_alone: bool,
    kept: list[Block] | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the log-sum-exp of this rank's rows (b,) and of all columns (M,), from sums of exp(logit − shift).

    A third result is the sum over ranks of shares(row log-sums), as in log_partition. Column sums run over the rows of
    all ranks. tiles: the score matrix. logits: the scales and log-weights that make logits of the scores. bound: the
    shift, and the largest log-weights, from find_bound. layout: how the columns are distributed over ranks. rows_alone:
    whether the caller does not use the column sums, so that they may underflow. kept: a list to which the exponentials
    are appended, for one_shift_gradients; None: they are not kept. Returns None, on all ranks, if one of the sums
    underflows on any rank; within collect_checks(speculative=True) of conditions.py it is assumed that none does. Every
    rank must call it.
    """
    info = torch.finfo(tiles.dtype)
    least = info.tiny / info.eps  # a sum above it has lost no digit to subnormal terms
    row_sums_b, column_sums_M = _sums(tiles, logits, bound, kept)
    lost = (~(row_sums_b > least)).sum(dtype=tiles.dtype)  # negated, so that NaN counts as lost
    rows_b = row_sums_b.log_().add_(bound.of_rows)
    own = shares(rows_b)
    # one sum over ranks carries the column sums, the number of lost rows and the shares: all ranks decide alike
    shared = layout.sum_(torch.cat([column_sums_M, lost[None], own.flatten()]))
    columns_M, lost_1, shared = shared.split([len(column_sums_M), 1, own.numel()])
    if rows_alone:
        columns_M = columns_M.clamp(min=2 * least)
    if not holds((lost_1[0] <= 0) & (columns_M > least).all()):
        return None
    return rows_b, columns_M.log().add_(bound.of_columns), shared.view_as(own)


def one_shift_gradients(
    tiles: Tiles, logits: Logits, bound: Bound, upstream: UpstreamGradients, kept: list[Block] | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, the scale, None, the row log-weights and the column log-weights, in this order.

    The None stands for a scale per column, which these sums do not allow; absent log-weights get None too. tiles: the
    score matrix <x_i, y_j>. logits: the scale and log-weights. bound: the shift, and the largest log-weights. upstream:
    the log-sums of rows and columns, and the gradients of the loss L in these log-sums. kept: the exponentials that
    one_shift_sums kept, which are overwritten; None or empty: they are computed again.

    G_ij = ∂L/∂a_ij = E_ij (u_i w_j + v_j w'_i), with a_ij the logits, E_ij = exp(a_ij − shift), or 0 for pairs that are
    left out, u_i the upstream gradient of row i divided by the row's sum, v_j the same for column j, w_j and w'_i the
    weights of columns and rows. As ∂a_ij/∂scale is the score s_ij, the gradient of the scale is Σ_ij G_ij s_ij = Σ_i
    <x_i, (G y)_i>.
    """
    scale = logits.row_scale
    u_b = upstream.row_gradient_b * (bound.of_rows - upstream.rows_b).exp() * scale
    v_M = upstream.column_gradient_M * (bound.of_columns - upstream.columns_M).exp() * scale
    found = None
    if fused := _kernels(tiles, logits):
        kernels, exclusion = fused
        found = kernels.gradients(tiles.x_bD, tiles.y_MD, scale, bound.shift, u_b, v_M, exclusion)
    gradients = Gradients(tiles, found)
    d_weights = [None if w is None else torch.zeros_like(w) for w in (logits.row_weights_b, logits.column_weights_M)]
    if found is None:
        for rows, columns, g, *of_tile in _tile_gradients(tiles, kept, logits, bound, u_b, v_M):
            gradients.add(rows, columns, g)
            for total, part, d in zip(d_weights, (rows, columns), of_tile, strict=True):
                if total is not None:
                    total[part] += d
    dscale = sum_of_products(tiles.x_bD, gradients.dx_bD).to(scale) / scale
    return *gradients.scaled(None), dscale, None, *(None if d is None else d / scale for d in d_weights)


def _exponentials(tiles: Tiles, logits: Logits, bound: Bound, kept: list[Block] | None = None) -> Iterator[Block]:
    """Yield (row slice, column slice, E) of each tile (block) of the score matrix, and append each to `kept`.

    E_ij = exp(scale · <x_i, y_j> − shift), 0 for pairs that the sums leave out. The scale is that of `logits`, the
    shift that of `bound`. kept: None: the tiles are not kept, and the caller may overwrite E.
    """
    for rows, columns, a in tiles.scores(logits.row_scale, bound.shift, kept=kept is not None):
        e = a.exp_()
        tiles.leave_out_(rows, columns, 0.0, e)
        if kept is not None:
            kept.append((rows, columns, e))
        yield rows, columns, e


def _sums(tiles: Tiles, logits: Logits, bound: Bound, kept: list[Block] | None) -> tuple[Tensor, Tensor]:
    """Return Σ_j E_ij w_j of each row of this rank, (b,), and Σ_i E_ij w'_i over this rank's rows of each column, (M,).

    E_ij = exp(scale · <x_i, y_j> − shift), 0 for pairs that the sums leave out. The scale is that of `logits`, the
    shift that of `bound`. w_j and w'_i are the weights of columns and rows from _factors, 1 without log-weights. kept:
    a list to which the tiles of E are appended, unless GPU kernels compute the sums; None: they are not kept.
    """
    if fused := _kernels(tiles, logits):
        kernels, exclusion = fused
        return kernels.exp_sums(tiles.x_bD, tiles.y_MD, logits.row_scale, bound.shift, exclusion)
    row_factors_b, column_factors_M = _factors(logits, bound)
    row_sums_b, column_sums_M = (e.new_zeros(len(e), dtype=tiles.dtype) for e in (tiles.x_bD, tiles.y_MD))
    if tiles.half:
        for rows, columns, s in tiles.scores():
            factors = part_of(row_factors_b, rows), part_of(column_factors_M, columns)
            sums = exp_sums(s, logits.row_scale, bound.shift, tiles.left_out(rows, columns), *factors)
            row_sums_b[rows] += sums[0]
            column_sums_M[columns] += sums[1]
        return row_sums_b, column_sums_M
    for rows, columns, e in _exponentials(tiles, logits, bound, kept):
        row_sums_b[rows].add_(e.sum(1) if column_factors_M is None else e @ column_factors_M[columns])
        column_sums_M[columns].add_(e.sum(0) if row_factors_b is None else row_factors_b[rows] @ e)
    return row_sums_b, column_sums_M


def _tile_gradients(
    tiles: Tiles, kept: list[Block] | None, logits: Logits, bound: Bound, u_b: Tensor, v_M: Tensor
) -> Iterator[tuple[Any, ...]]:
    """Yield (row slice, column slice, G, gradients of log-weights of rows, of log-weights of columns) of each tile.

    G (r, c) is the gradient of the loss in the logits of a tile of r rows and c columns. The last two are (r,) and
    (c,), None if `logits` has no such weights. kept: the exponentials, which are overwritten; None or empty: they are
    computed again. u_b, v_M: the upstream gradient of each row and each column, divided by its sum of exponentials.
    bound: the shift of the exponents, and the largest log-weights.
    """
    row_factors_b, column_factors_M = _factors(logits, bound)
    if tiles.half:
        for rows, columns, s in tiles.scores():
            factors = part_of(row_factors_b, rows), part_of(column_factors_M, columns)
            given = logits.row_scale, bound.shift, tiles.left_out(rows, columns), u_b[rows], v_M[columns], *factors
            yield rows, columns, *exp_gradients(s, *given, tiles.gradient_dtype)
        return
    space = tiles.scratch()
    for rows, columns, e in kept or _exponentials(tiles, logits, bound):
        by_row, by_column, d_rows, d_columns = u_b[rows, None], v_M[columns], None, None
        if column_factors_M is not None:
            by_row = by_row * column_factors_M[columns]
            d_columns = column_factors_M[columns] * (u_b[rows] @ e)
        if row_factors_b is not None:
            by_column = by_column * row_factors_b[rows, None]
            d_rows = row_factors_b[rows] * (e @ v_M[columns])
        g = e.mul_(torch.add(by_row, by_column, out=shaped(space, *e.shape)))
        yield rows, columns, g, d_rows, d_columns


def _factors(logits: Logits, bound: Bound) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights exp(log-weight − largest log-weight) of rows (b,) and of columns (M,), at most 1.

    Each of the two is None if `logits` has no such log-weights. bound: holds both largest log-weights.
    """
    pairs = ((logits.row_weights_b, bound.row_weight), (logits.column_weights_M, bound.column_weight))
    rows, columns = (None if w is None or most is None else (w - most).exp() for w, most in pairs)
    return rows, columns


def _largest(values: Tensor, least: float) -> Tensor:
    """Return the largest element of `values`, or `least` if `values` is empty: 0-d, float64, without gradient."""
    return (values.detach().max() if len(values) else values.new_full((), least)).double()


def _kernels(tiles: Tiles, logits: Logits) -> tuple[ModuleType, KernelExclusion] | None:
    """Return the module of the Triton kernels, and the pairs to leave out; None if the kernels cannot be used.

    The kernels need bf16 or fp16, a GPU that Triton supports, and one scale without log-weights. Pairs are left out as
    a KernelExclusion says: those of equal keys, of two kinds at most, and one list at most, (i, first + i) for all rows
    i with a constant `first`, of pairs to drop or to keep.
    """
    if not logits.shared or tiles.x_bD.dtype not in (torch.bfloat16, torch.float16):
        return None
    from dyad.train.losses.sums import lse_triton as kernels  # importing triton takes long, and a CPU has no use for it

    exclusion = tiles.exclusion or Exclusion()
    listed = [pairs for pairs in (exclusion.kept, exclusion.dropped) if pairs]
    one_by_one = exclusion.known or exclusion.owners or len(listed) > 1 or any(pairs.own is None for pairs in listed)
    if one_by_one or len(exclusion.keys) > kernels.KEYS or not kernels.available(tiles.x_bD, tiles.y_MD):
        return None
    first_own = listed[0].own if listed else len(tiles.y_MD)  # beyond all columns: no row has an own column
    assert first_own is not None
    return kernels, kernels.KernelExclusion(exclusion.keys, first_own, exclusion.dropped is not None)

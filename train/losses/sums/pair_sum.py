"""Sums of any elementwise function over the score matrix, at memory linear in the batch.

The upstream gradient of a sum is one scalar. So the gradient is computed in the same pass as the value and multiplied
later: 6·b·M·D flops in all, where a second pass over the scores would need 8. (b rows of this rank, M columns of all
ranks, D width.)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dyad.train.losses.sums.functions import first_order_only
from dyad.train.losses.sums.fused_tiles import fused
from dyad.train.losses.sums.logits import sum_of_products
from dyad.train.losses.sums.tiles import Block, Exclusion, Gradients, Tiles, part_of

Function = Callable[..., Tensor]


def pair_sum(
    f: Function,
    x_bD: Tensor,
    y_MD: Tensor,
    exclusion: Exclusion | None = None,
    *,
    scale: Tensor | None = None,
    row_factors_b: Tensor | None = None,
    rows: Sequence[Tensor] = (),
    columns: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] = (),
    scores: Iterable[Block] | None = None,
) -> Tensor:
    """Return Σ_i w_i Σ_j f(s_ij, *rows_i, *columns_j, *parameters) over this rank's rows i and all columns j, 0-d.

    The result is this rank's share of the sum. f: differentiable, elementwise on a tile (r, c) of scores s = scale ·
    <x_i, y_j>, with rows as (r, 1), columns as (1, c) and parameters 0-d; it must be finite, with a finite derivative,
    also for pairs that are left out, and must not branch on values of tensors. scale: 0-d; None: 1. rows, columns,
    parameters: further inputs of f, tensors (b,), (M,) and 0-d. exclusion: pairs to leave out; None: no pair.
    row_factors_b: the factors w_i; None: all 1. scores: the tiles of <x_i, y_j>, if the caller has them and scale is
    None; None or empty: they are computed. x_bD: the row embeddings of this rank; y_MD: the column embeddings of all
    ranks; bf16, fp16, float32 or float64. Scores are float32, or float64 for float64 embeddings. Differentiable once in
    all tensors except w; gradients of inputs that all ranks share (y, scale, columns, parameters) are this rank's
    share, to be summed over ranks.
    """
    with torch.autocast(x_bD.device.type, enabled=False):
        return _PairSum.apply(  # pyright: ignore[reportReturnType]
            f, exclusion, row_factors_b, scores, (len(rows), len(columns)), x_bD, y_MD, scale,
            *rows, *columns, *parameters,
        )  # fmt: skip


class _PairSum(torch.autograd.Function):
    """The autograd function of pair_sum, a sum of f(score) over all pairs of a row and a column.

    Forward computes the gradient too; backward multiplies it by the upstream gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        f: Function,
        exclusion: Exclusion | None,
        row_factors_b: Tensor | None,
        known: Iterable[Block] | None,
        counts: tuple[int, int],
        x_bD: Tensor,
        y_MD: Tensor,
        scale: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        tiles, learning = Tiles(x_bD, y_MD, exclusion), any(ctx.needs_input_grad)
        scale, inputs = scale if scale is None else scale.detach(), tuple(v.detach() for v in inputs)
        gradients = Gradients(tiles) if learning else None
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[8:]) if needed]
        d_inputs: list[Any] = [torch.zeros_like(v) if i in wanted else None for i, v in enumerate(inputs)]
        total = x_bD.new_zeros((), dtype=torch.float64)
        for rows, columns, s in known or tiles.scores(None if tiles.half else scale):
            parts = [_part_of_tile(i, counts, rows, columns) for i in range(len(inputs))]
            tile_sum, g, *d_parts = _terms(
                s,
                scale if tiles.half else None,
                tiles.left_out(rows, columns),
                part_of(row_factors_b, rows),
                f,
                [v[part] for v, part in zip(inputs, parts, strict=True)],
                wanted,
                tiles.gradient_dtype if learning else None,
            )
            total += tile_sum
            if gradients is not None:
                gradients.add(rows, columns, g)
                for i, d_part in zip(wanted, d_parts, strict=True):
                    d_inputs[i][parts[i]] += d_part if inputs[i].ndim else d_part.sum()
        if gradients is not None:
            ctx.types = (x_bD.dtype, y_MD.dtype)
            dx_bD, dy_MD = gradients.dx_bD, gradients.dy_MD
            d_scale = None if scale is None else sum_of_products(x_bD, dx_bD)
            ctx.save_for_backward(scale, dx_bD, dy_MD, d_scale, *d_inputs)
        return total.to(tiles.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale, dx_bD, dy_MD, *of_inputs = ctx.saved_tensors
        x_type, y_type = ctx.types
        d_inputs = (None if d is None else gradient.to(d) * d for d in of_inputs)
        of_scores = gradient if scale is None else gradient * scale  # dx and dy are gradients in scaled embeddings
        return *(None,) * 5, (of_scores * dx_bD).to(x_type), (of_scores * dy_MD).to(y_type), *d_inputs


@fused
def _terms(
    s: Tensor,
    scale: Tensor | None,
    left_out: Tensor | None,
    factors_r: Tensor | None,
    f: Function,
    inputs: Sequence[Tensor],
    wanted: Sequence[int],
    dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Return the sum of f over a tile, 0-d, and its gradients in scale · s, (r, c) in `dtype`, and in some inputs of f.

    s: the tile's products <x_i, y_j>, (r, c). scale: 0-d; None if s is multiplied by it already. left_out: bool mask
    (r, c) of pairs that do not count; None: no pair. factors_r: factors of the rows; None: all 1. inputs: the tile's
    parts of the further inputs of f. wanted: the positions of the inputs that need a gradient. dtype: None if no
    gradients are needed; the result is then (sum, sum).
    """
    # 0-d inputs are expanded to (r, 1), so that their gradients too are sums over rows: one kernel
    inputs = [v if v.ndim else v.expand(len(s), 1) for v in inputs]

    def total(scores: Tensor, *changing: Tensor) -> Tensor:
        given = dict(zip(wanted, changing, strict=True))
        values = f(scores, *(given.get(i, v) for i, v in enumerate(inputs)))
        of_rows = (values if left_out is None else values.masked_fill(left_out, 0.0)).sum(1)
        return of_rows.sum() if factors_r is None else factors_r @ of_rows

    changing = [s if scale is None else s * scale, *(inputs[i] for i in wanted)]
    if dtype is None:
        return (value := total(*changing)), value
    value, gradients = cast("tuple[Tensor, Callable[[Tensor], Any]]", torch.func.vjp(total, *changing))
    g, *d_inputs = gradients(torch.ones_like(value))
    return value, g.to(dtype), *d_inputs


def _part_of_tile(index: int, counts: tuple[int, int], rows: slice, columns: slice) -> Any:
    """Return the index that selects the part of one input of f (see pair_sum) that belongs to a tile (r, c).

    The part has the shape (r, 1), (1, c) or 0-d. index: the position of the input; the first counts[0] inputs have one
    element per row, the next counts[1] one element per column, the rest are 0-d. rows, columns: the slices of the tile.
    """
    if index < counts[0]:
        return rows, None
    return (None, columns) if index < sum(counts) else ...

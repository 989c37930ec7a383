"""Sums of any elementwise function over the score matrix, at memory linear in the batch.

The upstream gradient of a sum is one scalar. So the gradient is computed in the same pass as the value and multiplied
later: 6·b·M·D flops in all, where a second pass over the scores would need 8. (b rows of this rank, M columns of all
ranks, D width.)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dyad.train.losses.sums.functions import first_order_only
from dyad.train.losses.sums.tiles import Block, Exclusion, Gradients, Tiles

Function = Callable[..., Tensor]


def pair_sum(
    f: Function,
    x_bD: Tensor,
    y_MD: Tensor,
    exclusion: Exclusion | None = None,
    *,
    row_factors_b: Tensor | None = None,
    rows: Sequence[Tensor] = (),
    columns: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] = (),
    scores: Iterable[Block] | None = None,
) -> Tensor:
    """Return Σ_i w_i Σ_j f(s_ij, *rows_i, *columns_j, *parameters) over this rank's rows i and all columns j, 0-d.

    The result is this rank's share of the sum. f: differentiable, elementwise on a tile (r, c) of scores s = <x_i,
    y_j>, with rows as (r, 1), columns as (1, c) and parameters 0-d; it must be finite, with a finite derivative, also
    for pairs that are left out. rows, columns, parameters: further inputs of f, tensors (b,), (M,) and 0-d. exclusion:
    pairs to leave out; None: no pair. row_factors_b: the factors w_i; None: all 1. scores: the tiles of scores where
    they are known; None: they are computed. x_bD: the row embeddings of this
    rank; y_MD: the column embeddings of all ranks; bf16, fp16, float32 or float64. Scores are float32 or better.
    Differentiable in all tensors except w; gradients of inputs that all ranks share (y, columns, parameters) are this
    rank's share, to be summed over ranks.
    """
    with torch.autocast(x_bD.device.type, enabled=False):
        return _PairSum.apply(  # pyright: ignore[reportReturnType]
            f, exclusion, row_factors_b, scores, (len(rows), len(columns)), x_bD, y_MD, *rows, *columns, *parameters
        )


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
        *inputs: Tensor,
    ) -> Tensor:
        tiles = Tiles(x_bD, y_MD, exclusion)
        learning = any(ctx.needs_input_grad)
        gradients = Gradients(tiles) if learning else None
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[7:]) if needed]
        d_inputs: list[Any] = [torch.zeros_like(v) if i in wanted else None for i, v in enumerate(inputs)]
        total = x_bD.new_zeros((), dtype=torch.float64)
        for rows, columns, s in known or tiles.scores():
            parts = [_part_of_tile(i, counts, rows, columns) for i in range(len(inputs))]
            s, leaves = s.detach(), [v[part].detach() for v, part in zip(inputs, parts, strict=True)]
            with torch.set_grad_enabled(learning):
                for leaf in (s, *(leaves[i] for i in wanted)):
                    leaf.requires_grad_(learning)
                values = f(s, *leaves)
                if exclusion and (mask := exclusion.mask(rows, columns)) is not None:
                    values = values.masked_fill(mask, 0.0)
                tile_sum = values.sum() if row_factors_b is None else row_factors_b[rows] @ values.sum(1)
            total += tile_sum.detach()
            if gradients is not None:
                g, *d_leaves = torch.autograd.grad(tile_sum, [s, *(leaves[i] for i in wanted)], materialize_grads=True)
                gradients.add(rows, columns, g)
                for i, d_leaf in zip(wanted, d_leaves, strict=True):
                    d_inputs[i][parts[i]] += d_leaf
        if gradients is not None:
            ctx.types = (x_bD.dtype, y_MD.dtype)
            ctx.save_for_backward(gradients.dx_bD, gradients.dy_MD, *d_inputs)
        return total.to(tiles.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx_bD, dy_MD, *d_inputs = ctx.saved_tensors
        x_type, y_type = ctx.types
        of_inputs = (None if d is None else gradient.to(d) * d for d in d_inputs)
        return *(None,) * 5, (gradient * dx_bD).to(x_type), (gradient * dy_MD).to(y_type), *of_inputs


def _part_of_tile(index: int, counts: tuple[int, int], rows: slice, columns: slice) -> Any:
    """Return the tensor index that takes the part of one input of f (see pair_sum) that belongs to a tile (r, c).

    The part has the shape (r, 1), (1, c) or 0-d. index: the position of the input; the first counts[0] inputs have one
    element per row, the next counts[1] one element per column, the rest are 0-d. rows, columns: the slices of the tile.
    """
    if index < counts[0]:
        return rows, None
    return (None, columns) if index < sum(counts) else ...

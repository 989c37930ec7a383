"""log-sum-exp over the rows and columns of the score matrix, at memory linear in the batch.

Legend: b rows of this rank, M columns of all ranks, D width; s_ij = <x_i, y_j>, logits a_ij = scale · s_ij.

Schedule (one strip): a rank owns its rows against all columns, so each score is computed once per pass on the whole
cluster: 2 matmuls of 2·b·M·D flops forward and backward for the scores, 2 for the gradients. Sent: the gathered y and
its gradient (by Layout.gather), the M column sums, and the gradient of the M columns.

Two ways to sum. Bounded: |a_ij| ≤ scale·max|x|·max|y| gives one shift that every rank knows, so one exp per score and
plain sums, over tiles and over ranks. General: a running maximum per row and column, and a scale of their own for rows
and columns. The first hands over to the second when a sum underflows or the bound is too wide for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.losses.bounded import bounded_gradients, bounded_sums, find_bound
from train.losses.functions import once
from train.losses.gather import Layout
from train.losses.general import general_gradients, general_sums
from train.losses.logits import Logits, Pulls
from train.losses.tiles import Exclusion, Tiles


@dataclass(frozen=True)
class Scales:
    """A scale 1/τ for every row (b,), used in the rows' sums, and for every column (M,), used in the columns'."""

    rows_b: Tensor
    columns_M: Tensor


def log_partition(
    x_bD: Tensor,
    y_MD: Tensor,
    scale: Tensor | Scales,
    layout: Layout,
    exclusion: Exclusion | None = None,
    *,
    row_weights_b: Tensor | None = None,
    column_weights_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rows_i = log Σ_j exp(a_ij + column_weights_j) of own rows, columns_j = log Σ_i exp(a_ij + row_weights_i) of all.

    x_bD, y_MD: bf16, fp16, float32 or float64, alike; y_MD the gathered columns. scale: 0-d, same on every rank, or
    Scales. Weights: additive, in the log domain. Returns (b,) and (M,) in float32 or better; −inf (with zero gradient)
    where everything is left out. Differentiable in x, y, scale and weights. The columns are the same on every rank, and
    any rank may use any of them: the gradients that arrive for them are summed over ranks. Gradients of what is
    global (y, scale, column weights) are this rank's share, to be summed over ranks, as Layout.gather does for y.
    A collective, forward and backward: every rank calls it, with any number of rows.
    """
    row_scale, column_scale = (scale.rows_b, scale.columns_M) if isinstance(scale, Scales) else (scale, None)
    with torch.autocast(x_bD.device.type, enabled=False):
        return _LogPartition.apply(  # pyright: ignore[reportReturnType]
            x_bD, y_MD, row_scale, column_scale, row_weights_b, column_weights_M, layout, exclusion
        )


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_bD: Tensor, y_MD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *logit_inputs, layout, exclusion = rest
        tiles, logits = Tiles(x_bD, y_MD, exclusion), Logits(*logit_inputs)
        bound = find_bound(tiles, logits, layout)
        sums = None if bound is None else bounded_sums(tiles, logits, bound, layout)
        rows_b, columns_M = sums or general_sums(tiles, logits, layout)
        ctx.bound = bound if sums else None
        ctx.layout, ctx.exclusion = layout, exclusion
        ctx.save_for_backward(x_bD, y_MD, *logit_inputs, rows_b, columns_M)
        return rows_b.clone(), columns_M.clone()

    @staticmethod
    @once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, row_gradient_b: Tensor, column_gradient_M: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_bD, y_MD, *logit_inputs, rows_b, columns_M = ctx.saved_tensors
        tiles, logits = Tiles(x_bD, y_MD, ctx.exclusion), Logits(*logit_inputs)
        pulls = Pulls(rows_b, columns_M, row_gradient_b, ctx.layout.sum_(column_gradient_M.clone()))
        with torch.autocast(x_bD.device.type, enabled=False):
            if ctx.bound is None:
                gradients = general_gradients(tiles, logits, pulls)
            else:
                gradients = bounded_gradients(tiles, logits, ctx.bound, pulls)
        return *gradients, None, None

"""log-sum-exp over the rows and columns of the score matrix, at memory linear in the batch.

Legend: b rows of this rank, M columns of all ranks, D width; scores s_ij = <x_i, y_j>, logits a_ij = scale · s_ij.

Schedule: a rank computes its own rows against all columns, so that all ranks together compute each score once per pass:
2 matmuls of 2·b·M·D flops for the scores (one in forward, one in backward) and 2 for the gradients. If all exponentials
fit into KEPT bytes of memory, 1 matmul for the scores suffices. Ranks send y and its gradient (by Layout.gather), the M
column sums, and the gradients of these sums.

There are two ways to sum. lse_one_shift.py: |a_ij| ≤ scale·max|x|·max|y| gives one shift that every rank knows, so that
one exp per score and plain sums over tiles and ranks suffice. lse_online.py: an online softmax keeps a running maximum
per row and column, and allows a scale for each row and column. It is used for such scales, when the bound is too wide,
and when a plain sum underflows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.functions import first_order_only
from dyad.train.losses.sums.logits import Logits, Shares, UpstreamGradients, no_shares
from dyad.train.losses.sums.lse_one_shift import find_bound, one_shift_gradients, one_shift_sums
from dyad.train.losses.sums.lse_online import online_gradients, online_sums
from dyad.train.losses.sums.tiles import Block, Exclusion, Tiles


@dataclass(frozen=True)
class Scales:
    """A separate scale 1/τ for each row of this rank, (b,), and for each column, (M,).

    The scores of row i are multiplied by rows_b[i] in the log-sum of row i, those of column j by columns_M[j] in the
    log-sum of column j.
    """

    rows_b: Tensor
    columns_M: Tensor


def log_partition(
    x_bD: Tensor,
    y_MD: Tensor,
    scale: Tensor | Scales,
    layout: Layout | None,
    exclusion: Exclusion | None = None,
    *,
    row_weights_B: Tensor | None = None,
    column_weights_M: Tensor | None = None,
    shares: Shares = no_shares,
    whole_gradients: bool = False,
) -> tuple[Tensor, ...]:
    """Return the log-sum-exp of weighted logits over each row of this rank, (b,), and over each column, (M,).

    rows_i = log Σ_j exp(a_ij + column_weights_j), columns_j = log Σ_i exp(a_ij + row_weights_i), with logits a_ij =
    scale · <x_i, y_j>; column sums run over the rows i of all ranks. x_bD: the row embeddings of this rank; y_MD: the
    column embeddings gathered from all ranks; both bf16, fp16, float32 or float64; if one is float64, so is the other.
    scale: 0-d, the same on every rank, or Scales (a scale for each row and column). layout: how the columns are
    distributed over ranks; None: nothing is sent, the caller uses row sums only, and the column results have no
    meaning. exclusion: pairs to leave out; None: no pair. row_weights_B (of all ranks, distributed as the columns),
    column_weights_M: log-weights; None: all 0. shares: a function from the log-sums of this rank's rows to further
    numbers, which the collective of the column sums sums over ranks too; their sum, without gradient, is a third
    result. The first two results are float32 or float64. A row or column whose pairs are all left out gets −inf, with
    gradient zero. Differentiable once in x, y, scale and log-weights; a backward with create_graph=True raises
    RuntimeError.

    The column results are the same on every rank, and a rank may use any column: backward sums the gradients of columns
    over ranks. whole_gradients: whether the gradients that reach each rank's column results are that sum already, so
    that backward does not sum. Gradients of inputs that all ranks share (y, scale, column weights) are this rank's
    share, to be summed over ranks, as Layout.gather does for y. With a layout, every rank must call it, forward and
    backward, with any number of rows.
    """
    row_scale, column_scale = (scale.rows_b, scale.columns_M) if isinstance(scale, Scales) else (scale, None)
    row_weights_b = row_weights_B
    if row_weights_B is not None and layout and layout.world_size > 1:
        row_weights_b = row_weights_B[layout.own]
    inputs = x_bD, y_MD, row_scale, column_scale, row_weights_b, column_weights_M
    with torch.autocast(x_bD.device.type, enabled=False):
        found = _LogPartition.apply(*inputs, layout, exclusion, row_weights_B, shares, whole_gradients)
    return found if shares is not no_shares else found[:2]  # pyright: ignore


class _LogPartition(torch.autograd.Function):
    """The autograd function of log_partition: the log-sum-exp of the rows and columns of a score matrix.

    Backward computes the tiles (blocks) of scores again instead of storing them, unless all of them take little memory.
    """

    @staticmethod
    def forward(ctx: Any, x_bD: Tensor, y_MD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *logit_inputs, given, exclusion, row_weights_B, shares, ctx.whole_gradients = rest
        layout = given or Layout((len(y_MD),), 0)  # of one rank: nothing is sent
        tiles, logits = Tiles(x_bD, y_MD, exclusion), Logits.detached(*logit_inputs)
        bound = find_bound(tiles, logits, layout, row_weights_B)
        kept: list[Block] | None = [] if tiles.keeps_scores and any(ctx.needs_input_grad) else None
        sums = None if bound is None else one_shift_sums(tiles, logits, bound, layout, shares, given is None, kept)
        rows_b, columns_M, shared = sums or online_sums(tiles, logits, layout, shares)
        ctx.mark_non_differentiable(shared)
        ctx.bound, ctx.kept = (bound, kept) if sums else (None, None)  # backward sums in the same way as forward
        ctx.layout, ctx.exclusion = layout, exclusion
        ctx.save_for_backward(x_bD, y_MD, *logit_inputs, rows_b, columns_M)
        return rows_b, columns_M, shared

    @staticmethod
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, row_gradient_b: Tensor, column_gradient_M: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_bD, y_MD, *logit_inputs, rows_b, columns_M = ctx.saved_tensors
        tiles, logits = Tiles(x_bD, y_MD, ctx.exclusion), Logits.detached(*logit_inputs)
        if not ctx.whole_gradients:
            column_gradient_M = ctx.layout.sum(column_gradient_M)
        if ctx.bound is None:  # sums may be without terms: exp(−inf − inf) = 0, where exp(−inf − (−inf)) is NaN
            rows_b, columns_M = (v.masked_fill(v == -math.inf, math.inf) for v in (rows_b, columns_M))
        upstream = UpstreamGradients(rows_b, columns_M, row_gradient_b, column_gradient_M)
        with torch.autocast(x_bD.device.type, enabled=False):
            if ctx.bound is None:
                gradients = online_gradients(tiles, logits, upstream)
            else:
                kept, ctx.kept = ctx.kept, None  # a second backward computes them again
                gradients = one_shift_gradients(tiles, logits, ctx.bound, upstream, kept)
        return *gradients, None, None, None, None, None

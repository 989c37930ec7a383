"""A loss of the log-sum-exp of each row of the score matrix, at memory linear in the batch.

Legend: b rows of this rank, M columns of all ranks, D width; scores s_ij = <x_i, y_j>, p_i that of row i's positive,
d_ij = scale · (s_ij − p_i), N_i = log Σ_j exp(d_ij).

The loss of a row depends on no other row. So for each strip (some rows against all columns) the loss and its gradient
are computed from the same exponentials, before the next strip: 6·b·M·D flops in all, where sums of rows and columns
(lse.py) need 8. The exponents are shifted by the largest logit of each row. A strip takes TILE · M floats, and more on
GPUs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dyad.train.losses.sums.functions import first_order_only
from dyad.train.losses.sums.fused_tiles import row_exponentials
from dyad.train.losses.sums.tiles import Exclusion, Gradients, Tiles, add_product, shaped, slices, wide_product

Rows = tuple[Tensor, Tensor, Tensor]


def row_losses(
    f: Callable[..., Tensor],
    x_bD: Tensor,
    y_MD: Tensor,
    p_b: Tensor,
    scale: Tensor,
    exclusion: Exclusion | None = None,
    *,
    rows: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] = (),
) -> Rows:
    """Return Σ_i f(N_i, *rows_i, *parameters) over this rank's rows i, 0-d; N, (b,); and the mean differences, (b,).

    N_i = log Σ_j exp(d_ij), d_ij = scale · (<x_i, y_j> − p_i). The mean difference of a row is Σ_j exp(d_ij − N_i)
    d_ij. x_bD, y_MD: the embeddings of this rank's rows and of all columns. p_b: the score of each row's positive.
    scale: 0-d. exclusion: pairs to leave out; None: no pair. f: differentiable, from vectors (r,) of r rows and 0-d
    parameters to (r,); it must be finite with slope 0 at N_i = −inf, the value of a row whose pairs are all left out.
    rows, parameters: further inputs of f, (b,) and 0-d each. The sum is differentiable once in all tensors; N and the
    means are not. Gradients of inputs that all ranks share (y, scale, parameters) are this rank's share, to be summed
    over ranks.
    """
    with torch.autocast(x_bD.device.type, enabled=False):
        return _RowLosses.apply(f, exclusion, len(rows), x_bD, y_MD, p_b, scale, *rows, *parameters)  # pyright: ignore[reportReturnType]


class _RowLosses(torch.autograd.Function):
    """The autograd function of row_losses.

    Forward computes the gradient too; backward multiplies it by the upstream gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        f: Callable[..., Tensor],
        exclusion: Exclusion | None,
        by_row: int,
        x_bD: Tensor,
        y_MD: Tensor,
        p_b: Tensor,
        scale: Tensor,
        *inputs: Tensor,
    ) -> Rows:
        tiles, learning, scale = Tiles(x_bD, y_MD, exclusion), any(ctx.needs_input_grad), scale.detach()
        y, lowest = tiles.operand(y_MD), torch.finfo(tiles.dtype).min / 4  # finite: a row without pairs gives no NaN
        gradients = Gradients(tiles)
        d_p_b, d_scale, *d_inputs = (torch.zeros_like(v) for v in (p_b, scale, *inputs))
        total = x_bD.new_zeros((), dtype=torch.float64)
        log_sums_b, means_b = (x_bD.new_empty(len(x_bD), dtype=tiles.dtype) for _ in range(2))
        space = x_bD.new_empty(min(tiles.strip, len(x_bD)) * len(y), dtype=tiles.dtype)
        for strip in slices(len(x_bD), tiles.strip):
            x = x_bD[strip].to(tiles.dtype) * scale
            a = wide_product(x_bD[strip] if tiles.half else x, y.T, shaped(space, len(x), len(y)))
            for columns in slices(len(y), tiles.size):
                tiles.leave_out_(strip, columns, lowest, a[:, columns])
            if tiles.half:
                top, sums, e = row_exponentials(a, scale, lowest, y.dtype)
            else:
                top = a.amax(1) if len(y) else a.new_full((len(x),), lowest)
                e = a.sub_(top[:, None]).exp_()
                sums = e.sum(1)
            own = scale * p_b[strip]
            log_sums_b[strip] = (top - own + sums.log()).masked_fill_(top <= lowest / 2, -math.inf)  # none is left
            weighted = wide_product(e, y, gradients.dx_bD[strip])  # the mean column under the softmax, times `sums`
            means_b[strip] = torch.linalg.vecdot(x, weighted) / sums - own
            parts = [strip if i < by_row else ... for i in range(len(inputs))]
            of_strip = (v[part] for v, part in zip(inputs, parts, strict=True))
            with torch.set_grad_enabled(learning):
                leaves = [v.detach().requires_grad_(learning) for v in (log_sums_b[strip], *of_strip)]
                loss = f(*leaves).sum()
            total += loss.detach()
            if learning:
                u, *d_leaves = torch.autograd.grad(loss, leaves, materialize_grads=True)
                for d_input, part, d_leaf in zip(d_inputs, parts, d_leaves, strict=True):
                    d_input[part] += d_leaf
                d_p_b[strip] = -scale * u
                d_scale += u @ means_b[strip] / scale
                weighted.mul_((u * scale / sums)[:, None])
                left = x.mul_((u / sums)[:, None]).to(e.dtype)
                add_product(gradients.dy_MD, e.T, left, write=strip.start == 0)
        if learning:
            ctx.types = [v.dtype for v in (x_bD, y_MD, p_b, scale, *inputs)]
            ctx.save_for_backward(gradients.dx_bD, gradients.dy_MD, d_p_b, d_scale, *d_inputs)
        ctx.mark_non_differentiable(log_sums_b, means_b)
        return total.to(tiles.dtype), log_sums_b, means_b

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = ((gradient * d).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.types, strict=True))
        return None, None, None, *found

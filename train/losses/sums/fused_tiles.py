"""Arithmetic on a tile of scores in one pass over its memory: on GPUs torch.compile makes a kernel of a function.

On CPUs, and where nothing can be compiled, the function runs as it stands. The functions here are those of the
log-sum-exp of rows and columns where Tiles.half; they have the formulas of lse_one_shift.py, lse_online.py and
row_losses.py. Legend: a tile has r rows and c columns; s (r, c) are its products, float32; left_out is a bool mask
(r, c) of pairs that sums leave out, None for no pair.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from dyad.data.base.errors import first_line

F = TypeVar("F", bound=Callable[..., Any])


@cache
def fuses(device: torch.device) -> bool:
    """Whether functions are compiled for `device`: a GPU that computes in bf16, and for which Triton can compile."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from dyad.train.losses.sums.triton_setup import compiles  # imports triton, for which a CPU has no use

    return compiles(device)


def fused(function: F) -> F:
    """Decorate a function of tensors of one device, the first of which is a tile, so that GPUs run it as one kernel.

    It must not branch on numbers of its tensors, nor change them. One that cannot be compiled runs as it stands, and a
    line says so.
    """

    compiled: Callable[..., Any] | None = None  # made at the first call: torch.compile imports for seconds
    failed = False

    @wraps(function)
    def run(tile: Tensor, *arguments: Any) -> Any:
        nonlocal compiled, failed
        if failed or not fuses(tile.device):
            return function(tile, *arguments)
        compiled = compiled or torch.compile(function, dynamic=True)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return compiled(tile, *arguments)
        except TorchDynamoException as error:  # of the compiler: the function did not run
            failed = True
            print(f"a part of the loss runs uncompiled, which takes longer: {first_line(error)}", file=sys.stderr)
            return function(tile, *arguments)

    return cast("F", run)


@fused
def exp_sums(
    s: Tensor,
    scale: Tensor,
    shift: Tensor,
    left_out: Tensor | None,
    row_factors_r: Tensor | None,
    column_factors_c: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return Σ_j E_ij w_j of the tile's rows, (r,), and Σ_i E_ij w'_i of its columns, (c,), E = exp(scale · s − shift).

    scale, shift: 0-d. row_factors_r, column_factors_c: w' and w; None: all 1.
    """
    e = _exponentials(s, scale, shift, left_out)
    of_rows = e if column_factors_c is None else e * column_factors_c
    of_columns = e if row_factors_r is None else e * row_factors_r[:, None]
    return of_rows.sum(1), of_columns.sum(0)


@fused
def exp_gradients(
    s: Tensor,
    scale: Tensor,
    shift: Tensor,
    left_out: Tensor | None,
    u_r: Tensor,
    v_c: Tensor,
    row_factors_r: Tensor | None,
    column_factors_c: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return G, (r, c) in `dtype`, and the gradients in the log-weights of the rows, (r,), and of the columns, (c,).

    Arguments and formulas as in exp_sums and lse_one_shift.one_shift_gradients; without factors: None.
    """
    e = _exponentials(s, scale, shift, left_out)
    by_row, by_column = u_r[:, None], v_c
    d_rows = d_columns = None
    if column_factors_c is not None:
        by_row = by_row * column_factors_c
        d_columns = column_factors_c * (u_r[:, None] * e).sum(0)
    if row_factors_r is not None:
        by_column = by_column * row_factors_r[:, None]
        d_rows = row_factors_r * (e * v_c).sum(1)
    return (e * (by_row + by_column)).to(dtype), d_rows, d_columns


def _exponentials(s: Tensor, scale: Tensor, shift: Tensor, left_out: Tensor | None) -> Tensor:
    e = (s * scale - shift).exp()
    return e if left_out is None else e.masked_fill(left_out, 0.0)


class TileLogits(NamedTuple):
    """The scales and log-weights of a tile, as in Logits: row_scale (r, 1) or 0-d, column_scale (c,) or 0-d."""

    row_scale: Tensor
    column_scale: Tensor
    row_weights_r: Tensor | None
    column_weights_c: Tensor | None

    def both(self, s: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the logits of the row sums and those of the column sums, (r, c) each; −inf where left out."""
        of_rows, of_columns = s * self.row_scale, s * self.column_scale
        of_rows = of_rows if self.column_weights_c is None else of_rows + self.column_weights_c
        of_columns = of_columns if self.row_weights_r is None else of_columns + self.row_weights_r[:, None]
        if left_out is None:
            return of_rows, of_columns
        return of_rows.masked_fill(left_out, -math.inf), of_columns.masked_fill(left_out, -math.inf)


@fused
def log_sums(s: Tensor, logits: TileLogits, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of the logits of the tile's rows, (r,), and of its columns, (c,)."""
    of_rows, of_columns = logits.both(s, left_out)
    return of_rows.logsumexp(1), of_columns.logsumexp(0)


@fused
def log_sum_gradients(
    s: Tensor,
    logits: TileLogits,
    left_out: Tensor | None,
    sums: tuple[Tensor, Tensor],
    upstream: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient in s, (r, c) in `dtype`, and those of row and column scales and log-weights: (r,) or (c,).

    sums: the log-sums of the rows, (r,), and columns, (c,); upstream: the gradients of the loss in them. The formulas
    are those of lse_online.online_gradients.
    """
    of_rows, of_columns = logits.both(s, left_out)
    p = (of_rows - sums[0][:, None]).exp() * upstream[0][:, None]
    q = (of_columns - sums[1]).exp() * upstream[1]
    g = (p * logits.row_scale + q * logits.column_scale).to(dtype)
    return g, (p * s).sum(1), (q * s).sum(0), q.sum(1), p.sum(0)


@fused
def row_exponentials(s: Tensor, scale: Tensor, lowest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit of each row, (r,), and of E = exp(logit − largest) the row sums, (r,), and E in `dtype`.

    The logits are scale · s; `lowest` and less stand for pairs that are left out.
    """
    a = (s * scale).clamp(min=lowest)
    top = a.amax(1)
    e = (a - top[:, None]).exp()
    return top, e.sum(1), e.to(dtype)

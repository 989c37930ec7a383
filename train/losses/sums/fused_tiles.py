"""Functions of a tile (a block of the score matrix), each fused by torch.compile to one kernel on GPUs.

On CPUs, and where nothing can be compiled, a function runs uncompiled. The functions of this file compute log-sum-exps
of rows and columns for bf16 embeddings (Tiles.half), by the formulas of lse_one_shift.py, lse_online.py and
row_losses.py. Legend: a tile has r rows and c columns; s (r, c) are its scores, float32; left_out is a bool mask (r, c)
of pairs that sums leave out, None for no pair.
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
    """Whether functions are compiled for `device`: a GPU that computes in bf16 and can run the loss's Triton kernels.

    The latter is triton_setup.compiles. The first call for a GPU compiles a small kernel; if that fails, the reason is
    printed to stderr.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from dyad.train.losses.sums.triton_setup import compiles  # imports triton, for which a CPU has no use

    return compiles(device)


def fused(function: F) -> F:
    """Decorate a function of tensors, the first of which is a tile of scores, so that torch.compile fuses it on GPUs.

    All tensors are on one device. The function must not branch on values of its tensors, nor change them in place. On
    other devices, and with a line on stderr where compilation fails, it runs uncompiled.
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

    s: the tile's scores (r, c), float32. scale, shift: 0-d. left_out: bool (r, c), True where E is 0; None: nowhere.
    row_factors_r, column_factors_c: w' and w; None: all 1.
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
    """Return G, the gradient in a tile's logits, (r, c) in `dtype`, and those in the log-weights of rows and columns.

    The latter are (r,) and (c,), None without factors. G_ij = E_ij (u_i w_j + v_j w'_i), with E, w, w' and their
    arguments as in exp_sums. u_r, v_c: the upstream gradient of each row and each column, divided by its sum of
    exp_sums over all tiles.
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
    """The part of Logits (scales and log-weights) of a tile of r rows and c columns.

    row_scale: (r, 1) or 0-d, of the row sums. column_scale: (c,) or 0-d, of the column sums. row_weights_r: log-weights
    in the column sums; column_weights_c: log-weights in the row sums; None: all 0.
    """

    row_scale: Tensor
    column_scale: Tensor
    row_weights_r: Tensor | None
    column_weights_c: Tensor | None

    def both(self, s: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the logits of the row sums and of the column sums, (r, c) each, −inf where `left_out` is True.

        s: the tile's scores (r, c). left_out: bool (r, c); None: no pair is left out.
        """
        of_rows, of_columns = s * self.row_scale, s * self.column_scale
        of_rows = of_rows if self.column_weights_c is None else of_rows + self.column_weights_c
        of_columns = of_columns if self.row_weights_r is None else of_columns + self.row_weights_r[:, None]
        if left_out is None:
            return of_rows, of_columns
        return of_rows.masked_fill(left_out, -math.inf), of_columns.masked_fill(left_out, -math.inf)


@fused
def log_sums(s: Tensor, logits: TileLogits, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of the logits of each row of a tile, (r,), and of each column, (c,).

    s: the tile's scores (r, c), float32. left_out: a bool mask (r, c) of pairs that sums leave out; None: no pair.
    """
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
    """Return the gradients in s, (r, c) in `dtype`, in row and column scales, and in row and column log-weights.

    The last four are (r,), (c,), (r,) and (c,). s: the tile's scores (r, c). left_out: bool (r, c), pairs that sums
    leave out; None: no pair. sums: the log-sums of the whole rows, (r,), and columns, (c,); upstream: the gradients of
    the loss in these log-sums. The formulas are those of lse_online.online_gradients.
    """
    of_rows, of_columns = logits.both(s, left_out)
    p = (of_rows - sums[0][:, None]).exp() * upstream[0][:, None]
    q = (of_columns - sums[1]).exp() * upstream[1]
    g = (p * logits.row_scale + q * logits.column_scale).to(dtype)
    return g, (p * s).sum(1), (q * s).sum(0), q.sum(1), p.sum(0)


@fused
def row_exponentials(s: Tensor, scale: Tensor, lowest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit of each row, (r,), the row sums of E = exp(logit − largest), (r,), and E in `dtype`.

    The logits are scale · s, raised to `lowest` where they are below. s: scores (r, c), float32; the caller has set
    those of pairs that sums leave out to `lowest`. scale: 0-d.
    """
    a = (s * scale).clamp(min=lowest)
    top = a.amax(1)
    e = (a - top[:, None]).exp()
    return top, e.sum(1), e.to(dtype)

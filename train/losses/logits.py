"""How scores become the logits of the two sums, and what arrives for the sums in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses.tiles import strips


@dataclass(frozen=True)
class Logits:
    """How scores become logits: those of the rows' sums and those of the columns' sums."""

    row_scale: Tensor  # 0-d for both, or (b,)
    column_scale_M: Tensor | None
    row_weights_b: Tensor | None
    column_weights_M: Tensor | None

    @property
    def alike(self) -> bool:
        """Whether the rows' and the columns' sums are over the same logits."""
        return self.column_scale_M is None and self.row_weights_b is None and self.column_weights_M is None

    def of_rows(self, s: Tensor, rows: slice, columns: slice, out: Tensor) -> Tensor:
        scale = self.row_scale if self.row_scale.ndim == 0 else self.row_scale[rows, None]
        a = torch.mul(s, scale, out=out)
        return a if self.column_weights_M is None else a.add_(self.column_weights_M[columns])

    def of_columns(self, s: Tensor, rows: slice, columns: slice, out: Tensor) -> Tensor:
        a = torch.mul(s, self.row_scale if self.column_scale_M is None else self.column_scale_M[columns], out=out)
        return a if self.row_weights_b is None else a.add_(self.row_weights_b[rows, None])


class Pulls:
    """Values of the rows' and columns' sums and the gradients that arrive for them. What is empty pulls at nothing."""

    def __init__(self, rows_b: Tensor, columns_M: Tensor, row_gradient_b: Tensor, column_gradient_M: Tensor) -> None:
        # exp(−inf − inf) = 0, where exp(−inf − (−inf)) is not a number
        self.rows_b, self.columns_M = (v.masked_fill(v == -math.inf, math.inf) for v in (rows_b, columns_M))
        self.row_gradient_b, self.column_gradient_M = row_gradient_b, column_gradient_M


def sum_of_products(x_bD: Tensor, dx_bD: Tensor) -> Tensor:
    """Σ_i <x_i, dx_i>, without a copy of either."""
    return sum(((x_bD[rows] * dx_bD[rows]).sum() for rows in strips(len(x_bD))), start=dx_bD.new_zeros(()))

"""Convert scores to the logits of row sums and column sums, and hold the gradients that arrive for these sums.

A row sum is a log-sum-exp of the logits over all columns of one row; a column sum runs over all rows of one column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dyad.train.losses.sums.fused_tiles import TileLogits
from dyad.train.losses.sums.tiles import part_of, slices

Shares = Callable[[Tensor], Tensor]  # the log-sums of this rank's rows (b,) → its shares of numbers of any shape


def no_shares(rows_b: Tensor) -> Tensor:
    """Return an empty tensor: the default of the argument `shares` of log_partition, for no further numbers to sum."""
    return rows_b.new_empty(0)


@dataclass(frozen=True)
class Logits:
    """The scales and log-weights that convert scores s_ij to the logits of the row sums and of the column sums.

    row_scale: one scale, 0-d, for both kinds of sums; or (b,) for the row sums, with column_scale_M, (M,), for the
    column sums. row_weights_b: log-weights added to the logits of the column sums. column_weights_M: log-weights added
    to the logits of the row sums.
    """

    row_scale: Tensor
    column_scale_M: Tensor | None
    row_weights_b: Tensor | None
    column_weights_M: Tensor | None

    @staticmethod
    def detached(*inputs: Tensor | None) -> Logits:
        """Make Logits of the detached tensors, given in the order of the fields, for use in an autograd function."""
        return Logits(*(None if v is None else v.detach() for v in inputs))  # pyright: ignore[reportArgumentType]

    @property
    def shared(self) -> bool:
        """Whether row sums and column sums have the same logits: one scale for all pairs, and no log-weights."""
        return self.column_scale_M is None and self.row_weights_b is None and self.column_weights_M is None

    def of_tile(self, rows: slice, columns: slice) -> TileLogits:
        """Return the scales and log-weights of a tile. rows, columns: the slices of the matrix that the tile covers."""
        row_scale = self.row_scale if self.row_scale.ndim == 0 else self.row_scale[rows, None]
        column_scale = self.row_scale if self.column_scale_M is None else self.column_scale_M[columns]
        weights = part_of(self.row_weights_b, rows), part_of(self.column_weights_M, columns)
        return TileLogits(row_scale, column_scale, *weights)

    def of_rows(self, s: Tensor, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """Compute a tile's logits of the row sums (log-sum-exp over columns) into `out`, and return it.

        The logit of row i and column j is scale_i · s_ij plus the log-weight of column j (0 without log-weights). s:
        the scores of the tile, a block of the score matrix. rows, columns: the slices of the matrix that the tile
        covers.
        """
        scale = self.row_scale if self.row_scale.ndim == 0 else self.row_scale[rows, None]
        a = torch.mul(s, scale, out=out)
        return a if self.column_weights_M is None else a.add_(self.column_weights_M[columns])

    def of_columns(self, s: Tensor, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """Compute a tile's logits of the column sums (log-sum-exp over rows) into `out`, and return it.

        The logit of row i and column j is scale_j · s_ij plus the log-weight of row i (0 without log-weights). s: the
        scores of the tile, a block of the score matrix. rows, columns: the slices of the matrix that the tile covers.
        """
        a = torch.mul(s, self.row_scale if self.column_scale_M is None else self.column_scale_M[columns], out=out)
        return a if self.row_weights_b is None else a.add_(self.row_weights_b[rows, None])


@dataclass(frozen=True)
class UpstreamGradients:
    """The log-sum-exp of each row (b,) and column (M,) of logits, and the gradients of the loss in these log-sums."""

    rows_b: Tensor
    columns_M: Tensor
    row_gradient_b: Tensor
    column_gradient_M: Tensor


def sum_of_products(x_bD: Tensor, dx_bD: Tensor) -> Tensor:
    """Return Σ_i <x_i, dx_i> over the rows i of both tensors, 0-d, in the dtype of dx_bD, without a tensor (b, D)."""
    parts = (torch.dot(x_bD[rows].to(dx_bD.dtype).flatten(), dx_bD[rows].flatten()) for rows in slices(len(x_bD)))
    return sum(parts, start=dx_bD.new_zeros(()))

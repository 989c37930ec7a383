"""Further rows: x items beside the pairs, such as wrong images, which are negatives of the y of all pairs.

They have no positive and are no anchors; they are only added to the sums of columns (over the x for each y) and, in a
logistic loss, to the noise pairs. If x_keys are given and duplicates is not keep, a further row that equals the x of a
pair is no negative of the y of this pair. A rank computes the scores of its own further rows with the y of all ranks;
only the objective coce gathers further rows.

Legend: k further rows of this rank, any number on other ranks; B columns of the pairs of all ranks, the first of M ≥ B
columns; D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dyad.train.losses.gathered.arguments import as_int64
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.lse import Scales, log_partition
from dyad.train.losses.sums.tiles import Exclusion


@dataclass(frozen=True)
class XNegatives:
    """x items of this rank beside those of the pairs, k ≥ 0 in total, any number per row: negatives of the pairs' y.

    embeddings_kD: (k, D). row_k (k,) int64: index of the local row that each item belongs to. keys_k (k,) int64:
    content keys, equal for equal items; needed if the objective compares keys of x.
    """

    embeddings_kD: Tensor
    row_k: Tensor
    keys_k: Tensor | None = None

    def checked(self) -> XNegatives:
        """Return these x items with row indices and keys in int64. Raises ValueError for a wrong shape or type of them.

        The width of the embeddings is checked by Objective.of_embeddings, the range of row_k by gather_batch.
        """
        e_kD, row_k, keys_k = self.embeddings_kD, self.row_k, self.keys_k
        row_k = as_int64("x_negatives.row_k", row_k, e_kD.device)
        keys_k = as_int64("x_negatives.keys_k", keys_k, e_kD.device)
        for name, values_k in (("row_k", row_k), ("keys_k", keys_k)):
            if values_k is not None and len(values_k) != len(e_kD):
                raise ValueError(
                    f"x_negatives.{name} must be ({len(e_kD)},), one for each item, not ({len(values_k)},)"
                )
        return XNegatives(e_kD, row_k, keys_k)


@dataclass(frozen=True)
class FurtherRows:
    """Further rows of this rank: k x items beside the pairs, as negatives of the y of the B pairs of all ranks.

    x_kD: their embeddings. keys_k (k,) int64: their content keys; None: x items are not compared. exclusion: the pairs
    (further row, column) that the sums leave out, because the further row and the x of the column's pair have equal
    keys or, with candidates=list, because the further row belongs to another row; None: no pair.
    """

    x_kD: Tensor
    keys_k: Tensor | None = None
    exclusion: Exclusion | None = None

    @staticmethod
    def of(given: XNegatives, first_row: int, x_keys_B: Tensor | None, owner_B: Tensor | None) -> FurtherRows:
        """Return the further rows (x items beside the pairs) of this rank with the pairs that sums over them leave out.

        given: the x items as the caller gave them. first_row: global index of this rank's first row. x_keys_B: the
        content keys of the x of all pairs, int64 (B,); None: x items are not compared. owner_B: the global index of the
        row to whose list the column of each pair belongs, int64 (B,); None: there are no lists. Raises ValueError if
        x_keys_B is given and `given` has no keys.
        """
        if x_keys_B is not None and given.keys_k is None:
            raise ValueError("x_keys are given and further rows have none: give XNegatives(…, keys_k) too")
        keys_k = None if x_keys_B is None else given.keys_k
        keys = () if x_keys_B is None or keys_k is None else ((keys_k, x_keys_B),)
        owners = None if owner_B is None else (given.row_k + first_row, owner_B)
        return FurtherRows(given.embeddings_kD, keys_k, Exclusion(keys, owners=owners) if keys or owners else None)

    def counts(self, columns: Layout) -> Tensor:
        """Count the further rows of all ranks over which the sum of each column runs: (B,) int64.

        columns: how the B columns of the pairs are distributed over ranks. Every rank must call it.
        """
        k, B, device = len(self.x_kD), columns.total, self.x_kD.device
        counts_B = torch.full((B,), k, device=device)
        if self.exclusion is not None:
            counts_B -= self.exclusion.counts(k, B, device)[1]
        return columns.sum_(counts_B)

    def joined(
        self, columns_M: Tensor, y_MD: Tensor, scale: Tensor | Scales, columns: Layout, whole_gradients: bool = False
    ) -> Tensor:
        """Return the log-sums of all columns, (M,), with the further rows of all ranks added to the rows of the pairs.

        columns_M: the log-sum-exp of each column over the rows of the pairs of all ranks. The columns after the B of
        the pairs keep their value. y_MD: the embeddings of the columns. scale: 1/τ, 0-d, or Scales, of which only
        columns_M is read. whole_gradients: whether the gradient that reaches the result on a rank is the sum over ranks
        already. columns: how the B columns of the pairs are distributed over ranks. Every rank must call it, forward
        and backward.
        """
        B = columns.total
        if isinstance(scale, Scales):
            scale = Scales(scale.rows_b.new_ones(len(self.x_kD)), scale.columns_M[:B])
        how = scale, columns, self.exclusion
        _, further_B = log_partition(self.x_kD, y_MD[:B], *how, whole_gradients=whole_gradients)
        return torch.cat([_log_of_sum(columns_M[:B], further_B), columns_M[B:]])


def _log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return log(e^a + e^b) elementwise, with gradient 0 where a and b are both −inf."""
    empty = (a == -math.inf) & (b == -math.inf)
    return torch.logaddexp(a.masked_fill(empty, 0.0), b.masked_fill(empty, 0.0)).masked_fill(empty, -math.inf)

"""Further rows: x items beside the pairs, such as wrong images, which are negatives of the y of all pairs.

They have no positive and are no anchors, so only the sums of columns, y→x, run over them too: X̂_j, the sample of x for
y_j, need not be the x of the pairs alone. One that is equal to the x of a pair is no negative of its y, unless
duplicates=keep. A rank computes its own further rows against the y of all ranks.

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
    """Further x items of this rank, k ≥ 0 in total, any number per row. They are negatives of the y of every pair.

    embeddings_kD; row_k: the index of the local row that each item belongs to, int64; keys_k: content keys, int64,
    equal for equal items.
    """

    embeddings_kD: Tensor
    row_k: Tensor
    keys_k: Tensor | None = None

    def checked(self) -> XNegatives:
        """Return these x items with row indices and keys in int64. Raises ValueError for a wrong shape or type."""
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
    """The further rows of this rank. x_kD: embeddings; keys_k: their content keys; None: x items are not compared.

    exclusion: the pairs with the B columns that the sums leave out: further rows equal to the x of the column's own
    pair, and those of another column's list; None: no pair.
    """

    x_kD: Tensor
    keys_k: Tensor | None = None
    exclusion: Exclusion | None = None

    @staticmethod
    def of(given: XNegatives, first_row: int, x_keys_B: Tensor | None, owner_B: Tensor | None) -> FurtherRows:
        """Return the further rows of this rank with the pairs that their sums leave out.

        first_row: number of this rank's first row among those of all ranks. x_keys_B: the content keys of the x of all
        pairs; None: x items are not compared. owner_B: the row to whose list the column of each pair belongs; None:
        there are no lists. Raises ValueError if there are keys of the pairs alone.
        """
        if x_keys_B is not None and given.keys_k is None:
            raise ValueError("x_keys are given and further rows have none: give XNegatives(…, keys_k) too")
        keys_k = None if x_keys_B is None else given.keys_k
        keys = () if x_keys_B is None or keys_k is None else ((keys_k, x_keys_B),)
        owners = None if owner_B is None else (given.row_k + first_row, owner_B)
        return FurtherRows(given.embeddings_kD, keys_k, Exclusion(keys, owners=owners) if keys or owners else None)

    def counts(self, columns: Layout) -> Tensor:
        """Count the further rows of all ranks that are candidates of each column, (B,) int64. Every rank must call it.

        columns: how the columns of the pairs are distributed over ranks.
        """
        k, B, device = len(self.x_kD), columns.total, self.x_kD.device
        counts_B = torch.full((B,), k, device=device)
        if self.exclusion is not None:
            counts_B -= self.exclusion.counts(k, B, device)[1]
        return columns.sum_(counts_B)

    def joined(
        self, columns_M: Tensor, y_MD: Tensor, scale: Tensor | Scales, columns: Layout, whole_gradients: bool = False
    ) -> Tensor:
        """Add the further rows of all ranks to the log-sums of the columns over the rows of the pairs, columns_M, (M,).

        Returns those of all columns; columns beside the pairs, which are no anchors, keep theirs. scale: as of
        log_partition, the scales of rows are not read; columns: as of `counts`; whole_gradients: as of log_partition.
        Every rank must call it, forward and backward.
        """
        B = columns.total
        if isinstance(scale, Scales):
            scale = Scales(scale.rows_b.new_ones(len(self.x_kD)), scale.columns_M[:B])
        how = scale, columns, self.exclusion
        _, further_B = log_partition(self.x_kD, y_MD[:B], *how, whole_gradients=whole_gradients)
        return torch.cat([_log_of_sum(columns_M[:B], further_B), columns_M[B:]])


def _log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return log(e^a + e^b), with gradient 0 where both are −inf."""
    empty = (a == -math.inf) & (b == -math.inf)
    return torch.logaddexp(a.masked_fill(empty, 0.0), b.masked_fill(empty, 0.0)).masked_fill(empty, -math.inf)

"""Further rows: x items beside the pairs, such as wrong pictures, which are negatives of the y of all pairs.

They have no positive and are no anchors, so only the sums of columns, y→x, run over them too: X̂_j, the sample of x for
y_j, need not be the x of the pairs alone. One that is equal to the x of a pair is no negative of its y, unless
duplicates=keep. A rank computes its own further rows against the y of all ranks.

Legend: k further rows of this rank, any number on other ranks; B columns of the pairs of all ranks, the first of M ≥ B
columns; D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.lse import Scales, log_partition
from dyad.train.losses.sums.tiles import Exclusion


@dataclass(frozen=True)
class FurtherRows:
    """The further rows of this rank. x_kD: embeddings; keys_k: their content keys; None: x items are not compared.

    exclusion: the pairs with the B columns that the sums leave out: further rows equal to the x of the column's own
    pair, and those of another column's list; None: no pair.
    """

    x_kD: Tensor
    keys_k: Tensor | None = None
    exclusion: Exclusion | None = None

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
        self,
        columns_M: Tensor,
        y_MD: Tensor,
        scale: Tensor | Scales,
        columns: Layout,
        whole_gradients: bool = False,
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

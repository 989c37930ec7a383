"""The losses ℓ(s_rj − p_r) of candidates and positives, from which optimised certainty equivalents are computed.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def hinge(d, margin):  # d_rj = s_rj − p_r
    return (margin + d).clamp(min=0)

def squared_hinge(d, margin):
    return hinge(d, margin).square()

def logistic(d):
    return torch.logaddexp(d, torch.zeros_like(d))  # log(1 + e^d)
```

Legend: R rows of this rank, r one of them or, as a shape, the number of rows in a slice; M columns of all ranks; s_rj
the score of column j, p_r that of the row's positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses.options.choices import PairLoss
from dyad.train.losses.options.robust import RobustOptions
from dyad.train.losses.sums.functions import weighted
from dyad.train.losses.sums.pair_sum import Function, pair_sum
from dyad.train.losses.sums.tiles import Block, Exclusion, Tiles, slices

Elementwise = Callable[[Tensor], Tensor]


def identity(d: Tensor) -> Tensor:
    return d


def pair_loss_of(options: RobustOptions) -> Elementwise:
    """Return the pair loss ℓ(d) of the score difference d = s_ij − s_ip, elementwise and non-decreasing.

    s_ij is the score of a candidate j of anchor i, s_ip that of its positive p. options.pair_loss names the function.
    """
    losses: dict[PairLoss, Elementwise] = {
        PairLoss.identity: identity,
        PairLoss.hinge: lambda d: F.relu(options.margin + d),
        PairLoss.squared_hinge: lambda d: F.relu(options.margin + d).square(),
        PairLoss.logistic: lambda d: -F.logsigmoid(-d),
    }
    return losses[options.pair_loss]


@dataclass(frozen=True, kw_only=True)
class RepeatedRows(Exclusion):
    """The excluded pairs of R rows, each of which is a copy of a row of the batch.

    base: the excluded pairs of the batch. base_rows: the number of rows of the batch. row_R (R,) int64: for each of the
    R rows, the index of the batch row that it copies, ascending.
    """

    base: Exclusion
    base_rows: int
    row_R: Tensor

    def mask(self, rows: slice, columns: slice) -> Tensor | None:
        i = self.row_R[rows]
        first, last = int(i[0]), int(i[-1])
        mask = torch.zeros(len(i), columns.stop - columns.start, dtype=torch.bool, device=i.device)
        for part in slices(self.base_rows):
            if part.start <= last and first < part.stop and (of_base := self.base.mask(part, columns)) is not None:
                here = (i >= part.start) & (i < part.stop)
                mask[here] = of_base[i[here] - part.start]
        return mask


@dataclass(frozen=True)
class Losses:
    """The losses ℓ(s_rj − p_r) of R rows over the columns j that row r does not exclude.

    ℓ: pair_loss. s_rj = <x_r, y_j>: scores. p_R: the score of each row's positive. counts_R: the number m_r of columns
    that each row does not exclude. weights_R: the weight of each row in a mean over rows, 0 for a row that is skipped.
    exclusion: the excluded pairs; None: no pair. relevance_R: a further factor of each row's OCE (optimised certainty
    equivalent); None: all 1.
    """

    pair_loss: Elementwise
    x_RD: Tensor
    y_MD: Tensor
    p_R: Tensor
    counts_R: Tensor
    weights_R: Tensor
    exclusion: Exclusion | None = None
    relevance_R: Tensor | None = None

    @property
    def factors_R(self) -> Tensor:
        """The factor of each row in the weighted sum of the rows' OCE (optimised certainty equivalent), (R,)."""
        return weighted(self.weights_R, self.relevance_R)

    @property
    def mean_relevance(self) -> Tensor | float:
        """This rank's share of the mean relevance of the rows, 0-d or 1.0 without relevance.

        The mean of the shares over ranks is the mean relevance of the rows that are not skipped.
        """
        return 1.0 if self.relevance_R is None else 1 - self.mean(1 - self.relevance_R)

    @property
    def m_R(self) -> Tensor:
        """The number of columns that each row does not exclude, as float (R,); 1 for a row without columns."""
        return self.counts_R.clamp(min=1).to(self.p_R.dtype)

    def scores(self, rows: slice) -> Iterator[Tensor]:
        """Yield the scores of a slice of the rows with all columns, one (r, c) tile of c columns after the other.

        r: the length of the slice. Excluded pairs are −inf. A tile is valid until the next one, and must not be
        changed.
        """
        return self._tiles(rows, lambda s: s)

    def values(self, rows: slice) -> Iterator[Tensor]:
        """Yield the pair losses of a slice of the rows with all columns, one (r, c) tile of c columns after the other.

        r: the length of the slice. Excluded pairs are −inf. A tile is valid until the next one, and must not be
        changed.
        """
        return self._tiles(rows, lambda s: self.pair_loss(s - self.p_R[rows, None]))

    @cached_property
    def _kept(self) -> list[Block]:
        """All tiles of the score matrix, row after row, if they are small enough to be kept in memory; else []."""
        tiles = Tiles(self.x_RD, self.y_MD)
        return list(tiles.scores(kept=True)) if tiles.keeps_scores else []

    def _tiles(self, rows: slice, of_scores: Elementwise) -> Iterator[Tensor]:
        """Yield of_scores(s) for the tiles s of a slice of the rows, −inf for excluded pairs."""
        kept = [block for block in self._kept if block[0] == rows]
        for _, columns, s in kept or Tiles(self.x_RD[rows], self.y_MD).scores():
            mask = self.exclusion.mask(rows, columns) if self.exclusion else None
            yield of_scores(s) if mask is None else of_scores(s).masked_fill(mask, -math.inf)

    def chosen(self, row_R: Tensor) -> Losses:
        """Return a Losses that has only the rows row_R, ascending indices; self if these are all rows."""
        if len(row_R) == len(self.p_R):
            return self
        exclusion = self.exclusion and RepeatedRows(base=self.exclusion, base_rows=len(self.x_RD), row_R=row_R)
        names = ("x_RD", "p_R", "counts_R", "weights_R", "relevance_R")
        of_rows = {name: v[row_R] for name in names if (v := getattr(self, name)) is not None}
        return replace(self, exclusion=exclusion, **of_rows)

    def pair_sum(
        self, f: Function, factors_R: Tensor, rows: Sequence[Tensor], parameters: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return the sum of f over the scores of all pairs that are not excluded, 0-d, by pair_sum of sums/pair_sum.py.

        f: an elementwise function of the scores and of further inputs: `rows`, tensors (R,) with one entry per row, and
        `parameters`, 0-d each; it must be finite also for excluded pairs. factors_R: the factor of each row in the sum.
        """
        scores = self.x_RD, self.y_MD, self.exclusion
        return pair_sum(f, *scores, row_factors_b=factors_R, rows=rows, parameters=parameters, scores=self._kept)

    def mean(self, values_R: Tensor) -> Tensor:
        """Return the sum over rows of values_R (one term per row, such as its OCE) weighted by weights_R, 0-d.

        Its mean over ranks is the mean over the rows of all ranks that are not skipped.
        """
        return self.weights_R.to(values_R.dtype) @ values_R

"""For each anchor i: its candidates C_i (the columns its sum runs over), its positives P_i, and how many these are.

An anchor is a row (or, in the other direction, a column) whose positives are to be found among its candidates.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.batch import GatheredBatch, Index
from dyad.train.losses.gathered.duplicates import SameItem, equal_pair_counts, equal_pairs
from dyad.train.losses.options.choices import CandidateSet, Duplicates, Positives
from dyad.train.losses.options.common import PairOptions
from dyad.train.losses.sums.conditions import holds, may_assume
from dyad.train.losses.sums.tiles import Exclusion, Pairs

MOST_PAIRS = 64  # the largest average number of listed positives per column: a longer list takes too much memory


@dataclass(frozen=True)
class Anchors:
    """The anchors of one direction: this rank's b rows (x scored against all y), or all M columns (y against all x).

    Tensors have one entry for each anchor. counts: number m_i of the anchor's candidates, int64, which with
    one_positive_per_sum(options) includes the one positive of each sum; positives: number of its positives, int64;
    valid: bool, whether it has candidates and a positive, False for further columns (y items beside the pairs). share:
    W / (number of valid anchors of all W ranks), 0-d, by which a rank multiplies the sum over its anchors; the average
    of the results over ranks is the mean over anchors. own: the slice of this rank's anchors.
    """

    counts: Tensor
    positives: Tensor
    valid: Tensor
    share: Tensor
    own: slice

    def first(self, count: int) -> "Anchors":
        """Return a copy with the first `count` anchors only, such as the columns of pairs; `share`, `own` stay."""
        return replace(self, **{n: getattr(self, n)[:count] for n in ("counts", "positives", "valid")})

    def weights(self, like: Tensor) -> Tensor:
        """Return 1 / (number of positives) of each anchor (row or column), in the dtype of the tensor `like`.

        The weight is 0 for an anchor without candidates or without positives, and for columns beside the pairs, such as
        hard negatives.
        """
        return self.valid.to(like.dtype) / self.positives.clamp(min=1)

    def mean(self, values_P: Tensor, index: Index) -> Tensor:
        """Average values over the positives of each anchor, then over valid anchors; return this rank's share, 0-d.

        The average of the shares over ranks is the mean. values_P: a number for each of this rank's P positive pairs.
        index: the index of each pair's anchor, a tensor (P,) or a slice.
        """
        return self.share * (self.weights(values_P)[index] @ values_P)


@dataclass(frozen=True)
class Relations:
    """The candidates and positives of each row and column of a batch.

    batch: the batch; with duplicates=positive its list of positives may be longer than the caller's. options: the
    objective's choice of candidates and positives. exclusion: the pairs that the sums leave out; None: no pair. same:
    the relation of equal content keys, if it defines the positives in place of the list batch.positives
    (duplicates=positive); None if batch.positives lists all positives. masked: the relation of equal keys if the sums
    leave out pairs of equal keys, else None.
    """

    batch: GatheredBatch
    options: PairOptions
    exclusion: Exclusion | None
    same: SameItem | None
    masked: SameItem | None

    @cached_property
    def positive_counts(self) -> tuple[Tensor, Tensor]:
        """The number of positives of each of this rank's rows, (b,), and of all columns, (M,), int64.

        Every rank must read this property, which may sum over ranks when it is first read.
        """
        batch = self.batch
        if self.same is None:
            return batch.counts(batch.positives)
        return self.same.counts(len(batch.y_MD))[batch.columns.own], self.same.counts(batch.columns.total)

    @cached_property
    def anchors(self) -> tuple[Anchors, Anchors]:
        """The anchors of both directions: this rank's rows, and all columns.

        Every rank must read this property, which may sum over ranks when it is first read.
        """
        counts = _candidate_counts(self.batch, self.masked, self.exclusion)
        if (further := self.batch.further_rows) is not None:
            more_B = further.counts(self.batch.columns)
            counts = counts[0], counts[1] + F.pad(more_B, (0, len(counts[1]) - len(more_B)))
        return _anchors(self.batch, counts, self.positive_counts, self.options)

    @property
    def complete(self) -> bool:
        """Whether y_i is the one positive of row i, without a list, and each anchor has all candidates of the batch.

        If so, every row has all M columns as candidates, every column has all rows of the global batch and no further
        rows, and no row and no column of a pair is skipped. Further columns (y items beside the pairs) are allowed;
        they have no positive.
        """
        alone = self.exclusion is None and self.same is None and self.batch.further_rows is None
        return alone and self.batch.positives.own is not None

    @property
    def plain(self) -> bool:
        """Whether y_i is the one positive of row i, without a list, and embeddings are no half precision.

        A loss of rows alone without log-weights then uses row_losses (sums/row_losses.py); for half precision
        log_partition (sums/lse.py) has faster kernels.
        """
        return self.batch.positives.own is not None and self.same is None and self.batch.x_bD.dtype.itemsize > 2

    def mean_relevance(self) -> tuple[Tensor | float, Tensor | float]:
        """Return this rank's shares of the mean relevance of the positives, over rows and over columns, 0-d each.

        The relevance of a positive pair is its weight in (0, 1]. It is averaged over the positives of each row (or
        column), then over rows (or columns). The average of the shares over ranks is the mean. Returns (1.0, 1.0) if
        the batch has no relevance.
        """
        weights_P = self.batch.relevance
        if weights_P is None:
            return 1.0, 1.0
        sides = zip(self.anchors, self.batch.positive_indices(), strict=True)
        row, column = (1 - anchors.mean(1 - weights_P, index) for anchors, index in sides)  # exactly 1 if all are 1
        return row, column


def relations(batch: GatheredBatch, options: PairOptions) -> Relations:
    """Return the candidates and positives of each row and each column of a batch. Every rank must call it.

    Candidates of a row are all columns; with candidates=negatives or positives=exclude, all columns that are no
    positives of the row. In the same way, candidates of a column are rows; further rows (x items beside the pairs) are
    candidates of all columns of pairs, but for what batch.further_rows excludes. A row and a column are no candidates
    of each other if batch.excluded lists the pair, if batch.known has it and it is no positive, if they belong to
    different lists (batch.owners), or, with duplicates=mask, if their keys are equal and the pair is no positive.
    options: the objective's choice of candidates and positives.

    Raises ConfigError if duplicates are compared and the batch has no keys, if candidates=negatives has fewer than 2
    columns, if duplicates=positive makes too many pairs to be listed (_with_equal_keys), and if positives=single and a
    row or column has several listed positives (within collect_checks(speculative=True) of sums/conditions.py none is
    assumed to have).
    """
    by_key = bool(batch.compared_keys(options.duplicates))
    if options.candidates is CandidateSet.negatives and len(batch.y_MD) < 2:
        raise ConfigError(f"objective={options.name}: compares the pairs of a batch, and it has one. Give 2 or more")
    if options.duplicates is Duplicates.positive and (
        options.positives is not Positives.each or batch.positives.own is None
    ):  # the mean over each of them needs no list: it is computed from sums per key
        batch, by_key = replace(batch, positives=_with_equal_keys(batch), keys=()), False
    same = SameItem([column_keys for _, column_keys in batch.keys], len(batch.y_MD)) if by_key else None
    positive_keys = same if options.duplicates is Duplicates.positive else None
    negatives_only = options.candidates is CandidateSet.negatives or options.positives is Positives.exclude
    masked = same if negatives_only or positive_keys is None else None
    dropped = batch.positives if negatives_only else None  # listed pairs that are no candidates
    if batch.excluded is not None:  # the union is without repetition, which the numbers of candidates need
        dropped = Pairs(batch.excluded).joined(dropped or Pairs(batch.excluded[:0]))
    exclusion = None
    if masked or dropped or batch.known or batch.owners:
        keys = batch.keys if masked else ()
        exclusion = Exclusion(keys, None if negatives_only else batch.positives, dropped, batch.known, batch.owners)
    related = Relations(batch, options, exclusion, positive_keys, masked)
    if options.positives is Positives.single and batch.positives.own is None:
        several = torch.stack([(count > 1).any() for count in related.positive_counts]).any()
        if not holds(batch.rows.max_(several[None].long())[0] == 0):
            raise ConfigError(
                "objective.positives=single: a row or a column has several listed. Set it to each, exclude or merge"
            )
    return related


def without_positives(related: Relations, options: PairOptions) -> tuple[Exclusion, Tensor]:
    """Return an Exclusion with which sums run over negatives alone, and a mask (P,) bool of the P positive pairs.

    The Exclusion leaves out all pairs that are no candidates, and all positives in batch.positives. Candidates that
    only equal keys make positives (related.same) stay in the sums. The mask says which positive pairs are in the
    softmax sum of their own term: all with one_positive_per_sum(options), else those that are candidates. related: the
    result of `relations`, from the same `options`.
    """
    batch, exclusion = related.batch, related.exclusion or Exclusion()
    positives, dropped = batch.positives, exclusion.dropped
    in_sum_P = torch.ones(len(positives.pairs_P2), dtype=torch.bool, device=batch.x_bD.device)
    listed = positives if dropped is None or dropped is positives else dropped.joined(positives)
    if dropped and not one_positive_per_sum(options):
        in_sum_P = ~positives.isin(dropped, len(batch.y_MD))
    if batch.owners and not one_positive_per_sum(options):
        of_rows, of_columns = batch.owners
        in_sum_P &= of_rows[positives.pairs_P2[:, 0]] == of_columns[positives.pairs_P2[:, 1]]
    return replace(exclusion, kept=None, dropped=listed), in_sum_P


def one_positive_per_sum(options: PairOptions) -> bool:
    """Whether the softmax sum for a positive runs over this positive and the anchor's negatives only.

    True for positives=exclude with candidates=all or list: each sum then leaves out the anchor's other positives. With
    candidates=negatives it leaves out all positives, and the result is False.
    """
    return options.positives is Positives.exclude and options.candidates is not CandidateSet.negatives


def _with_equal_keys(batch: GatheredBatch) -> Pairs:
    """Return the union of the batch's positive pairs and all pairs whose row and column have an equal key.

    Raises ConfigError, on all ranks, if one has more than MOST_PAIRS · M (64 M) pairs of equal keys for M columns, a
    pair that is equal in both kinds of keys counted twice: memory must stay linear in the batch. Every rank must call
    it.
    """
    counts = torch.stack([equal_pair_counts(*keys).sum() for keys in batch.keys])
    count, most = int(batch.rows.max_(counts.sum()[None])), MOST_PAIRS * len(batch.y_MD)
    if count > most:
        raise ConfigError(
            f"objective.duplicates=positive: {count:,} pairs of a rank have equal keys, over {most:,} that fit "
            "in memory linear in the batch. Set objective.positives=each, or objective.duplicates=mask"
        )
    return Pairs(torch.cat([batch.positives.pairs_P2, *(equal_pairs(*keys) for keys in batch.keys)]).unique(dim=0))


def _candidate_counts(
    batch: GatheredBatch, masked: SameItem | None, exclusion: Exclusion | None
) -> tuple[Tensor, Tensor]:
    """Count the candidates (columns) of each of this rank's rows, (b,), and the candidates (rows) of all columns, (M,).

    masked: the relation of equal keys if pairs of equal keys are left out, else None. exclusion: the pairs that are
    left out; None: no pair. Every rank must call it.
    """
    row_counts_b = torch.full((len(batch.x_bD),), len(batch.y_MD), device=batch.x_bD.device)
    column_counts_M = torch.full((len(batch.y_MD),), batch.rows.total, device=batch.x_bD.device)
    if exclusion is None:
        return row_counts_b, column_counts_M
    kept, dropped = exclusion.kept, exclusion.dropped
    if exclusion.known or exclusion.owners or any(pairs and pairs.own is None for pairs in (kept, dropped)):
        of_rows, of_columns = exclusion.counts(len(batch.x_bD), len(batch.y_MD), batch.x_bD.device)
        return row_counts_b - of_rows, column_counts_M - batch.columns.sum_(of_columns)
    if masked:
        row_counts_b = row_counts_b - masked.counts(len(batch.y_MD))[batch.columns.own]
        column_counts_M = column_counts_M - masked.counts(batch.columns.total)
    # with `masked`, pairs of equal keys, dropped ones among them, are subtracted above, and kept pairs are added back
    if pairs := kept if masked else dropped:
        (of_rows, of_columns), sign = batch.counts(pairs), 1 if masked else -1
        row_counts_b, column_counts_M = row_counts_b + sign * of_rows, column_counts_M + sign * of_columns
    return row_counts_b, column_counts_M


def _anchors(
    batch: GatheredBatch, counts: tuple[Tensor, Tensor], positives: tuple[Tensor, Tensor], options: PairOptions
) -> tuple[Anchors, Anchors]:
    """Return the Anchors of this rank's rows, and those of all columns. Every rank must call it.

    Anchors hold, for each row or column, the numbers of its candidates and positives, and whether it has both and so
    counts in the loss. counts: the numbers of candidates of rows (b,) and of columns (M,). positives: the numbers of
    positives of rows (b,) and of columns (M,). options: the objective's options; with one_positive_per_sum(options),
    the one positive in each sum is counted as one more candidate.
    """
    always = one_positive_per_sum(options)
    valid = [((m > 0) | always) & (p > 0) for m, p in zip(counts, positives, strict=True)]
    valid[1] = valid[1] & (torch.arange(len(valid[1]), device=valid[1].device) < batch.columns.total)
    own = valid[0], valid[1][batch.columns.own]
    if may_assume(torch.cat(own).all()):
        number = torch.stack([torch.full_like(counts[0].sum(), n) for n in (batch.rows.total, batch.columns.total)])
    else:
        number = batch.rows.sum_(torch.stack([v.sum() for v in own]))
    share = batch.rows.world_size / number.clamp(min=1).to(torch.promote_types(batch.x_bD.dtype, torch.float32))
    rows = Anchors(counts[0] + always, positives[0], valid[0], share[0], slice(len(batch.x_bD)))
    return rows, Anchors(counts[1] + always, positives[1], valid[1], share[1], batch.columns.own)

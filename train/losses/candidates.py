"""Which columns an anchor's sum runs over (C_i), which of them are its positives (P_i), and how many each has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.errors import ConfigError
from train.losses.duplicates import SameItem, equal_pair_counts, equal_pairs
from train.losses.options.common import Candidates, Duplicates, PairOptions, Positives
from train.losses.strip import Strip, of_equal_keys
from train.losses.tiles import Exclusion, Pairs

MOST_PAIRS = 64  # listed positives per column that still count as memory linear in the batch


@dataclass(frozen=True)
class Anchors:
    """One direction's anchors: (a,) each. Rows: the own b. Columns: all M, of which only y's anchor anything.

    counts: m_i = |C_i|; positives: |P_i|; valid: it counts (it has candidates and a positive); share: what this rank
    multiplies a sum over its own anchors by, W / number of valid anchors of all ranks; own: those this rank adds up.
    """

    counts: Tensor
    positives: Tensor
    valid: Tensor
    share: Tensor
    own: slice

    def weights(self, like: Tensor) -> Tensor:
        """1/|P_i|, 0 for anchors that are skipped."""
        return self.valid.to(like.dtype) / self.positives.clamp(min=1)


@dataclass(frozen=True)
class Relations:
    """How the rows and columns of a strip are related.

    exclusion: what the sums leave out; same: the relation that makes positives of equal keys, instead of
    strip.positives; the anchors of both directions.
    """

    strip: Strip
    exclusion: Exclusion | None
    same: SameItem | None
    rows: Anchors
    columns: Anchors


def relations(strip: Strip, options: PairOptions) -> Relations:
    """C_i = all columns, or all that are not positive, without excluded ones and, if masked, without equal keys.

    A collective when pairs are listed.
    """
    by_key = options.duplicates is not Duplicates.keep
    if by_key and not strip.keys:
        raise ConfigError(
            f"objective.duplicates={options.duplicates.value} compares content keys: give the objective "
            "x_keys or y_keys, or set objective.duplicates=keep"
        )
    if options.candidates is Candidates.negatives and len(strip.y_MD) < 2:
        raise ConfigError("objective.candidates=negatives needs a global batch of 2 pairs or more")
    if options.duplicates is Duplicates.positive and _must_be_listed(strip, options):
        strip, by_key = replace(strip, positives=_with_equal_keys(strip), keys=()), False
    same = SameItem([column_keys for _, column_keys in strip.keys], len(strip.y_MD)) if by_key else None
    positive_keys = same if options.duplicates is Duplicates.positive else None
    negatives_only = options.candidates is Candidates.negatives or options.positives is Positives.exclude
    masked = same if negatives_only or positive_keys is None else None
    dropped = _dropped(strip, negatives_only)
    exclusion = None
    if masked or dropped:
        keys = strip.keys if masked else ()
        exclusion = Exclusion(keys, None if negatives_only else strip.positives, dropped)
    counts = _candidate_counts(strip, masked, exclusion)
    if positive_keys:
        positives = positive_keys.counts(len(strip.y_MD))[strip.columns.own], positive_keys.counts(strip.columns.total)
    else:
        positives = strip.counts(strip.positives)
    if options.positives is Positives.single and strip.positives.own is None:
        several = torch.stack([(count > 1).any() for count in positives]).any()
        if strip.rows.max_(several[None].long()):
            raise ConfigError(
                "objective.positives=single: a row or a column has several listed. Set it to each, exclude or merge"
            )
    return Relations(strip, exclusion, positive_keys, *_anchors(strip, counts, positives, options))


def beside_positives(related: Relations, options: PairOptions) -> tuple[Exclusion, Tensor]:
    """What leaves the sums over negatives alone, and whether each listed positive stands in its anchor's C_i: (P,)."""
    strip, exclusion = related.strip, related.exclusion or Exclusion()
    positives, dropped = strip.positives, exclusion.dropped
    stands = torch.ones(len(positives.pairs_P2), dtype=torch.bool, device=strip.x_bD.device)
    if dropped is None:
        return Exclusion(exclusion.keys, dropped=positives), stands
    negatives = exclusion if dropped is positives else Exclusion(exclusion.keys, dropped=dropped.joined(positives))
    return negatives, stands if others_leave(options) else ~positives.among(dropped, len(strip.y_MD))


def others_leave(options: PairOptions) -> bool:
    """Whether each positive stands beside the negatives alone: then it is a candidate itself, always."""
    return options.positives is Positives.exclude and options.candidates is Candidates.all


def _must_be_listed(strip: Strip, options: PairOptions) -> bool:
    """Whether positives by key are wanted one by one; the mean over each of them is had without."""
    return options.positives is not Positives.each or strip.positives.own is None


def _with_equal_keys(strip: Strip) -> Pairs:
    """The positives of the strip and all pairs with an equal key."""
    counts = torch.stack([equal_pair_counts(*keys).sum() for keys in strip.keys])
    count, most = int(strip.rows.max_(counts.sum()[None])), MOST_PAIRS * len(strip.y_MD)
    if count > most:
        raise ConfigError(
            f"objective.duplicates=positive: {count:,} pairs of a rank have equal keys, over {most:,} that fit "
            "in memory linear in the batch. Set objective.positives=each, or objective.duplicates=mask"
        )
    return Pairs(torch.cat([strip.positives.pairs_P2, *(equal_pairs(*keys) for keys in strip.keys)]).unique(dim=0))


def _dropped(strip: Strip, negatives_only: bool) -> Pairs | None:
    if strip.excluded is None:
        return strip.positives if negatives_only else None
    return Pairs(strip.excluded).joined(strip.positives if negatives_only else Pairs(strip.excluded[:0]))


def _candidate_counts(strip: Strip, masked: SameItem | None, exclusion: Exclusion | None) -> tuple[Tensor, Tensor]:
    """m_i of own rows and of all columns, from classes of equal keys and lists of pairs, never from all pairs."""
    row_counts_b = torch.full((len(strip.x_bD),), len(strip.y_MD), device=strip.x_bD.device)
    column_counts_M = torch.full((len(strip.y_MD),), strip.rows.total, device=strip.x_bD.device)
    if exclusion is None:
        return row_counts_b, column_counts_M
    if masked:
        row_counts_b = row_counts_b - masked.counts(len(strip.y_MD))[strip.columns.own]
        column_counts_M = column_counts_M - masked.counts(strip.columns.total)
    kept, dropped = exclusion.kept, exclusion.dropped
    if kept and dropped:  # what is dropped is not kept
        kept = Pairs(kept.pairs_P2[~kept.among(dropped, len(strip.y_MD))])
    changes = [(1, kept, True), (-1, dropped, False)] if masked else [(-1, dropped, None)]
    for sign, pairs, equal_keys in changes:
        if pairs and (pairs := _with_keys(strip, pairs, equal_keys)):
            of_rows, of_columns = strip.counts(pairs)
            row_counts_b, column_counts_M = row_counts_b + sign * of_rows, column_counts_M + sign * of_columns
    return row_counts_b, column_counts_M


def _with_keys(strip: Strip, pairs: Pairs, equal: bool | None) -> Pairs | None:
    """Those of the pairs whose keys are equal, or are not; all with None."""
    if equal is None or pairs.own is not None:  # a row and its own column have the same keys
        return None if equal is False else pairs
    return Pairs(pairs.pairs_P2[of_equal_keys(pairs.pairs_P2, strip.keys) == equal])


def _anchors(
    strip: Strip, counts: tuple[Tensor, Tensor], positives: tuple[Tensor, Tensor], options: PairOptions
) -> tuple[Anchors, Anchors]:
    always = others_leave(options)
    valid = [((m > 0) | always) & (p > 0) for m, p in zip(counts, positives, strict=True)]
    valid[1] = valid[1] & (torch.arange(len(valid[1]), device=valid[1].device) < strip.columns.total)
    number = strip.rows.sum_(torch.stack([valid[0].sum(), valid[1][strip.columns.own].sum()]))
    share = strip.rows.world_size / number.clamp(min=1).to(torch.promote_types(strip.x_bD.dtype, torch.float32))
    rows = Anchors(counts[0] + always, positives[0], valid[0], share[0], slice(len(strip.x_bD)))
    return rows, Anchors(counts[1] + always, positives[1], valid[1], share[1], strip.columns.own)

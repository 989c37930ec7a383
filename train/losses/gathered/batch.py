"""The global batch (of all ranks) as an objective sees it: this rank's rows, the gathered columns, their relations.

Rows are x items, columns are y items. By default row i and column i are a pair, and column i is called the row's own
column. Further columns are y items beside the pairs, such as hard negatives; further rows are such x items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.batch import KnownPositives
from dyad.train.losses.gathered.arguments import as_int64, as_relevance, dtype_name
from dyad.train.losses.gathered.further_rows import FurtherRows, XNegatives
from dyad.train.losses.options.choices import Duplicates
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import holds, known_sizes
from dyad.train.losses.sums.tiles import KnownPairs, Pairs

Index = slice | Tensor


def at(values: Tensor, index: Index) -> Tensor:
    """Return values[index], or `values` itself if the slice covers it: backward of a slice fills a whole tensor."""
    whole = isinstance(index, slice) and index.indices(len(values)) == (0, len(values), 1)
    return values if whole else values[index]


@dataclass(frozen=True)
class Columns:
    """Further y items of this rank, k ≥ 0 in total, any number per row. They are candidates of every row.

    embeddings_kD; row_k: the index of the local row that each item belongs to, int64; keys_k: content keys, int64,
    equal for equal items; positive_k: bool, whether the item is a further positive of its row. By default all are hard
    negatives. importance_k: log q of each item, for the objectives that take it, with q the density it was drawn from.
    relevance_k: of a further positive its relevance in (0, 1], by default 1; that of others is not read.
    """

    embeddings_kD: Tensor
    row_k: Tensor
    keys_k: Tensor | None = None
    positive_k: Tensor | None = None
    importance_k: Tensor | None = None
    relevance_k: Tensor | None = None

    @staticmethod
    def of(negatives: Tensor | Columns) -> Columns:
        """Return hard negatives as Columns: y items of this rank beside the pairs, each with the row it belongs to.

        negatives: (b, k, D), k hard negatives for each of b rows; or Columns, which are only checked. Raises ValueError
        for wrong shapes or types.
        """
        if isinstance(negatives, Columns):
            return negatives._checked()
        if negatives.ndim != 3:
            raise ValueError(f"negatives must be (b, k, D), or Columns, not {tuple(negatives.shape)}")
        rows, each = negatives.shape[:2]
        return Columns(negatives.flatten(0, 1), torch.arange(rows, device=negatives.device).repeat_interleave(each))

    def _checked(self) -> Columns:
        """Check shapes and types of these further y items; return them with row indices and keys converted to int64.

        Raises ValueError for a wrong shape or type.
        """
        count, device = len(self.embeddings_kD), self.embeddings_kD.device
        row_k = as_int64("negatives.row_k", self.row_k, device)
        keys_k = as_int64("negatives.keys_k", self.keys_k, device)
        if self.positive_k is not None and self.positive_k.dtype is not torch.bool:
            raise ValueError(f"negatives.positive_k must be bool (k,), not {dtype_name(self.positive_k.dtype)}")
        numbers = {"row_k": row_k, "keys_k": keys_k, "positive_k": self.positive_k, "importance_k": self.importance_k}
        for name, values_k in numbers.items():
            if values_k is not None and values_k.shape != (count,):
                raise ValueError(
                    f"negatives.{name} must be ({count},), one for each column, not {tuple(values_k.shape)}"
                )
        relevance_k = None
        if self.relevance_k is not None and self.positive_k is not None:
            of_positives_k = torch.as_tensor(self.relevance_k, device=device).masked_fill(~self.positive_k, 1)
            relevance_k = as_relevance("negatives.relevance_k", of_positives_k, count, self.embeddings_kD)
        return replace(self, row_k=row_k, keys_k=keys_k, relevance_k=relevance_k)


@dataclass(frozen=True)
class GatheredBatch:
    """This rank's rows x (b,) against all columns y (M,): y of rank 0, 1, …, then the further columns of rank 0, 1, ….

    Further columns are y items beside the pairs, see Columns; further_rows: such x items of this rank, see XNegatives.
    rows, columns: how x and y of the pairs are distributed over ranks.
    Pairs are (local row, global column): positives, those of this rank's rows; excluded (P, 2) and known, which are
    left out of all sums, known ones unless they are positives. relevance: w in (0, 1] of each positive pair, (P,) in
    the order of `positives`, without gradient; None: all 1. keys: for x and for y, if given, (keys of this rank's
    rows (b,), keys of the columns that have one (≤ M,)); equal keys mean the same item; y_keys_M: those of y, of all
    columns. sample_ids_b: indices of per-sample state; sample_ids_B: those of all ranks, if they were asked for.
    owners: the number of each row (b,) and the row to whose list each column belongs (M,), if a row's candidates are of
    its own list. importance_m: log q or ζ (see OneSidedDPM) of this rank's m columns, as the caller gave it; log_q_M:
    log q of all columns, if further ones have it, too.
    """

    x_bD: Tensor
    y_MD: Tensor
    rows: Layout
    columns: Layout
    positives: Pairs
    excluded: Tensor | None = None
    keys: tuple[tuple[Tensor, Tensor], ...] = ()
    sample_ids_b: Tensor | None = None
    importance_m: Tensor | None = None
    sample_ids_B: Tensor | None = None
    known: KnownPairs | None = None
    owners: tuple[Tensor, Tensor] | None = None
    log_q_M: Tensor | None = None
    y_keys_M: Tensor | None = None
    relevance: Tensor | None = None
    further_rows: FurtherRows | None = None

    def compared_keys(self, duplicates: Duplicates) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the content keys by which equal items are found, or () with duplicates=keep.

        They are, for each kind of key, (keys of this rank's rows, keys of the columns). duplicates: what the objective
        does with equal items; only with keep are they not compared. Raises ConfigError if they are to be compared and
        the batch has no keys.
        """
        if duplicates is Duplicates.keep:
            return ()
        if not self.keys:
            raise ConfigError(
                f"objective.duplicates={duplicates} compares content keys: give the objective x_keys or y_keys, or set "
                "objective.duplicates=keep"
            )
        return self.keys

    def positive_indices(self) -> tuple[Index, Index]:
        """Return the row indices and the column indices of the batch's positive pairs, in the order of `positives`.

        Both are slices, which index without a copy, if the positive of each row x_i is y_i alone; else tensors (P,) for
        P pairs.
        """
        first = self.positives.own
        if first is not None:
            return slice(None), slice(first, first + len(self.x_bD))
        i, j = self.positives.pairs_P2.unbind(1)
        return i, j

    def pair_scores(self) -> Tensor:
        """Return the scores <x_i, y_j> of the batch's P positive pairs, (P,) in the order of `positives`.

        They are float32 or better.
        """
        return self._pair_scores

    @cached_property
    def _pair_scores(self) -> Tensor:
        i, j = self.positive_indices()
        dtype = torch.promote_types(self.x_bD.dtype, torch.float32)
        with torch.enable_grad():  # loss and metrics share them, whichever asks first
            return (at(self.x_bD, i).to(dtype) * at(self.y_MD, j).to(dtype)).sum(1)

    def counts(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Count the pairs of each row of this rank, (b,), and of each column over the rows of all ranks, (M,), int64.

        pairs: this rank's list of (local row, global column). Every rank must call it, unless the list is the pairs
        (x_i, y_i) of all rows i.
        """
        columns_M = torch.zeros(len(self.y_MD), dtype=torch.int64, device=self.y_MD.device)
        if pairs.own is not None:
            columns_M[: self.columns.total] = 1
            return columns_M.new_ones(len(self.x_bD)), columns_M
        i, j = pairs.pairs_P2.unbind(1)
        each_P = torch.ones_like(j)
        columns_M = self.columns.sum_(columns_M.index_add_(0, j, each_P))
        return columns_M.new_zeros(len(self.x_bD)).index_add_(0, i, each_P), columns_M


def gather_batch(
    x_bD: Tensor,
    y_mD: Tensor,
    negatives: Columns | None = None,
    positives: Tensor | None = None,
    excluded: Tensor | None = None,
    x_keys: Tensor | None = None,
    y_keys: Tensor | None = None,
    sample_ids_b: Tensor | None = None,
    known_positives: KnownPositives | None = None,
    importance: Tensor | None = None,
    equal_is_positive: bool = False,
    gathers_ids: bool = False,
    own_lists: bool = False,
    relevance: Tensor | None = None,
    x_negatives: XNegatives | None = None,
) -> GatheredBatch:
    """Gather the columns of all ranks and return the global batch for this rank's rows.

    x_bD, y_mD: the b embeddings of x and the m of y on this rank. The caller must normalise them first if the
    similarity is cosine. negatives: y items beside the pairs, such as hard negatives; None: none. positives: (P, 2)
    pairs (local row, global column); None: row i of x with row i of y. excluded: (P, 2) pairs to leave out of all sums.
    x_keys, y_keys: content keys (equal for equal items); None: items are not compared. sample_ids_b: the sample id of
    each row, for objectives with per-sample state. importance: a float for each of the m columns, from which its
    log-weight in the sums is computed: log q (weight 1/q, with q the density that it was drawn from) or ζ (log-weight
    ζ/τ).

    known_positives: for a row, keys of items that are relevant to it. Columns with these keys are left out of the row's
    sums, unless `positives` pairs them with the row. equal_is_positive: columns that share a content key with the row
    are positives, so they are not left out either. gathers_ids: whether sample_ids_B is needed. own_lists: whether the
    columns of other rows, own and further, are left out of a row's sums. relevance: that of each row's own pair, (b,),
    or of each pair in `positives`, (P,). x_negatives: x items beside the pairs, which only columns have as candidates,
    except those whose key is that of the column's own x, and with own_lists those of other rows.

    Every rank must call it, with `negatives` on all ranks or on none. Raises ValueError for shapes that do not fit each
    other and for pairs of a row or column that does not exist.
    """
    further = negatives.embeddings_kD if negatives else y_mD[:0]
    rows, columns, extra, more_positives = _layouts(x_bD, y_mD, further, negatives)
    _check_shapes(rows, columns, positives, x_keys, y_keys)
    if sample_ids_b is not None and len(sample_ids_b) != len(x_bD):
        raise ValueError(f"{len(sample_ids_b)} sample_ids for {len(x_bD)} rows")
    for name, pairs_P2 in (("positives", positives), ("excluded", excluded)):
        if pairs_P2 is not None:
            _check_indices(f"{name}: no row", pairs_P2[:, 0], len(x_bD))
            _check_indices(f"{name}: no column", pairs_P2[:, 1], columns.total + extra.total)
    numbers = {"x": x_keys, "y": y_keys, "ids": sample_ids_b if gathers_ids and rows.sizes == columns.sizes else None}
    if negatives and negatives.importance_k is not None:
        if importance is None or importance.shape != (len(y_mD),):
            raise ValueError(f"further columns have log q: give importance=({len(y_mD)},), that of this rank's columns")
        numbers["log_q"] = importance.to(negatives.importance_k.dtype)
    numbers = {name: of_rows for name, of_rows in numbers.items() if of_rows is not None}
    y_MD, every = _gathered(columns, extra, y_mD, negatives, numbers)
    keys = tuple((numbers[side], every[side]) for side in ("x", "y") if side in numbers)
    pairs = Pairs.own_columns(len(x_bD), columns.own.start, x_bD.device)
    if positives is not None or more_positives.total:
        parts = [(pairs.pairs_P2 if positives is None else positives, relevance)]
        if negatives and negatives.positive_k is not None:
            _check_indices("negatives.row_k: no row", negatives.row_k, len(x_bD))
            own = more_positives.sizes[more_positives.rank]
            k = torch.nonzero_static(negatives.positive_k, size=own).squeeze(1)  # no wait for the device: own is known
            further_P2 = torch.stack([negatives.row_k[k], k + columns.total + extra.own.start], 1)
            parts.append((further_P2, None if negatives.relevance_k is None else negatives.relevance_k[k]))
        pairs, relevance = _united(parts)
    owners = None
    if own_lists:
        owner_M = torch.arange(columns.total, device=x_bD.device)
        if negatives and extra.total:
            owner_M = torch.cat([owner_M, extra.gather(negatives.row_k + rows.own.start)])
        owners = owner_M[rows.own], owner_M
    known = None
    if known_positives is not None:
        if y_keys is None:
            raise ValueError("known items are found by their keys: give y_keys too")
        listed_P2 = torch.stack([known_positives.row, known_positives.keys], 1)
        listed_P2 = as_int64("known_positives", listed_P2, x_bD.device, pairs=True)
        _check_indices("known_positives: no row", listed_P2[:, 0], len(x_bD))
        ids = torch.arange(len(x_bD), device=x_bD.device), keys[-1][1]
        known = KnownPairs(*ids, listed_P2, keys if equal_is_positive else ())
    further_rows = None
    if x_negatives is not None:
        of_pairs = every.get("x"), None if owners is None else owners[1][: columns.total]
        _check_indices("x_negatives.row_k: no row", x_negatives.row_k, len(x_bD))
        further_rows = FurtherRows.of(x_negatives, rows.own.start, *of_pairs)
    of_columns = every.get("log_q"), every.get("y")
    of_pairs = pairs, excluded, keys, sample_ids_b, importance, every.get("ids"), known, owners, *of_columns
    return GatheredBatch(x_bD, y_MD, rows, columns, *of_pairs, relevance=relevance, further_rows=further_rows)


def _united(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Pairs, Tensor | None]:
    """Join lists of pairs, (P, 2) each, without repetition; return them with the relevance of each, None if none has.

    parts: lists, each with the relevance of its pairs, (P,), None: 1. A repeated pair has the largest of its own.
    """
    united_P2, place_P = torch.cat([pairs_P2 for pairs_P2, _ in parts]).unique(dim=0, return_inverse=True)
    given = [weights for _, weights in parts if weights is not None]
    if not given:
        return Pairs(united_P2), None
    weights_P = torch.cat([given[0].new_ones(len(pairs)) if w is None else w for pairs, w in parts])
    return Pairs(united_P2), weights_P.new_zeros(len(united_P2)).scatter_reduce(0, place_P, weights_P, "amax")


def _layouts(x_bD: Tensor, y_mD: Tensor, further: Tensor, negatives: Columns | None) -> tuple[Layout, ...]:
    """Return the layouts of x, of y, of the further y items and of the positives among these.

    They are those that the caller's caller knows (see conditions.py), else exchanged. Every rank must call it.
    """
    if (sizes := known_sizes()) is not None:
        return sizes.rows, sizes.columns, sizes.further, sizes.positives
    more = further[:0] if negatives is None or negatives.positive_k is None else further[negatives.positive_k]
    return Layout.of(x_bD, y_mD, further, more)


def _gathered(
    columns: Layout, extra: Layout, y_mD: Tensor, negatives: Columns | None, numbers: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gather, by one collective, the columns of all ranks, (M, D), further columns last, and numbers of the pairs.

    numbers: name → (b,): the content keys "x" and "y" and the sample ids "ids", int64, or "log_q". The result has them
    of all ranks, (B,), and for "y" and "log_q" those of all columns, (M,). Raises ValueError if further columns have no
    keys beside y_keys.
    """
    own = y_mD, *numbers.values()
    if not extra.total:
        y_MD, *every = columns.gathered(*own)
        return y_MD, dict(zip(numbers, every, strict=True))
    assert negatives is not None
    if "y" in numbers and negatives.keys_k is None:
        raise ValueError("y_keys are given and further columns have none: give Columns(…, keys_k) too")
    known = {"y": negatives.keys_k, "log_q": negatives.importance_k}
    of_further = {name: values_k for name, values_k in known.items() if values_k is not None}
    # the others are dropped for further columns, whatever they are
    further = negatives.embeddings_kD, *(of_further.get(name, negatives.row_k) for name in numbers)
    sizes = list(zip(columns.sizes, extra.sizes, strict=True))
    both = Layout(tuple(map(sum, sizes)), columns.rank).gathered(*map(torch.cat, zip(own, further, strict=True)))
    parts = (every.split([size for pair in sizes for size in pair]) for every in both)
    y_MD, *every = (torch.cat([*part[::2], *part[1::2]]) for part in parts)
    ends = (None if name in of_further else columns.total for name in numbers)
    return y_MD, {name: e[:end] for name, e, end in zip(numbers, every, ends, strict=True)}


def _check_indices(what: str, indices: Tensor, count: int) -> None:
    """Raise ValueError if an element of `indices` is outside 0 … count − 1.

    what: the start of the message, such as "positives: no row".
    """
    outside = (indices < 0) | (indices >= count)
    if not holds(~outside.any()):
        wrong = indices[outside]
        raise ValueError(
            f"{what} {int(wrong[0])} among {count}, which are numbered from 0 (local rows, global columns)"
        )


def _check_shapes(rows: Layout, columns: Layout, positives: Tensor | None, *keys: Tensor | None) -> None:
    """Raise ValueError for a batch without rows, for unequal numbers of x and y, and for a wrong number of keys.

    rows, columns: how many x and how many y each rank holds; the numbers may differ if `positives` lists the pairs.
    keys: the content keys of x and of y, None if not given. With keys, x and y must be equally many, with one key for
    each row of this rank.
    """
    own_rows = rows.sizes[rows.rank]
    if positives is None and rows.sizes != columns.sizes:
        raise ValueError(
            f"{own_rows} rows of x and {columns.sizes[rows.rank]} of y are no pairs: say which belong together with "
            "positives=(local row, global column)"
        )
    for key in keys:
        if key is not None and (rows.sizes != columns.sizes or len(key) != own_rows):
            raise ValueError(f"{len(key)} keys for {own_rows} rows: keys are of pairs, row i with column i")
    if rows.total == 0:
        raise ValueError("the global batch has no pair")

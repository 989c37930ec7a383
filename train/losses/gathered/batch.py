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
from dyad.train.losses.gathered.arguments import as_int64, as_relevance, as_teacher, dtype_name
from dyad.train.losses.gathered.further_rows import FurtherRows, XNegatives
from dyad.train.losses.options.choices import Duplicates
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import holds, known_sizes
from dyad.train.losses.sums.tiles import KnownPairs, Pairs

Index = slice | Tensor


def at(values: Tensor, index: Index) -> Tensor:
    """Return values[index], or `values` itself if `index` is a slice of all of it, which saves a copy in backward."""
    whole = isinstance(index, slice) and index.indices(len(values)) == (0, len(values), 1)
    return values if whole else values[index]


@dataclass(frozen=True)
class Columns:
    """y items of this rank beside those of the pairs, such as hard negatives: k ≥ 0 in total, any number per row.

    Each of them is a candidate of all rows of the batch, or with candidates=list of its own row alone. embeddings_kD:
    (k, D). row_k (k,) int64: index of the local row that each item belongs to. keys_k (k,) int64: content keys, equal
    for equal items; needed if the objective compares keys of y. positive_k (k,) bool: True for a further positive of
    the row, False for a hard negative; None: all are hard negatives. importance_k (k,) float: log q of each item, with
    q the density from which it was drawn; only for the objective nce with drawn noise. relevance_k (k,) float: weight
    in (0, 1] of each further positive, not read for negatives; None: all 1. teacher_k (k,) float: a teacher's score of
    each item for its row; only for distill_kl and margin_mse.
    """

    embeddings_kD: Tensor
    row_k: Tensor
    keys_k: Tensor | None = None
    positive_k: Tensor | None = None
    importance_k: Tensor | None = None
    relevance_k: Tensor | None = None
    teacher_k: Tensor | None = None

    @staticmethod
    def of(negatives: Tensor | Columns, rows: int) -> Columns:
        """Return further y items as checked Columns, from a tensor of hard negatives or from the caller's Columns.

        negatives: (b, k, D), k hard negatives for each of b rows, with b = rows; or Columns, of which a copy is
        returned with row_k and keys_k in int64, relevance_k in float32 or float64, 1 for hard negatives, and teacher_k
        likewise; without positive_k, relevance_k is dropped. Raises ValueError for wrong shapes, row_k and keys_k that
        are no integers, a positive_k that is not bool, and a relevance of a positive outside (0, 1] or a teacher's
        score that is not finite, which collect_checks(speculative=True) of sums/conditions.py assumes not to be. The
        width of the embeddings and the range of row_k are not checked.
        """
        if isinstance(negatives, Columns):
            return negatives._checked()
        if negatives.ndim != 3:
            raise ValueError(f"negatives must be (b, k, D), or Columns, not {tuple(negatives.shape)}")
        if len(negatives) != rows:
            raise ValueError(f"negatives has {len(negatives)} rows for {rows} of x")
        row_k = torch.arange(rows, device=negatives.device).repeat_interleave(negatives.shape[1])
        return Columns(negatives.flatten(0, 1), row_k)

    def _checked(self) -> Columns:
        """Return a copy of these Columns, converted and checked as `of` says."""
        count, device = len(self.embeddings_kD), self.embeddings_kD.device
        row_k = as_int64("negatives.row_k", self.row_k, device)
        keys_k = as_int64("negatives.keys_k", self.keys_k, device)
        if self.positive_k is not None and self.positive_k.dtype is not torch.bool:
            raise ValueError(f"negatives.positive_k must be bool (k,), not {dtype_name(self.positive_k.dtype)}")
        relevance_k = None
        if self.relevance_k is not None and self.positive_k is not None:
            relevance_k = torch.as_tensor(self.relevance_k, device=device)
        numbers = {"row_k": row_k, "keys_k": keys_k, "positive_k": self.positive_k, "relevance_k": relevance_k}
        numbers |= {"importance_k": self.importance_k, "teacher_k": self.teacher_k}
        for name, values_k in numbers.items():
            if values_k is not None and values_k.shape != (count,):
                raise ValueError(
                    f"negatives.{name} must be ({count},), one for each column, not {tuple(values_k.shape)}"
                )
        if relevance_k is not None and self.positive_k is not None:
            of_positives_k = relevance_k.masked_fill(~self.positive_k, 1)
            relevance_k = as_relevance("negatives.relevance_k", of_positives_k, count, self.embeddings_kD)
        teacher_k = self.teacher_k
        if teacher_k is not None:
            teacher_k = as_teacher("negatives.teacher_k", teacher_k, count, self.embeddings_kD)
        return replace(self, row_k=row_k, keys_k=keys_k, relevance_k=relevance_k, teacher_k=teacher_k)


@dataclass(frozen=True)
class GatheredBatch:
    """The rows x (b, D) of this rank and the columns y (M, D) of all ranks, with the relations of rows and columns.

    The columns are the y of the pairs of rank 0, 1, …, then the further columns (y items beside the pairs, see Columns)
    of rank 0, 1, …. A pair is (local row, global column), int64. rows, columns: how the x and the y of the pairs are
    distributed over ranks. positives: the P positive pairs of this rank's rows. excluded (P', 2): pairs that all sums
    leave out. keys: for x and for y, if given, (keys of this rank's rows (b,), keys of the first columns (≤ M,)),
    int64; equal keys mean the same item. sample_ids_b: int64 (b,), the index of each row's per-sample state.
    importance_m (m,): log q (weight 1/q) or ζ (weight e^(ζ/τ)) of this rank's m columns, as the caller gave it.
    sample_ids_B: the sample ids of all ranks; None unless asked for and each rank has as many x as y. known: pairs that
    all sums leave out unless they are in `positives`. owners: (global index of each row (b,), global index of the row
    to whose list each column belongs (M,)): a row's list is its own y and its further columns, and its sums leave out
    the columns of other lists; None: they do not. log_q_M: log q of all columns, with q the density from which a column
    was drawn; None unless further columns have it. y_keys_M: the content keys of all columns; None unless given.
    relevance (P,): weight in (0, 1] of each positive pair, in the order of `positives`, without gradient; None: all 1.
    further_rows: x items of this rank beside the pairs, see XNegatives.
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
        """Return the content keys by which equal items are found: the field `keys`; () with duplicates=keep.

        The result has, for each of x and y that has keys, (keys of this rank's rows (b,), keys of the columns (≤ M,)).
        duplicates: what the objective does with equal items; keep compares none. Raises ConfigError if items are to be
        compared and the batch has no keys.
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

        Both results are slices, which index without a copy, if positives.own is given; else int64 tensors (P,) for P
        pairs.
        """
        first = self.positives.own
        if first is not None:
            return slice(None), slice(first, first + len(self.x_bD))
        i, j = self.positives.pairs_P2.unbind(1)
        return i, j

    def pair_scores(self) -> Tensor:
        """Return the scores <x_i, y_j> of the P positive pairs in the order of `positives`: (P,) float32 or float64.

        They are differentiable, even if the first call is under no_grad. They are computed in the first call; later
        calls return that tensor.
        """
        return self._pair_scores

    @cached_property
    def _pair_scores(self) -> Tensor:
        i, j = self.positive_indices()
        dtype = torch.promote_types(self.x_bD.dtype, torch.float32)
        with torch.enable_grad():  # the loss and metrics share the scores: metrics may ask first, under no_grad
            return (at(self.x_bD, i).to(dtype) * at(self.y_MD, j).to(dtype)).sum(1)

    def counts(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Count the listed pairs of each row of this rank, (b,), and of each column over all ranks, (M,), int64.

        pairs: this rank's list of (local row, global column). Every rank must call this method, unless `pairs` lists
        the pair (x_i, y_i) of each row i and nothing else (pairs.own is given).
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
    int64 pairs (local row, global column); None: row i of x with row i of y. excluded: (P, 2) int64 pairs to leave out
    of all sums. x_keys, y_keys: content keys, int64 (b,), equal for equal items; None: items are not compared.
    sample_ids_b: the sample id of each row, int64 (b,), for objectives with per-sample state. importance: (m,), a float
    for each y, from which its log-weight in the sums is computed: log q (weight 1/q, with q the density from which it
    was drawn) or ζ (log-weight ζ/τ).

    known_positives: keys of y items that are relevant to a row. A row's sums leave out the columns with these keys, but
    for the row's positives. equal_is_positive: whether columns with a content key of the row are positives;
    known_positives does not leave these out either. gathers_ids: whether to gather sample_ids_B. own_lists: whether a
    row's sums leave out the columns of other rows: their y and their `negatives`. relevance: weights in (0, 1] of the
    pairs (x_i, y_i), (b,), or of the pairs in `positives`, (P,). x_negatives: x items beside the pairs, candidates of
    columns alone; a column's sum leaves out those with the key of the column's own x, and with own_lists those of other
    rows.

    Every rank must call it, and give each argument that any rank gives, if only an empty one. Raises ValueError for
    numbers of x, y, keys or ids that do not fit each other, for pairs of a row or column that does not exist, for a
    global batch without rows, for known_positives without y_keys, for further items without the keys that the items of
    the pairs have, and for further columns with log q without `importance`. Within collect_checks(speculative=True) of
    sums/conditions.py the indices of rows and columns are assumed to exist.
    """
    further = negatives.embeddings_kD if negatives else y_mD[:0]
    rows, columns, extra, more_positives = _layouts(x_bD, y_mD, further, negatives)
    _check_shapes(rows, columns, positives, x_keys, y_keys)
    if sample_ids_b is not None and len(sample_ids_b) != len(x_bD):
        raise ValueError(f"{len(sample_ids_b)} sample_ids for {len(x_bD)} rows")
    for name, pairs_P2 in (("positives", positives), ("excluded", excluded)):
        if pairs_P2 is not None:
            check_indices(f"{name}: no row", pairs_P2[:, 0], len(x_bD))
            check_indices(f"{name}: no column", pairs_P2[:, 1], columns.total + extra.total)
    if negatives and (own_lists or negatives.positive_k is not None):  # else no one reads row_k
        check_indices("negatives.row_k: no row", negatives.row_k, len(x_bD))
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
        check_indices("known_positives: no row", listed_P2[:, 0], len(x_bD))
        ids = torch.arange(len(x_bD), device=x_bD.device), keys[-1][1]
        known = KnownPairs(*ids, listed_P2, keys if equal_is_positive else ())
    further_rows = None
    if x_negatives is not None:
        of_pairs = every.get("x"), None if owners is None else owners[1][: columns.total]
        check_indices("x_negatives.row_k: no row", x_negatives.row_k, len(x_bD))
        further_rows = FurtherRows.of(x_negatives, rows.own.start, *of_pairs)
    of_columns = every.get("log_q"), every.get("y")
    of_pairs = pairs, excluded, keys, sample_ids_b, importance, every.get("ids"), known, owners, *of_columns
    return GatheredBatch(x_bD, y_MD, rows, columns, *of_pairs, relevance=relevance, further_rows=further_rows)


def _united(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Pairs, Tensor | None]:
    """Return the union of lists of pairs, sorted and without repetition, and the relevance of its pairs, (P,).

    parts: for each list, (pairs (P', 2), relevance of each pair (P',); None: all 1). A pair that occurs more than once
    takes the largest of its relevances. The relevance returned is None if no part has one.
    """
    united_P2, place_P = torch.cat([pairs_P2 for pairs_P2, _ in parts]).unique(dim=0, return_inverse=True)
    given = [weights for _, weights in parts if weights is not None]
    if not given:
        return Pairs(united_P2), None
    weights_P = torch.cat([given[0].new_ones(len(pairs)) if w is None else w for pairs, w in parts])
    return Pairs(united_P2), weights_P.new_zeros(len(united_P2)).scatter_reduce(0, place_P, weights_P, "amax")


def _layouts(x_bD: Tensor, y_mD: Tensor, further: Tensor, negatives: Columns | None) -> tuple[Layout, ...]:
    """Return the layouts over ranks of x, of y, of the further y items, and of the positives among the further items.

    further: the embeddings of `negatives`, (k, D). The layouts that a trainer gave to collect_checks
    (sums/conditions.py) are returned, if any; else the ranks exchange their sizes. Every rank must call it.
    """
    if (sizes := known_sizes()) is not None:
        return sizes.rows, sizes.columns, sizes.further, sizes.positives
    more = further[:0] if negatives is None or negatives.positive_k is None else further[negatives.positive_k]
    return Layout.of(x_bD, y_mD, further, more)


def _gathered(
    columns: Layout, extra: Layout, y_mD: Tensor, negatives: Columns | None, numbers: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gather, by one collective, the columns of all ranks, (M, D), further columns last, and the numbers of all pairs.

    columns, extra: the layouts of the y of pairs (y_mD on this rank) and of further columns (`negatives`; None only if
    no rank has any). numbers: name → (m,), for some of the names "x" and "y" (content keys), "ids" (sample ids), all
    int64, and "log_q". Returns the columns and a dict with the same names: (B,), of the pairs of all ranks, or for "y"
    and "log_q" (M,), of all columns. Raises ValueError if y has keys and further columns have none.
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
    # of the other names, further columns send row_k as a filler, which is cut off below
    further = negatives.embeddings_kD, *(of_further.get(name, negatives.row_k) for name in numbers)
    sizes = list(zip(columns.sizes, extra.sizes, strict=True))
    both = Layout(tuple(map(sum, sizes)), columns.rank).gathered(*map(torch.cat, zip(own, further, strict=True)))
    parts = (every.split([size for pair in sizes for size in pair]) for every in both)
    y_MD, *every = (torch.cat([*part[::2], *part[1::2]]) for part in parts)
    ends = (None if name in of_further else columns.total for name in numbers)
    return y_MD, {name: e[:end] for name, e, end in zip(numbers, every, ends, strict=True)}


def check_indices(what: str, indices: Tensor, count: int) -> None:
    """Raise ValueError if an element of `indices` is outside 0 … count − 1.

    what: the start of the message, such as "positives: no row". Within collect_checks(speculative=True) of
    sums/conditions.py nothing is raised: the condition is assumed, and recorded for the trainer.
    """
    outside = (indices < 0) | (indices >= count)
    if not holds(~outside.any()):
        wrong = indices[outside]
        raise ValueError(
            f"{what} {int(wrong[0])} among {count}, which are numbered from 0 (local rows, global columns)"
        )


def _check_shapes(rows: Layout, columns: Layout, positives: Tensor | None, *keys: Tensor | None) -> None:
    """Raise ValueError for a global batch without rows, for unequal numbers of x and y, and for a wrong number of keys.

    rows, columns: how many x and how many y each rank holds; on each rank they must be equally many, unless `positives`
    lists the pairs. keys: the content keys of x and of y on this rank, None if not given. With keys, x and y must be
    equally many even if the pairs are listed, with one key for each row of this rank.
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

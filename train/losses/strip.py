"""What an objective sees of a global batch: this rank's rows against all columns, and how they are related."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from data.batch import KnownPositives
from train.losses.duplicates import equal_pairs
from train.losses.gather import Layout
from train.losses.tiles import Pairs


@dataclass(frozen=True)
class Columns:
    """Further y-side items of this rank, flat: k ≥ 0 in all, any number per row.

    embeddings_kD; row_k: local row each belongs to; keys_k: content ids, int64; positive_k: whether it is a further
    positive of that row (else, and by default, a hard negative). Every row sees all of them.
    """

    embeddings_kD: Tensor
    row_k: Tensor
    keys_k: Tensor | None = None
    positive_k: Tensor | None = None

    @staticmethod
    def of(negatives: Tensor | Columns) -> Columns:
        """Columns, or (b, k, D) hard negatives, k for every row. Raises ValueError where a type or length is wrong."""
        if isinstance(negatives, Columns):
            return negatives._checked()
        if negatives.ndim != 3:
            raise ValueError(f"negatives must be (b, k, D), or Columns, not {tuple(negatives.shape)}")
        rows, each = negatives.shape[:2]
        return Columns(negatives.flatten(0, 1), torch.arange(rows, device=negatives.device).repeat_interleave(each))

    def _checked(self) -> Columns:
        count, device = len(self.embeddings_kD), self.embeddings_kD.device
        row_k = integers("negatives.row_k", self.row_k, device)
        keys_k = integers("negatives.keys_k", self.keys_k, device)
        if self.positive_k is not None and self.positive_k.dtype is not torch.bool:
            raise ValueError(f"negatives.positive_k must be bool (k,), not {named(self.positive_k.dtype)}")
        for name, values_k in (("row_k", row_k), ("keys_k", keys_k), ("positive_k", self.positive_k)):
            if values_k is not None and values_k.shape != (count,):
                raise ValueError(
                    f"negatives.{name} must be ({count},), one for each column, not {tuple(values_k.shape)}"
                )
        return Columns(self.embeddings_kD, row_k, keys_k, self.positive_k)


@overload
def integers(name: str, values: Tensor, device: torch.device, *, pairs: bool = False) -> Tensor: ...
@overload
def integers(name: str, values: Tensor | None, device: torch.device, *, pairs: bool = False) -> Tensor | None: ...
def integers(name: str, values: Tensor | None, device: torch.device, *, pairs: bool = False) -> Tensor | None:
    """What a caller gives as whole numbers, of any width, a list or an array, as int64 (n,), or (P, 2) pairs."""
    if values is None:
        return None
    tensor, shape = torch.as_tensor(values, device=device), "(P, 2)" if pairs else "(n,)"
    fits = tensor.ndim == 1 + pairs and (not pairs or tensor.shape[1] == 2)
    if not fits or tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise ValueError(f"{name} must be int64 {shape}, not {named(tensor.dtype)} {tuple(tensor.shape)}")
    return tensor.long()


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Strip:
    """Own rows (b,) against all columns (M,): y of rank 0, 1, …, then further columns of rank 0, 1, ….

    rows, columns: how x and y lie on the ranks. positives: of own rows; excluded: further pairs (P, 2) that no sum has.
    keys: for x and for y, if given, (keys of own rows (b,), keys of the columns that have one (≤ M,)): equal keys are
    the same item. sample_ids_b index per-sample state. All (row, column) pairs: local row, global column.
    """

    x_bD: Tensor
    y_MD: Tensor
    rows: Layout
    columns: Layout
    positives: Pairs
    excluded: Tensor | None = None
    keys: tuple[tuple[Tensor, Tensor], ...] = ()
    sample_ids_b: Tensor | None = None

    def pair_scores(self) -> Tensor:
        """s_ip of the positive pairs of own rows, in the order of `positives`: (P,), float32 or better."""
        if self.positives.own is not None:
            x, y = self.x_bD, self.y_MD[self.positives.own : self.positives.own + len(self.x_bD)]
        else:
            i, j = self.positives.pairs_P2.unbind(1)
            x, y = self.x_bD[i], self.y_MD[j]
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x.to(dtype) * y.to(dtype)).sum(1)

    def counts(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """How many of all ranks' pairs are in each own row (b,) and each column (M,), int64. A collective if listed."""
        columns_M = torch.zeros(len(self.y_MD), dtype=torch.int64, device=self.y_MD.device)
        if pairs.own is not None:
            columns_M[: self.columns.total] = 1
            return columns_M.new_ones(len(self.x_bD)), columns_M
        i, j = pairs.pairs_P2.unbind(1)
        columns_M = self.columns.sum_(columns_M.index_add_(0, j, torch.ones_like(j)))
        return torch.bincount(i, minlength=len(self.x_bD)), columns_M


def build_strip(
    x_bD: Tensor,
    y_mD: Tensor,
    negatives: Columns | None = None,
    positives: Tensor | None = None,
    excluded: Tensor | None = None,
    x_keys: Tensor | None = None,
    y_keys: Tensor | None = None,
    sample_ids_b: Tensor | None = None,
    known: KnownPositives | None = None,
    equal_is_positive: bool = False,
) -> Strip:
    """Gathers the columns of all ranks. Embeddings are as the score wants them (normalised for a cosine).

    positives: (P, 2) instead of the own columns. known: what is right for a row, by key: excluded from its sums where
    it is not among its positives, to which belongs what has an equal key if equal_is_positive. A collective: every rank
    calls it, with `negatives` on all ranks or on none. Raises ValueError where shapes do not fit, and for a pair whose
    row or column there is not.
    """
    further = negatives.embeddings_kD if negatives else y_mD[:0]
    more = further[:0] if negatives is None or negatives.positive_k is None else further[negatives.positive_k]
    rows, columns, extra, more_positives = Layout.of(x_bD, y_mD, further, more)
    _check(rows, columns, positives, x_keys, y_keys)
    for name, pairs_P2 in (("positives", positives), ("excluded", excluded)):
        if pairs_P2 is not None:
            _check_places(f"{name}: no row", pairs_P2[:, 0], len(x_bD))
            _check_places(f"{name}: no column", pairs_P2[:, 1], columns.total + extra.total)
    y_MD = columns.gather(y_mD)
    if extra.total:
        y_MD = torch.cat([y_MD, extra.gather(further)])
    pairs = Pairs.own_columns(len(x_bD), columns.own.start, x_bD.device) if positives is None else None
    if pairs is None or more_positives.total:
        first = columns.total + extra.own.start
        own = torch.arange(len(x_bD), device=x_bD.device)
        listed = [positives if positives is not None else torch.stack([own, own + columns.own.start], 1)]
        if negatives and negatives.positive_k is not None:
            _check_places("negatives.row_k: no row", negatives.row_k, len(x_bD))
            place = torch.arange(len(further), device=x_bD.device) + first
            listed.append(torch.stack([negatives.row_k, place], 1)[negatives.positive_k])
        pairs = Pairs(torch.cat(listed).unique(dim=0))
    keys = []
    if x_keys is not None:
        keys.append((x_keys, rows.gather(x_keys)))
    if y_keys is not None:
        keys.append((y_keys, _column_keys(y_keys, columns, extra, negatives)))
    if known is not None:
        if y_keys is None:
            raise ValueError("known items are found by their keys: give y_keys too")
        known = KnownPositives(*(integers("known", values, x_bD.device) for values in (known.row, known.keys)))
        _check_places("known: no row", known.row, len(x_bD))
        unlisted = _unlisted(known, keys[-1][1], pairs, len(y_MD))
        if equal_is_positive:
            unlisted = unlisted[~of_equal_keys(unlisted, keys)]
        excluded = unlisted if excluded is None else torch.cat([excluded, unlisted])
    return Strip(x_bD, y_MD, rows, columns, pairs, excluded, tuple(keys), sample_ids_b)


def _column_keys(y_keys: Tensor, columns: Layout, extra: Layout, negatives: Columns | None) -> Tensor:
    keys_B = columns.gather(y_keys)
    if not extra.total:
        return keys_B
    if negatives is None or negatives.keys_k is None:
        raise ValueError("y_keys are given and further columns have none: give Columns(…, keys_k) too")
    return torch.cat([keys_B, extra.gather(negatives.keys_k)])


def _unlisted(known: KnownPositives, column_keys_M: Tensor, positives: Pairs, columns: int) -> Tensor:
    """(row, column) of the columns that hold a known item of a row and are none of its positives: (P, 2)."""
    place, column = equal_pairs(known.keys.contiguous(), column_keys_M).unbind(1)
    pairs_P2 = torch.stack([known.row[place], column], 1).unique(dim=0)
    return pairs_P2[~Pairs(pairs_P2).among(positives, columns)]


def of_equal_keys(pairs_P2: Tensor, keys: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """(P,) bool: which (row, column) pairs are equal in one of the keys; these are as in Strip."""
    i, j = pairs_P2.unbind(1)
    equal_P = torch.zeros_like(i, dtype=torch.bool)
    for row_keys, column_keys in keys:
        has_key = j < len(column_keys)
        equal_P[has_key] |= row_keys[i[has_key]] == column_keys[j[has_key]]
    return equal_P


def _check_places(what: str, places: Tensor, count: int) -> None:
    """On a GPU it waits for the answer, as whatever lists pairs does there."""
    wrong = places[(places < 0) | (places >= count)]
    if len(wrong):
        raise ValueError(
            f"{what} {int(wrong[0])} among {count}, which are numbered from 0 (local rows, global columns)"
        )


def _check(rows: Layout, columns: Layout, positives: Tensor | None, *keys: Tensor | None) -> None:
    if positives is None and rows.sizes != columns.sizes:
        raise ValueError(
            f"{rows.sizes[rows.rank]} rows of x and {columns.sizes[rows.rank]} of y are no pairs: say which belong "
            "together with positives=(local row, global column)"
        )
    for key in keys:
        if key is not None and (rows.sizes != columns.sizes or len(key) != rows.sizes[rows.rank]):
            raise ValueError(
                f"{len(key)} keys for {rows.sizes[rows.rank]} rows: keys are of pairs, row i with column i"
            )
    if rows.total == 0:
        raise ValueError("the global batch has no pair")

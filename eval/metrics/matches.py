"""Right pairs of a search (which items are right for which queries), and the ranks of the best right items."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SCAN = 1 << 20  # keys that are read at a time
MISSED = 2**63 - 1  # the rank of a right item that an approximate index did not find


def positions_with(keys_m: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the ascending indices, int64, of the keys in `keys_m` that are in `wanted`.

    keys_m, (m,): keys such as content ids (hashes); may be a memory-mapped array. wanted: the keys to find.
    """
    parts = [at + np.flatnonzero(np.isin(keys_m[at : at + SCAN], wanted)) for at in range(0, len(keys_m), SCAN)]
    return np.concatenate([np.empty(0, np.int64), *parts])


@dataclass(frozen=True)
class Labels:
    """Labels of `size` items: the item with index `index[p]` has the label `label[p]`, for each position p.

    Labels are, for example, content keys. An item may have none or several. The array `index` is in ascending order.
    """

    index: np.ndarray
    label: np.ndarray
    size: int

    @staticmethod
    def of(*carried: tuple[np.ndarray, np.ndarray], size: int) -> "Labels":
        """Return the Labels of `size` items from pairs of arrays of equal length, (item indices, labels).

        The item indices of each pair may be in any order and repeated.
        """
        index, label = (np.concatenate(parts) for parts in zip(*carried, strict=True))
        order = np.argsort(index, kind="stable")
        return Labels(index[order], label[order], size)


class Matches:
    """The right pairs of n queries and m items: a query and an item are right for each other if they share a label.

    The pairs are computed on request, for a range of queries at a time, so that they need not all be in memory.
    """

    def __init__(self, queries: Labels, items: Labels) -> None:
        self.queries = queries
        self.shape = (queries.size, items.size)
        order = np.argsort(items.label, kind="stable")
        self._label, self._item = items.label[order], items.index[order]

    def pairs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the right pairs of the queries start … stop − 1 as two arrays: (query index − start, item index).

        Each pair occurs once; pairs are sorted by query, then by item.
        """
        begin, end = np.searchsorted(self.queries.index, [start, stop])
        rows, (low, count) = self.queries.index[begin:end] - start, self._found(self.queries.label[begin:end])
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        items = self._item[np.repeat(low, count) + within]
        unique = np.unique(np.repeat(rows, count) * self.shape[1] + items)
        return unique // self.shape[1], unique % self.shape[1]

    def most(self) -> int:
        """Return the largest number of right pairs of a query; pairs that share several labels count repeatedly."""
        return int(np.bincount(self.queries.index, self._found(self.queries.label)[1]).max(initial=0))

    def _found(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each label, where its items begin in self._item, and their number."""
        low = np.searchsorted(self._label, labels, "left")
        return low, np.searchsorted(self._label, labels, "right") - low


class Ranking(NamedTuple):
    """The ranks of n queries in a search for their right items. All fields are arrays (n,).

    rank: the rank of the best right item, from 1; MISSED if the query has no right item, or if an approximate index
    found none. right: the number of right items. Both are int64. best, best_wrong: the scores of the best right item
    and of the best wrong item that the search found, float32, −inf if there is no such item.
    """

    rank: np.ndarray
    right: np.ndarray
    best: np.ndarray
    best_wrong: np.ndarray

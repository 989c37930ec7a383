"""The truth of a retrieval, which items are right for which queries, and the ranks of the best right items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SCAN = 1 << 20  # keys that are read at a time


def positions_with(keys_m: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The positions, ascending, of the keys that are among `wanted`. keys_m may be memory-mapped."""
    parts = [
        start + np.flatnonzero(np.isin(keys_m[start : start + SCAN], wanted)) for start in range(0, len(keys_m), SCAN)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


@dataclass(frozen=True)
class Labels:
    """Labels of `size` items: item `index[p]` has the label `label[p]`. An item may have several; `index` ascends."""

    index: np.ndarray
    label: np.ndarray
    size: int

    @staticmethod
    def of(*carried: tuple[np.ndarray, np.ndarray], size: int) -> Labels:
        """Labels from (index, label) arrays in any order."""
        index, label = (np.concatenate(parts) for parts in zip(*carried, strict=True))
        order = np.argsort(index, kind="stable")
        return Labels(index[order], label[order], size)


class Matches:
    """The right pairs of n queries and m items: those that share a label. Pairs are made strip by strip."""

    def __init__(self, queries: Labels, items: Labels) -> None:
        self.queries = queries
        self.shape = (queries.size, items.size)
        order = np.argsort(items.label, kind="stable")
        self._label, self._item = items.label[order], items.index[order]

    def pairs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(query − start, item) of all right pairs of queries [start, stop), each pair once, in ascending order."""
        begin, end = np.searchsorted(self.queries.index, [start, stop])
        rows, labels = self.queries.index[begin:end] - start, self.queries.label[begin:end]
        low, high = np.searchsorted(self._label, labels, "left"), np.searchsorted(self._label, labels, "right")
        count = high - low
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        items = self._item[np.repeat(low, count) + within]
        unique = np.unique(np.repeat(rows, count) * self.shape[1] + items)
        return unique // self.shape[1], unique % self.shape[1]


class Ranking(NamedTuple):
    """Arrays (n,) for n queries: the rank and the number of right items, int64; the scores of the best right and the
    best wrong item, float32, −inf if there is no such item.
    """

    rank: np.ndarray
    right: np.ndarray
    best: np.ndarray
    best_wrong: np.ndarray

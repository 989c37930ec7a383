"""How far right answers stand from wrong ones: a histogram of scores, of a few queries and within little memory.

k queries, m items, D embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.memory import forget_pages

QUERIES = 2000
PER_QUERY = 5  # right pairs, and random ones
BINS = 40
SLAB = 2**18  # numbers of each side held at a time; each row of a mapped file brings its neighbours along


def spread(n: int, count: int = QUERIES) -> np.ndarray:
    """`count` of the positions 0 … n-1, evenly spread; all of them when there are not so many."""
    return np.linspace(0, n - 1, min(n, count)).astype(np.int64)


def score_histogram(
    queries_kD: np.ndarray,
    items_mD: np.ndarray,
    right: Sequence[np.ndarray],
    best_wrong: np.ndarray,
    seed: int = 0,
) -> dict[str, list[Any]]:
    """{"edges" (BINS + 1), "right", "wrong", "best_wrong" (BINS each)}: scores of right pairs, of random pairs not
    known to be right, and of the best wrong item of each query; counts in common bins.

    right: of each query the positions of its right items, of which a few count; best_wrong (k,): −inf where all that
    is known is right. items_mD may be mapped, and float16.
    """
    draw = np.random.default_rng(seed)
    known = [items[spread(len(items), PER_QUERY)] for items in right]
    others = [np.setdiff1d(draw.integers(0, len(items_mD), PER_QUERY), items) for items in right]
    scores = {
        "right": _pair_scores(queries_kD, items_mD, known),
        "wrong": _pair_scores(queries_kD, items_mD, others),
        "best_wrong": best_wrong[np.isfinite(best_wrong)],
    }
    everything = np.concatenate(list(scores.values()))
    edges = np.histogram_bin_edges(everything, BINS) if len(everything) else np.linspace(0, 1, BINS + 1)
    return {"edges": edges.tolist(), **{name: np.histogram(s, edges)[0].tolist() for name, s in scores.items()}}


def _pair_scores(queries_kD: np.ndarray, items_mD: np.ndarray, items: Sequence[np.ndarray]) -> np.ndarray:
    """The score of each query with each of its items, one after the other."""
    rows = np.repeat(np.arange(len(items)), [len(of) for of in items])
    columns = np.concatenate(items) if len(items) else np.empty(0, np.int64)
    scores = np.empty(len(rows), np.float32)
    size = max(1, SLAB // queries_kD.shape[1])
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        scores[part] = np.einsum("pd,pd->p", queries_kD[rows[part]], items_mD[columns[part]].astype(np.float32))
        forget_pages(items_mD)
    return scores

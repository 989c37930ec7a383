"""Histograms of the scores of right and wrong pairs, from a sample of the queries and in little memory.

Symbols: k queries of the sample, m items, D embedding width.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dyad.data.base.arrays import evenly_spaced
from dyad.eval.search.ranks import pair_scores

QUERIES = 2000  # the most queries of the sample
PER_QUERY = 5  # the most right pairs, and random pairs, of a query
BINS = 40


def score_histogram(
    queries_kD: np.ndarray, items_mD: np.ndarray, right: Sequence[np.ndarray], best_wrong: np.ndarray
) -> dict[str, list[Any]]:
    """Return histograms of the scores of right pairs, wrong pairs and best wrong items, for a sample of k queries.

    All have the same bins: {"edges": BINS + 1 boundaries of the bins, "right", "wrong", "best_wrong": BINS counts
    each}. The wrong pairs are random pairs of a query and an item, without right pairs. queries_kD, items_mD:
    embeddings, (k, D) and (m, D); items_mD may be memory-mapped, and float16. right: the indices of the right items of
    each query, of which at most PER_QUERY are used. best_wrong (k,): the score of the best wrong item of each query,
    −inf if there is none.
    """
    draw = np.random.default_rng(0)
    some_right = [items[evenly_spaced(len(items), PER_QUERY)] for items in right]
    others = [np.setdiff1d(draw.integers(0, len(items_mD), PER_QUERY), items) for items in right]
    scores = {
        "right": _pair_scores(queries_kD, items_mD, some_right),
        "wrong": _pair_scores(queries_kD, items_mD, others),
        "best_wrong": best_wrong[np.isfinite(best_wrong)],
    }
    # float64: NumPy makes no 40 bins between float32 scores that differ by a few of their smallest steps
    everything = np.concatenate(list(scores.values()), dtype=np.float64)
    edges = np.histogram_bin_edges(everything, BINS) if len(everything) else np.linspace(0, 1, BINS + 1)
    return {"edges": edges.tolist(), **{name: np.histogram(s, edges)[0].tolist() for name, s in scores.items()}}


def _pair_scores(queries_kD: np.ndarray, items_mD: np.ndarray, items: Sequence[np.ndarray]) -> np.ndarray:
    """Return the scores of pairs of a query and an item in one array, float32, query after query.

    items: for each of the k queries the indices of its items.
    """
    rows = np.repeat(np.arange(len(items)), [len(of) for of in items])
    return pair_scores(queries_kD, items_mD, rows, np.concatenate(items) if len(items) else np.empty(0, np.int64))

"""Computes the ranks of the best right items among the k items that a search index finds.

Symbols: n queries, m items, p pairs of a query and an item.
"""

from typing import Any

import numpy as np

from dyad.eval.encode.process_memory import drop_pages
from dyad.eval.metrics.matches import Matches, Ranking
from dyad.eval.search.index import BLOCK, STRIP, Index

SLAB = 2**18  # numbers of each side in memory at a time; reading a row of a mapped file also loads its neighbours


def found_ranks(queries_nD: np.ndarray, index: Index, matches: Matches, k: int) -> tuple[Ranking, dict[str, Any]]:
    """Search `index` for n queries, with k results each, and compute the rank of the best right item of each query.

    Returns (Ranking: ranks, counts of right items, scores of the best right and the best wrong item; description of
    the search, with its recall against exact search).

    queries_nD (n, D): the query vectors of width D. matches: which of the m items are right for which queries. If no
    right item is among the k items found, the rank is max(m, k) + 1. The best wrong score of a query is the highest
    score of the wrong items among those found. Among items with equal scores the lower index comes first. All processes
    must call it together. Memory: at most BLOCK queries, or STRIP scores, at a time.
    """
    (n, m), items_mD = matches.shape, index.corpus
    hits = index.search(queries_nD, k)
    rank, right = np.full(n, max(m, k) + 1, np.int64), np.zeros(n, np.int64)
    best, best_wrong = np.full(n, -np.inf, np.float32), np.full(n, -np.inf, np.float32)
    size = max(1, min(BLOCK, STRIP // m))
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        row, item = matches.pairs(rows.start, rows.stop)
        right[rows] = np.bincount(row, minlength=rows.stop - start)
        np.maximum.at(best[rows], row, pair_scores(queries_nD[rows], items_mD, row, item))
        positions_tk, scores_tk = hits.positions[rows], hits.scores[rows]
        pairs_tk = np.arange(len(positions_tk))[:, None] * (m + 1) + positions_tk  # one number for each pair
        is_right_tk = np.isin(pairs_tk, row * (m + 1) + item)
        hit = is_right_tk.any(axis=1)
        rank[rows][hit] = 1 + is_right_tk[hit].argmax(axis=1)
        best_wrong[rows] = np.where(is_right_tk, -np.inf, scores_tk).max(axis=1)
    recall = index.recall_against_exact(hits, queries_nD)
    how = {**index.how, f"recall_against_exact@{hits.positions.shape[1]}": recall}
    return Ranking(rank, right, best, best_wrong), how


def pair_scores(queries_tD: np.ndarray, items_mD: np.ndarray, row: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Return the (p,) scores (inner products) of p pairs: query `row[i]` with item `item[i]`.

    queries_tD (t, D): t query vectors of width D. items_mD (m, D): the item vectors, which may be memory-mapped, and
    float16. row, item (p,): indices.
    """
    scores, size = np.empty(len(row), np.float32), max(1, SLAB // items_mD.shape[1])
    for start in range(0, len(row), size):
        part = slice(start, start + size)
        scores[part] = np.einsum("pd,pd->p", queries_tD[row[part]], items_mD[item[part]].astype(np.float32))
        drop_pages(items_mD)
    return scores

"""The rank of the best right item among those that an index finds, as far as it looks. n queries, m items, k found."""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.index import BLOCK, recall_against_exact, search
from eval.matches import Matches, Ranking
from train.distributed.world import World


def found_ranks(
    queries_nD: np.ndarray, items_mD: np.ndarray, matches: Matches, index: str, k: int, world: World
) -> tuple[Ranking, dict[str, Any]]:
    """Ranks, where a right item is among the k that are found, else m; and what the search was, with its recall.

    The best wrong score is that of what is found. Ties: see eval/index.py. A collective.
    """
    n, m = matches.shape
    hits = search(queries_nD, items_mD, k, index, world=world)
    rank, right = np.full(n, m, np.int64), np.zeros(n, np.int64)
    best, best_wrong = np.full(n, -np.inf, np.float32), np.full(n, -np.inf, np.float32)
    for start in range(0, n, BLOCK):
        rows = slice(start, min(start + BLOCK, n))
        row, item = matches.pairs(rows.start, rows.stop)
        right[rows] = np.bincount(row, minlength=rows.stop - start)
        np.maximum.at(best[rows], row, np.einsum("pd,pd->p", queries_nD[rows][row], items_mD[item]))
        positions_tk, scores_tk = hits.positions[rows], hits.scores[rows]
        places = np.arange(len(positions_tk))[:, None] * (m + 1) + positions_tk
        is_right_tk = np.isin(places, row * (m + 1) + item)
        hit = is_right_tk.any(axis=1)
        rank[rows][hit] = 1 + is_right_tk[hit].argmax(axis=1)
        best_wrong[rows] = np.where(is_right_tk, -np.inf, scores_tk).max(axis=1)
    share = recall_against_exact(hits, queries_nD, items_mD, world=world)
    how = {"index": index, f"recall_against_exact@{hits.positions.shape[1]}": share}
    return Ranking(rank, right, best, best_wrong), how

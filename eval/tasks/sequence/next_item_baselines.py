"""Baselines of next items, which count the events of training: popularity, successors of the last item, item-kNN; and
for items that are texts BM25 by the text of the last item.

Each baseline returns a function from a history, the numbers of its k items, oldest first, int64 (k,), to the scores of
all items as the next one, (N,), the highest first in a ranking.

Symbols: N items; U users; k items of a history. Items i and j; n_j: events of training with j.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.sequence.histories import NextItems
from dyad.data.sequence.items import ItemTexts
from dyad.data.shards.content_keys import Int64s
from dyad.eval.config import Baseline
from dyad.eval.metrics.matches import MISSED
from dyad.train.eval_config import Seen

Score = Callable[[Int64s], np.ndarray]  # the items of a history, oldest first → the scores of all items, (N,)


def popularity(data: NextItems) -> Score:
    """Return a function from a history to scores (N,): item j has n_j. The history does not count."""
    count_N = _counts(data)
    return lambda history_k: count_N


def successors(data: NextItems) -> Score:
    """Return a function from a history to scores (N,): item j has c_ij + n_j / (1 + Σ n).

    i: the last item of the history. c_ij: how often j is the event of a user right after i in training. The second
    part is below 1, so among equal c the more popular item is ahead.
    """
    item_e, user_e = _training(data)
    same_user = user_e[1:] == user_e[:-1]
    follows = _matrix(item_e[:-1][same_user], item_e[1:][same_user], (data_size(data), data_size(data)))
    tie = _counts(data) / (1 + _counts(data).sum())
    return lambda history_k: follows[[history_k[-1]]].toarray()[0] + tie


def item_knn(data: NextItems) -> Score:
    """Return a function from a history to scores (N,): item j has Σ_i cos(u_i, u_j) over the different items i of the
    history, rounded to 9 decimals (Sarwar et al. 2001, section 3.1.1).

    u_j, (U,): 1 for each user who has j in training, else 0.
    """
    item_e, user_e = _training(data)
    seen_UN = _matrix(user_e, item_e, (len(data.log.users), data_size(data)))
    seen_UN.data[:] = 1.0
    norm_N = np.sqrt(np.asarray(seen_UN.sum(0))[0])
    unit_UN = seen_UN.multiply(1 / np.maximum(norm_N, 1)).tocsc()

    def score(history_k: Int64s) -> np.ndarray:
        items = np.unique(history_k)
        of_users = np.asarray(unit_UN[:, items].sum(1))[:, 0]
        return np.round(unit_UN.T @ of_users, 9)  # equal sums of other orders of users are equal

    return score


def bm25(data: NextItems) -> Score:
    """Return a function from a history to scores (N,): BM25 of the text of an item for that of the last item of the
    history as the query; 0 for texts that share no word with it. The items of `data` must be texts."""
    assert isinstance(data.items, ItemTexts)
    texts = [data.items.text(number).text for number in range(data_size(data))]
    index = build_bm25(texts)

    def score(history_k: Int64s) -> np.ndarray:
        scores = np.zeros(len(texts), np.float32)
        ((found, places),) = index.search([texts[history_k[-1]]], len(texts))
        scores[places] = found
        return scores

    return score


# Baseline → what makes its scores of a log
SCORERS: dict[Baseline, Callable[[NextItems], Score]] = {
    Baseline.popularity: popularity,
    Baseline.successors: successors,
    Baseline.item_knn: item_knn,
    Baseline.bm25: bm25,
}


def ranks_by(make: Callable[[NextItems], Score], data: NextItems, seen: Seen) -> Int64s:
    """Return the rank of the target of each event, (n,): 1 + the items ahead, which are those with a higher score, and
    of equal scores those with lower numbers; MISSED for an unknown target."""
    score, target_n = make(data), data.target_n
    rank_n = np.full(len(data), MISSED)
    for i in np.flatnonzero(target_n < data_size(data)).tolist():
        history_k, target = data.before(i), int(target_n[i])
        scores_N = np.array(score(history_k), np.float64)
        if seen is Seen.drop:
            scores_N[np.setdiff1d(history_k, [target])] = -np.inf
        equal = scores_N[:target] == scores_N[target]
        rank_n[i] = 1 + (scores_N > scores_N[target]).sum() + equal.sum()
    return rank_n


def data_size(data: NextItems) -> int:
    """Return N, the number of items that can be answers."""
    return len(data.items.names)


def _training(data: NextItems) -> tuple[Int64s, Int64s]:
    """Return the item and the user of each event of training, by user, oldest first."""
    events = np.flatnonzero(data.train_e & (data.log.item_e < data_size(data)))
    return data.log.item_e[events], np.searchsorted(data.log.starts, events, side="right") - 1


def _counts(data: NextItems) -> np.ndarray:
    return np.bincount(_training(data)[0], minlength=data_size(data)).astype(np.float64)


def _matrix(rows: Int64s, columns: Int64s, shape: tuple[int, int]) -> Any:
    """Return the matrix that counts each pair of a row and a column."""
    return sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)

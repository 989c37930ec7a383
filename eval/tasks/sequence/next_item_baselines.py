"""Baselines of next-item prediction, which need no model.

Popularity, successors of the last item and item-kNN are computed from the events of training. For items that are texts
there is also BM25, with the text of the last item as the query. Each baseline is a function that takes the data and
returns a scoring function: it takes a history, the indices of its k items, oldest first, int64 (k,), and returns a
score of each item as the next one, (N,); higher is better.

Symbols: N items; U users; k items of a history; i, j items; n_j the number of training events with item j.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from scipy import sparse

from dyad.data.base.errors import DataError
from dyad.data.base.progress import tracked
from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.sequence.histories import NextItems
from dyad.data.sequence.items import ItemTexts
from dyad.data.shards.content_keys import Int64s
from dyad.eval.config import Baseline
from dyad.eval.metrics.matches import MISSED
from dyad.train.eval_config import Seen

SHARE = 0.5  # of the free memory, that the cosines of all pairs of items may take

Score = Callable[[Int64s], np.ndarray]  # items of a history, oldest first, (k,) → the scores of all items, (N,)


def popularity(data: NextItems) -> Score:
    """Return a function from a history to scores (N,), in which item j has the score n_j for every history.

    n_j: the number of training events with item j.
    """
    count_N = _counts(data)
    return lambda history_k: count_N


def successors(data: NextItems) -> Score:
    """Return a function from a history to scores (N,), in which item j has the score c_ij + n_j / (1 + Σ_j n_j).

    i: the last item of the history. c_ij: how often a user's event with i is directly followed by one with j in
    training. n_j: the number of training events with j. The second term is below 1, so it only orders items of equal
    c_ij, by popularity.
    """
    item_e, user_e = _training(data)
    same_user = user_e[1:] == user_e[:-1]
    follows = _matrix(item_e[:-1][same_user], item_e[1:][same_user], (item_count(data), item_count(data)))
    tie = _counts(data) / (1 + _counts(data).sum())
    return lambda history_k: follows[[history_k[-1]]].toarray()[0] + tie


def item_knn(data: NextItems) -> Score:
    """Return a function from a history to scores (N,), in which item j has the score Σ_{i≠j} cos(u_i, u_j).

    The sum is over the different items i of the history but j itself, as in Deshpande & Karypis 2004, algorithm 1, with
    the cosine of Sarwar et al. 2001, section 3.1.1, and all items as neighbours; scores are rounded to 9 decimals. u_j,
    (U,): 1 for each user with a training event with j, else 0. The cosines of all pairs of items are computed once if
    N ≤ U and they fit into SHARE of the free memory. Then a history costs a sum of k rows of N numbers. Otherwise it
    costs a pass over all training events.
    """
    item_e, user_e = _training(data)
    seen_UN = _matrix(user_e, item_e, (len(data.log.users), item_count(data)))
    seen_UN.data[:] = 1.0
    norm_N = np.sqrt(np.asarray(seen_UN.sum(0))[0])
    unit_UN = seen_UN.multiply(1 / np.maximum(norm_N, 1)).tocsr()
    unit_NU = unit_UN.T.tocsr()
    users, count = unit_UN.shape
    fits = 8 * count**2 <= SHARE * psutil.virtual_memory().available
    cosine_NN = _product(unit_NU, unit_UN) if fits and count <= users else None

    def score(history_k: Int64s) -> np.ndarray:
        items = np.unique(history_k)
        chosen_1N = _matrix(np.zeros_like(items), items, (1, count))
        if cosine_NN is None:
            scores_N = unit_NU @ (unit_UN @ chosen_1N.T).toarray()[:, 0]
        else:
            scores_N = (chosen_1N @ cosine_NN)[0]
        scores_N[items] -= norm_N[items] > 0  # cos(u_j, u_j)
        return np.round(scores_N, 9)  # so that sums in another order are equal

    return score


def bm25(data: NextItems) -> Score:
    """Return a function from a history to scores (N,): the BM25 score of the text of each item.

    The query is the text of the last item of the history. Texts that share no word with it have the score 0. The items
    of `data` must be texts.
    """
    assert isinstance(data.items, ItemTexts)
    texts = [data.items.text(number).text for number in range(item_count(data))]
    index = build_bm25(texts)

    def score(history_k: Int64s) -> np.ndarray:
        scores = np.zeros(len(texts), np.float32)
        ((found, places),) = index.search([texts[history_k[-1]]], len(texts))
        scores[places] = found
        return scores

    return score


# Baseline → the function that returns its scoring function for a log
SCORERS: dict[Baseline, Callable[[NextItems], Score]] = {
    Baseline.popularity: popularity,
    Baseline.successors: successors,
    Baseline.item_knn: item_knn,
    Baseline.bm25: bm25,
}


def ranks_by(make: Callable[[NextItems], Score], data: NextItems, seen: Seen, name: str = "baseline") -> Int64s:
    """Return the rank of the right item of each event, int64 (n,), by a baseline; MISSED if its index is N or more.

    The rank is 1 + the number of items with a higher score, or with an equal score and a lower index. make: a baseline,
    such as `popularity`. seen: whether the other items of the history are ranked too (keep) or not (drop). name: the
    label of the progress, which is shown on standard error.
    """
    score, target_n = make(data), data.target_n
    rank_n = np.full(len(data), MISSED)
    known = np.flatnonzero(target_n < item_count(data)).tolist()
    for i in tracked(known, name, len(known)):
        history_k, target = data.before(i), int(target_n[i])
        scores_N = np.array(score(history_k), np.float64)
        if seen is Seen.drop:
            scores_N[np.setdiff1d(history_k, [target])] = -np.inf
        equal = scores_N[:target] == scores_N[target]
        rank_n[i] = 1 + (scores_N > scores_N[target]).sum() + equal.sum()
    return rank_n


def item_count(data: NextItems) -> int:
    """Return N, the number of items that can be predicted. The log may have more items, with indices from N on."""
    return len(data.items.names)


def _training(data: NextItems) -> tuple[Int64s, Int64s]:
    """Return (item index, user index) of each training event with one of the N items, by user, oldest event first.

    Both are int64 arrays. Raises DataError if there is no training event, as for an export.
    """
    if not data.train_e.any():
        raise DataError("it counts events of data.train, and an export has none")
    events = np.flatnonzero(data.train_e & (data.log.item_e < item_count(data)))
    return data.log.item_e[events], np.searchsorted(data.log.starts, events, side="right") - 1


def _counts(data: NextItems) -> np.ndarray:
    """Return the number of training events of each item, float64 (N,)."""
    return np.bincount(_training(data)[0], minlength=item_count(data)).astype(np.float64)


def _matrix(rows: Int64s, columns: Int64s, shape: tuple[int, int]) -> Any:
    """Return a scipy CSR matrix of `shape` whose entry (r, c) is the number of positions with rows=r and columns=c."""
    matrix = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)
    matrix.sum_duplicates()  # scipy 1.13 keeps them as entries of their own
    return matrix


def _product(a: Any, b: Any) -> np.ndarray:
    """Return the product of two scipy CSR matrices as a dense array, computed in blocks of rows, to save memory."""
    dense = np.empty((a.shape[0], b.shape[1]))
    for start in range(0, len(dense), 256):
        (a[start : start + 256] @ b).toarray(out=dense[start : start + 256])
    return dense

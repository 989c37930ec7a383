"""Ranks of the best right items of queries: exactly, by counting, or among the items that an approximate index finds.

Rank of a query: 1 + the number of wrong items ahead of its best right item; other right items are not counted (filtered
rank). An item is ahead if its score is higher, or if its score is equal and its index is lower. So a model that gives
equal scores to everything does no better than a random order. Exact ranks are computed by counting in the matrix of
scores, strip by strip, without a list of the best items.

Symbols: n queries, m items, D embedding width, k items found for a query, t queries of one strip (the part of the
queries scored at one time), p pairs of a query and an item.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyad.eval.encode.process_memory import drop_pages
from dyad.eval.metrics.matches import MISSED, Matches, Ranking
from dyad.eval.search.index import Hits, Index
from dyad.train.distributed.world import World, all_reduce_sum

STRIP, STRIP_GPU = 2**22, 2**28  # scores in memory at a time: 16 MiB, 1 GiB
SLAB = 2**18  # elements of the embeddings of `pair_scores` in memory at a time; a mapped file is read page by page


class Ranked(NamedTuple):
    """The ranks of n queries, and the search that gave them.

    ranking: the ranks. how: Index.how of the index in use. hits: the items that an approximate index found for the
    queries; None: the ranks are exact. recall_metrics: Index.recall_metrics of the search before hidden items are left
    out; {} if the ranks are exact.
    """

    ranking: Ranking
    how: dict[str, Any]
    hits: Hits | None
    recall_metrics: dict[str, float]


def ranked(
    queries_nD: np.ndarray,
    items_mD: np.ndarray,
    matches: Matches,
    spec: str,
    depth: int,
    world: World,
    hidden: Matches | None = None,
) -> Ranked:
    """Rank the best right item of each of n queries among m items, with the FAISS index `spec`.

    queries_nD, items_mD: embeddings, (n, D) and (m, D); a score is their inner product. matches: the right pairs.
    depth: how many items an approximate index finds for each query; not used by an exact index, which counts. hidden:
    pairs of a query and an item that is left out of the search for this query; never a right pair. All processes must
    call it together with the same arguments, and get the same result.
    """
    index = Index(items_mD, spec, world=world)
    if index.exact:
        return Ranked(count_ranks(queries_nD, items_mD, matches, world, hidden), index.how, None, {})
    most = max(np.bincount(hidden.pairs(0, len(queries_nD))[0]), default=0) if hidden else 0
    found = index.search(queries_nD, depth + int(most))
    first = Hits(found.scores[:, :depth], found.positions[:, :depth])  # of all items, as an exact search finds them
    hits = first if hidden is None else _without(found, hidden, depth)
    ranking = found_ranks(queries_nD, items_mD, matches, hits)
    return Ranked(ranking, index.how, hits, index.recall_metrics(first, queries_nD))


@torch.inference_mode()
def count_ranks(
    queries_nD: np.ndarray, items_mD: np.ndarray, matches: Matches, world: World, hidden: Matches | None = None
) -> Ranking:
    """Compute exactly the rank of the best right item of each of n queries among m items.

    The rank is 1 + the number of wrong items ahead of that item. An item is ahead if its score is higher, or equal and
    its index is lower. queries_nD, items_mD: embeddings, float32 (n, D) and (m, D); a score is their inner product.
    matches: which items are right for which queries; the rank of a query without a right item is MISSED. hidden: pairs
    of a query and an item that is not ranked for this query; never a right pair. All processes must call it with the
    same arguments; each scores its share of the queries, `strip_size` at a time, and all return the same result. All
    item embeddings are on world.device.
    """
    n, m = matches.shape
    assert queries_nD.shape[0] == n and items_mD.shape[0] == m, (queries_nD.shape, items_mD.shape, matches.shape)
    items_Dm = torch.from_numpy(items_mD).to(world.device).T
    counts = torch.zeros(2, n, dtype=torch.int64, device=world.device)
    scores = torch.zeros(2, n, device=world.device)
    size = strip_size(world.device, n, m, world.size)
    # reused: to allocate new pages would take longer than to count
    score, flag = torch.empty(2, min(size, n), m, device=world.device)
    for start in range(world.rank * size, n, world.size * size):
        stop = min(start + size, n)
        queries_tD = torch.from_numpy(queries_nD[start:stop]).to(world.device)
        pairs = [torch.from_numpy(p).to(world.device) for p in matches.pairs(start, stop)]
        score_tm = torch.mm(queries_tD, items_Dm, out=score[: stop - start])
        if hidden is not None:
            score_tm[tuple(torch.from_numpy(p).to(world.device) for p in hidden.pairs(start, stop))] = -torch.inf
        counts[:, start:stop], scores[:, start:stop] = _strip_ranks(score_tm, flag[: stop - start], *pairs)
    (rank, right), (best, best_wrong) = (all_reduce_sum(sums, world).cpu().numpy() for sums in (counts, scores))
    return Ranking(np.where(right > 0, rank, MISSED), right, best, best_wrong)


def strip_size(device: torch.device, n: int, m: int, world_size: int) -> int:
    """Return how many of n queries are scored against m items at a time: at least 1, else within these limits.

    On a CPU a strip has at most STRIP scores. On a GPU it has at most STRIP_GPU scores, as each strip reads all items,
    and at most ⌈n / world_size⌉ queries, so that the processes share the work.
    """
    return max(1, STRIP // m if device.type == "cpu" else min(STRIP_GPU // m, -(-n // world_size)))


def _strip_ranks(score_tm: Tensor, flag_tm: Tensor, row: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the ranks of t queries from their scores score_tm for all m items.

    Returns two arrays (2, t): the rank and the number of right items of each query, and the scores of its best right
    and its best wrong item. row, item: for each right pair, the row of its query in score_tm and the index of its item.
    Overwrites the scores of right items with −inf, and flag_tm, which is only memory to work in.
    """
    t, m = score_tm.shape
    score = score_tm[row, item]
    best_t = score.new_full((t,), -torch.inf).scatter_reduce_(0, row, score, "amax")
    right_t = torch.zeros(t, dtype=torch.int64, device=row.device).index_add_(0, row, torch.ones_like(row))
    is_best = score == best_t[row]
    first_t = torch.full_like(right_t, m).scatter_reduce_(0, row[is_best], item[is_best], "amin")
    score_tm[row, item] = -torch.inf
    ahead_t = torch.gt(score_tm, best_t[:, None], out=flag_tm).sum(dim=1, dtype=torch.int32)
    tied = (torch.eq(score_tm, best_t[:, None], out=flag_tm).amax(dim=1) > 0).nonzero()[:, 0]
    earlier = torch.arange(m, device=row.device) < first_t[tied, None]
    ahead_t[tied] += ((score_tm[tied] == best_t[tied, None]) & earlier).sum(dim=1, dtype=torch.int32)
    return torch.stack([1 + ahead_t.long(), right_t]), torch.stack([best_t, score_tm.amax(dim=1)])


def _without(hits: Hits, hidden: Matches, depth: int) -> Hits:
    """Return `hits` without the hidden items of each query, cut to the first `depth` items.

    hidden: pairs of a query and an item to leave out. Missing entries have the score −inf and the position m.
    """
    row, item = hidden.pairs(0, len(hits.positions))
    m = hidden.shape[1]
    pairs_nk = np.arange(len(hits.positions))[:, None] * (m + 1) + hits.positions
    is_hidden_nk = np.isin(pairs_nk, row * (m + 1) + item)
    order_nk = np.argsort(is_hidden_nk, axis=1, kind="stable")[:, :depth]
    gone_nk, scores_nk, positions_nk = (
        np.take_along_axis(each, order_nk, 1) for each in (is_hidden_nk, hits.scores, hits.positions)
    )
    return Hits(np.where(gone_nk, -np.inf, scores_nk).astype(np.float32), np.where(gone_nk, m, positions_nk))


# ---- among what an index found ---------------------------------------------------------------------------------------


def found_ranks(queries_nD: np.ndarray, items_mD: np.ndarray, matches: Matches, hits: Hits) -> Ranking:
    """Compute the rank of each query as the place of its first right item in `hits`, from 1; MISSED if there is none.

    queries_nD, items_mD: embeddings, for the scores of right pairs. matches: the right pairs. hits: the k items found
    for each of n queries, best first; the best wrong item is taken from them. If k is m and the search is exact, the
    ranks are those of `count_ranks`.
    """
    n, m = matches.shape
    rank, right = np.full(n, MISSED), np.zeros(n, np.int64)
    best, best_wrong = np.full((2, n), -np.inf, np.float32)
    size = max(1, STRIP // max(hits.positions.shape[1], matches.most()))
    for start in range(0, n, size):
        strip = slice(start, min(start + size, n))
        row, item = matches.pairs(strip.start, strip.stop)
        right[strip] = np.bincount(row, minlength=strip.stop - start)
        np.maximum.at(best[strip], row, pair_scores(queries_nD[strip], items_mD, row, item))
        scores_tk, positions_tk = hits.of(strip)
        pairs_tk = np.arange(len(positions_tk))[:, None] * (m + 1) + positions_tk  # position m: nothing was found
        is_right_tk = np.isin(pairs_tk, row * (m + 1) + item)
        rank[strip] = np.where(is_right_tk.any(axis=1), 1 + is_right_tk.argmax(axis=1), MISSED)
        best_wrong[strip] = np.where(is_right_tk, -np.inf, scores_tk).max(axis=1)
    return Ranking(rank, right, best, best_wrong)


def pair_scores(queries_tD: np.ndarray, items_mD: np.ndarray, row: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Return the (p,) inner products of p pairs: query row[i] with item item[i].

    queries_tD (t, D) and items_mD (m, D): vectors; items_mD may be memory-mapped, and float16. row, item (p,): indices.
    """
    scores, size = np.empty(len(row), np.float32), max(1, SLAB // items_mD.shape[1])
    for start in range(0, len(row), size):
        part = slice(start, start + size)
        scores[part] = np.einsum("pd,pd->p", queries_tD[row[part]], items_mD[item[part]].astype(np.float32))
        drop_pages(items_mD)
    return scores

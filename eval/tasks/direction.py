"""A search in one direction: its ranks, chance levels and example cases. Retrieval and classification are searches.

Symbols: n queries, m items, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dyad.data.base.arrays import evenly_spaced
from dyad.eval.metrics.matches import Matches
from dyad.eval.results.cases import ANSWERS, RIGHT, Case, Item, answer, choose, ranked_case
from dyad.eval.results.score_histogram import QUERIES, score_histogram
from dyad.eval.search.index import Hits, Index
from dyad.eval.search.index_spec import EXACT
from dyad.eval.search.ranks import Ranked, ranked
from dyad.train.distributed.world import World

AT_ONCE = 1024  # queries whose right pairs are in memory at a time


def chance_recall(right: np.ndarray, m: int, k: int) -> float:
    """Return the chance level of R@K (K = `k`): the mean R@K of a random ranking of m items.

    right (n,): the number of right items of each of n queries. For K ≤ m the value is the mean over queries of 1 − C(m
    − right, K) / C(m, K), where C is the binomial coefficient.
    """
    draws = np.arange(min(k, m))
    missed = np.clip((m - right[:, None] - draws) / (m - draws), 0.0, 1.0).prod(axis=1)
    return float((1.0 - missed).mean())


def distinct_right(matches: Matches, keys: np.ndarray) -> np.ndarray:
    """Return how many different right items each of n queries has, int64 (n,). keys (m,): equal for equal items."""
    n, m = matches.shape
    number = np.unique(keys, return_inverse=True)[1]
    counts = []
    for start in range(0, n, AT_ONCE):
        stop = min(start + AT_ONCE, n)
        row, item = matches.pairs(start, stop)
        counts.append(np.bincount(np.unique(row * m + number[item]) // m, minlength=stop - start))
    return np.concatenate(counts)


@dataclass(frozen=True)
class Direction:
    """A search in one direction, for example from images to texts: n queries, m items and their right pairs.

    title: the heading of its gallery (the example cases in the report). queries_nD, items_mD: embeddings. query, item:
    functions that return the gallery entry of the query or item with a given index. keys (n,): content keys of the
    queries; a gallery shows one query of each key. groups (n,): the group of each query, for example its class; a
    gallery shows different groups first. world: all its processes search together. spec: the specification of a FAISS
    index; an approximate one finds `depth` items, and at least ANSWERS, for a query. item_keys (m,): equal for items
    that are equal and right for the same queries; None: all items differ.
    """

    title: str
    queries_nD: np.ndarray
    items_mD: np.ndarray
    matches: Matches
    query: Callable[[int], Item]
    item: Callable[[int], Item]
    keys: np.ndarray
    groups: np.ndarray
    world: World
    spec: str = EXACT
    depth: int = ANSWERS
    item_keys: np.ndarray | None = None

    def chance(self, recall_k: Sequence[int]) -> dict[str, float]:
        """Return the chance level of R@K for each K: the mean R@K if the different items are ranked at random.

        Equal items have equal scores, so they stand together in every ranking. The first K of m items are taken for
        ⌈K·d / m⌉ of the d different ones, which is exact if each of these occurs equally often.
        """
        m = self.matches.shape[1]
        keys = np.arange(m) if self.item_keys is None else self.item_keys
        right, d = distinct_right(self.matches, keys), len(np.unique(keys))
        return {f"R@{k}": chance_recall(right, d, -(-k * d // m)) for k in recall_k}

    def right(self, query: int) -> np.ndarray:
        """Return the indices of the right items of the query with index `query`."""
        return self.matches.pairs(query, query + 1)[1]

    @cached_property
    def ranked(self) -> Ranked:
        """The ranks of the best right items, computed at the first access, which all processes must make together."""
        return ranked(self.queries_nD, self.items_mD, self.matches, self.spec, max(self.depth, ANSWERS), self.world)

    @property
    def rank(self) -> np.ndarray:
        """The rank of the best right item of each query, as in Ranking, int64 (n,). All processes read it together."""
        return self.ranked.ranking.rank

    def first(self, queries: np.ndarray) -> Hits:
        """Return the first ANSWERS items for the queries with the indices `queries`, or more, as Hits, best first.

        They come from the index that ranked the queries. If there are fewer items, all are returned. All processes must
        call it together.
        """
        if self.ranked.hits is None:
            return Index(self.items_mD, world=self.world).search(self.queries_nD[queries], ANSWERS)
        return self.ranked.hits.of(queries)

    def histogram(self) -> dict[str, list[Any]]:
        """Return histograms of the scores of right pairs, wrong pairs and best wrong items, of a sample of queries.

        Their form is that of `score_histogram` (eval/results/score_histogram.py). One process alone may call it only
        after all have read `ranked`.
        """
        picks = evenly_spaced(len(self.queries_nD), QUERIES)
        right = [self.right(query) for query in picks.tolist()]
        return score_histogram(self.queries_nD[picks], self.items_mD, right, self.ranked.ranking.best_wrong[picks])

    def cases(self, examples: int) -> list[Case]:
        """Return example cases for the report: the best, the worst and random queries, at most `examples` of each.

        Each case has the first items and some right items. Of queries with equal keys only the first is shown. All
        processes must call it together.
        """
        first = np.sort(np.unique(self.keys, return_index=True)[1])
        found = self.ranked.ranking
        sure = np.abs(found.best - found.best_wrong)[first]
        chosen = choose(-found.rank[first], sure, self.groups[first].tolist(), examples)
        queries = first[[i for _, i in chosen]]
        hits = self.first(queries)
        return [self._case(kind, int(queries[row]), hits.found(row)) for row, (kind, _) in enumerate(chosen)]

    def _case(self, kind: str, query: int, found: Sequence[tuple[int, float]]) -> Case:
        right = self.right(query).tolist()
        answers = [answer(self.item(i), score, i in right) for i, score in found[:ANSWERS]]
        return ranked_case(
            kind, self.query(query), int(self.rank[query]), answers, [self.item(i) for i in right[:RIGHT]]
        )

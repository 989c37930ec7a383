"""Image–text retrieval in both directions: computes the rank of the best right item of each query, without keeping all
scores in memory.

Right pairs: picture i and caption j are right for each other if j belongs to i, if the picture of j has the same
content as i, or if j has the same content as a caption of i. With `truth=pairs` only the first rule holds.

Rank of a query: 1 + the number of wrong items ahead of its best right item; other right items are not counted (filtered
rank). An item is ahead if its score is higher, or if its score is equal and its index is lower. So a model that gives
equal scores to everything does no better than a random order. Median and mean rank are defined as in open_clip. Recall
is defined as in CLIP_benchmark: a picture with several captions counts as found if any of its captions is among the
first K.

Symbols: n queries, m items, D embedding width, t queries of one strip (the part of the queries scored at one time).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dyad.data.image_text.dataset import RetrievalSet
from dyad.eval.config import Truth
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.matches import Labels, Matches, Ranking
from dyad.eval.results.cases import RIGHT, Case, Item, answer, best_items, choose, item
from dyad.eval.results.score_histogram import score_histogram, spread
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.tasks.baselines import before_training
from dyad.train.distributed.agreement import rank_0_only
from dyad.train.distributed.world import World, all_reduce_sum

STRIP, STRIP_GPU = 2**22, 2**28  # scores in memory at a time: 16 MiB, 1 GiB


def match_pairs(
    owner: np.ndarray, image_keys: np.ndarray, text_keys: np.ndarray, truth: Truth
) -> tuple[Matches, Matches]:
    """Return the right pairs of N pictures and M captions as (matches image → text, matches text → image).

    owner (M,): the index of the picture that each caption belongs to. image_keys (N,), text_keys (M,): content keys;
    equal keys mean equal content. truth: with `pairs`, a caption is right only for its own picture. With `keys`, it is
    also right for a picture that has the content of its own picture, and for a picture with a caption of the same
    content.
    """
    pictures, captions = np.arange(len(image_keys)), np.arange(len(owner))
    if truth is Truth.pairs:
        image_labels = Labels(pictures, pictures, len(pictures))
        text_labels = Labels(captions, owner, len(captions))
    else:
        same_image = np.unique(image_keys, return_inverse=True)[1]
        same_text = np.unique(text_keys, return_inverse=True)[1] + len(pictures)
        image_labels = Labels.of((pictures, same_image), (owner, same_text), size=len(pictures))
        text_labels = Labels.of((captions, same_image[owner]), (captions, same_text), size=len(captions))
    return Matches(image_labels, text_labels), Matches(text_labels, image_labels)


@torch.inference_mode()
def count_ranks(queries_nD: np.ndarray, items_mD: np.ndarray, matches: Matches, world: World) -> Ranking:
    """Compute exactly the rank of each of n queries among m items: 1 + the number of wrong items ahead of its best
    right item.

    An item is ahead if its score is higher, or equal and its index is lower. matches: which items are right for which
    queries; every query needs a right item. All processes must call it with the same arguments; each scores its share
    of the queries, and all return the same result. queries_nD, items_mD: embeddings; a score is their inner product.
    Memory: two float32 arrays of STRIP elements each (on a GPU of STRIP_GPU), or of m elements if m is larger.
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
        counts[:, start:stop], scores[:, start:stop] = _strip_ranks(score_tm, flag[: stop - start], *pairs)
    ranking = Ranking(*all_reduce_sum(counts, world).cpu().numpy(), *all_reduce_sum(scores, world).cpu().numpy())
    assert ranking.right.all(), "a query without a right item has no rank"
    return ranking


def strip_size(device: torch.device, n: int, m: int, world_size: int) -> int:
    """Return how many of n queries are scored against m items at a time. A GPU takes long strips, as each reads all
    items, but no longer ones than all processes have work."""
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


def rank_metrics(rank: np.ndarray, recall_k: Sequence[int]) -> dict[str, float]:
    """Return R@K for each K in `recall_k`, mean_rank and median_rank.

    rank (n,): the rank of the best right item of each of n queries, from 1. The median is rounded down, as in
    open_clip.
    """
    recalls = {f"R@{k}": float((rank <= k).mean()) for k in recall_k}
    return {**recalls, "mean_rank": float(rank.mean()), "median_rank": float(np.floor(np.median(rank)))}


def chance_recall(right: np.ndarray, m: int, k: int) -> float:
    """Return the chance level of R@K (K = `k`): the mean R@K of a random ranking of m items.

    right (n,): the number of right items of each of n queries. The value is the mean over queries of 1 − C(m − right,
    K) / C(m, K), where C is the binomial coefficient.
    """
    draws = np.arange(min(k, m))
    missed = np.clip((m - right[:, None] - draws) / (m - draws), 0.0, 1.0).prod(axis=1)
    return float((1.0 - missed).mean())


@dataclass(frozen=True)
class Direction:
    """A search in one direction, for example from pictures to texts: n queries, m items and their right pairs.

    title: the heading of its gallery (the example cases in the report). query, item: functions that make the gallery
    entry of the query or item with a given index. keys (n,): content keys of the queries; a gallery shows one query of
    each key. groups (n,): the group of each query, for example its class; a gallery shows different groups first.
    """

    title: str
    queries_nD: np.ndarray
    items_mD: np.ndarray
    matches: Matches
    query: Callable[[int], Item]
    item: Callable[[int], Item]
    keys: np.ndarray
    groups: np.ndarray

    def right(self, query: int) -> np.ndarray:
        """Return the indices of the right items of the query with index `query`."""
        return self.matches.pairs(query, query + 1)[1]

    def ranking(self, world: World) -> Ranking:
        """Return the exact ranks of the best right items, as `count_ranks`."""
        return count_ranks(self.queries_nD, self.items_mD, self.matches, world)

    def histogram(self, found: Ranking) -> dict[str, list[Any]]:
        """Return histograms of the scores of right pairs, wrong pairs and best wrong items, for a sample of the
        queries.

        found: the ranks and scores that the method `ranking` returned.
        """
        picks = spread(len(self.queries_nD))
        right = [self.right(query) for query in picks.tolist()]
        return score_histogram(self.queries_nD[picks], self.items_mD, right, found.best_wrong[picks])

    def cases(self, found: Ranking, examples: int) -> list[Case]:
        """Return example cases for the report: the `examples` best, the `examples` worst and `examples` random queries.

        Each case has the items with the highest scores and the right items. found: the ranks and scores that the method
        `ranking` returned.
        """
        first = np.unique(self.keys, return_index=True)[1]
        first.sort()
        rank, sure = found.rank[first], np.abs(found.best - found.best_wrong)[first]
        chosen = choose(-rank, sure, self.groups[first].tolist(), examples)
        return [self._case(kind, int(first[i]), int(rank[i])) for kind, i in chosen]

    def _case(self, kind: str, query: int, rank: int) -> Case:
        right = self.right(query).tolist()
        found = best_items(self.queries_nD[query], self.items_mD)
        return {
            "kind": kind,
            "query": self.query(query),
            "value": {"rank": rank},
            "systems": {"model": [answer(self.item(i), score, i in right) for i, score in found]},
            "right": [self.item(i) for i in right[:RIGHT]],
        }


Searched = dict[str, tuple[Direction, Ranking]]  # image_to_text, text_to_image → the search and its ranks


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Evaluator of one data set of pictures and captions, for both directions of search (image → text, text → image).

    truth: which pairs are right; with `pairs` only a picture and its own captions, with `keys` also pairs of equal
    content. recall_k: each K of R@K.
    """

    task: ClassVar[str] = "zeroshot_retrieval"
    sizes: ClassVar[tuple[str, ...]] = ("images", "texts")
    data: RetrievalSet
    truth: Truth = Truth.keys
    recall_k: Sequence[int] = (1, 5, 10)

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        thumbnails = Thumbnails(self.data.images)
        searched = self._searched(encode, thumbnails)
        chance = {
            f"{name}_R@{k}": chance_recall(found.right, direction.matches.shape[1], k)
            for name, (direction, found) in searched.items()
            for k in self.recall_k
        }
        details: dict[str, Any] = {"truth": str(self.truth)}
        if before := before_training(self.untrained, encode.world):
            others = self._searched(before, thumbnails)
            compared = comparison(self._values(searched), self._values(others), self._groups)
            details["baselines"] = {"untrained": {**compared, "metrics": self._metrics(others)}}
        sizes = {f"num_{name}": float(len(getattr(self.data, name))) for name in self.sizes}
        if examples is not None:
            details |= rank_0_only(encode.world, lambda: self._details(searched, examples)) or {}
        files = {".pictures": thumbnails.write} if examples is not None else {}
        return Report(self.task, self._metrics(searched) | sizes, chance, details, files)

    def _searched(self, encode: Encoder, thumbnails: Thumbnails) -> Searched:
        """Encode and search in both directions."""
        data, picture, caption = self.data, partial(self._picture, thumbnails), self._caption
        images, texts = encode("x", data.images), encode("y", data.texts)
        to_text, to_image = match_pairs(data.owner, data.image_keys, data.text_keys, self.truth)
        keys, of_captions = data.image_keys, (data.text_keys, data.image_keys[data.owner])
        directions = {
            "image_to_text": Direction("picture → texts", images, texts, to_text, picture, caption, keys, keys),
            "text_to_image": Direction("text → pictures", texts, images, to_image, caption, picture, *of_captions),
        }
        return {name: (direction, direction.ranking(encode.world)) for name, direction in directions.items()}

    def _metrics(self, searched: Searched) -> dict[str, float]:
        of_ways = {name: rank_metrics(found.rank, self.recall_k) for name, (_, found) in searched.items()}
        return {f"{name}_{metric}": value for name, of in of_ways.items() for metric, value in of.items()}

    def _values(self, searched: Searched) -> Values:
        """Return metric → whether each query is a hit, for R@K of both directions."""
        ranks = {name: found.rank for name, (_, found) in searched.items()}
        return {f"{name}_R@{k}": 1.0 * (rank <= k) for name, rank in ranks.items() for k in self.recall_k}

    def _groups(self, metric: str) -> list[int]:
        """Return the group of each query of a metric: queries about pictures of equal content are one group."""
        keys = self.data.image_keys
        return (keys if metric.startswith("image_to_text") else keys[self.data.owner]).tolist()

    def _details(self, searched: Searched, examples: int) -> dict[str, Any]:
        of_pictures, ranking = next(iter(searched.values()))
        return {
            "intervals": summary(self._values(searched), self._groups)["intervals"],
            "scores": of_pictures.histogram(ranking),
            "gallery": {direction.title: direction.cases(found, examples) for direction, found in searched.values()},
        }

    def _picture(self, thumbnails: Thumbnails, i: int) -> Item:
        """Return the entry of picture i in an example case: its id, its first caption and the file name of its
        thumbnail.
        """
        first = int(np.searchsorted(self.data.owner, i))
        return item(self.data.images.key(i), self.data.texts.texts[first], picture=thumbnails.name(i))

    def _caption(self, j: int) -> Item:
        owner = int(self.data.owner[j])
        number = j - int(np.searchsorted(self.data.owner, owner))
        name = self.data.images.key(owner)
        return item(f"{name}#{number + 1}" if number else name, self.data.texts.texts[j])


@dataclass(frozen=True)
class ViewRetrieval(Retrieval):
    """Evaluator of two views of each picture: of the view x, the view y is searched among those of all pictures."""

    task: ClassVar[str] = "view_retrieval"
    sizes: ClassVar[tuple[str, ...]] = ("images",)

    def _searched(self, encode: Encoder, thumbnails: Thumbnails) -> Searched:
        data, size = self.data, len(self.data.images)
        views_x, views_y = encode("x", data.images), encode("y", data.texts)
        matches, _ = match_pairs(data.owner, data.image_keys, data.text_keys, self.truth)

        def view(first: int, i: int) -> Item:
            return item(data.images.key(i), picture=thumbnails.name(first + i))

        query, found, keys = partial(view, 0), partial(view, size), data.image_keys
        direction = Direction("view → other view", views_x, views_y, matches, query, found, keys, keys)
        return {"view": (direction, direction.ranking(encode.world))}

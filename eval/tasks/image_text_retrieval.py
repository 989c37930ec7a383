"""Image–text retrieval in both directions, by the rank of the best right item of each query (eval/search/ranks.py).

Right pairs: image i and caption j are right for each other if j belongs to i, if the image of j has the same
content as i, or if j has the same content as a caption of i. With `truth=pairs` only the first rule holds.

Median and mean rank are defined as in open_clip. Recall is defined as in CLIP_benchmark: an image with several
captions counts as found if any of its captions is among the first K. An approximate index gives no median and mean
rank, as it finds only the first items.

Symbols: n queries, m items, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from dyad.data.base.arrays import evenly_spaced
from dyad.data.image_text.items import RetrievalSet
from dyad.data.shards.content_keys import content_key
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.results.cases import ANSWERS, RIGHT, Case, Item, answer, choose, item, ranked_case
from dyad.eval.results.score_histogram import QUERIES, score_histogram
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.search.index import Hits, Index
from dyad.eval.search.index_spec import EXACT
from dyad.eval.search.ranks import Ranked, ranked
from dyad.eval.tasks.baselines import untrained_encoder
from dyad.train.distributed.agreement import rank_0_only
from dyad.train.distributed.world import World
from dyad.train.eval_config import Truth

AT_ONCE = 1024  # queries whose right pairs are in memory at a time


def match_pairs(
    owner: np.ndarray, image_keys: np.ndarray, text_keys: np.ndarray, truth: Truth
) -> tuple[Matches, Matches]:
    """Return the right pairs of N images and M captions as (matches image → text, matches text → image).

    owner (M,): the index of the image that each caption belongs to. image_keys (N,), text_keys (M,): content keys;
    equal keys mean equal content. truth: with `pairs`, a caption is right only for its own image. With `keys`, it is
    also right for an image that has the content of its own image, and for an image with a caption of the same
    content.
    """
    images, captions = np.arange(len(image_keys)), np.arange(len(owner))
    if truth is Truth.pairs:
        image_labels = Labels(images, images, len(images))
        text_labels = Labels(captions, owner, len(captions))
    else:
        same_image = np.unique(image_keys, return_inverse=True)[1]
        same_text = np.unique(text_keys, return_inverse=True)[1] + len(images)
        image_labels = Labels.of((images, same_image), (owner, same_text), size=len(images))
        text_labels = Labels.of((captions, same_image[owner]), (captions, same_text), size=len(captions))
    return Matches(image_labels, text_labels), Matches(text_labels, image_labels)


def rank_metrics(rank: np.ndarray, recall_k: Sequence[int]) -> dict[str, float]:
    """Return R@K for each K in `recall_k`, mean_rank and median_rank.

    rank (n,): the rank of the best right item of each of n queries, from 1. The median is rounded down, as in
    open_clip.
    """
    recalls = {f"R@{k}": float((rank <= k).mean()) for k in recall_k}
    return {**recalls, "mean_rank": float(rank.mean()), "median_rank": float(np.floor(np.median(rank)))}


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


Searched = dict[str, Direction]  # image_to_text, text_to_image → the search


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Evaluator of one data set of images and captions, for both directions of search (image → text, text → image).

    truth: which pairs are right; with `pairs` only an image and its own captions, with `keys` also pairs of equal
    content. recall_k: each K of R@K. index: specification of a FAISS index; "Flat" is exact, an approximate one gives
    no mean and median rank.
    """

    task: ClassVar[str] = "zeroshot_retrieval"
    sizes: ClassVar[tuple[str, ...]] = ("images", "texts")
    ways: ClassVar[tuple[str, ...]] = ("image_to_text", "text_to_image")
    data: RetrievalSet
    truth: Truth = Truth.keys
    recall_k: Sequence[int] = (1, 5, 10)
    index: str = EXACT

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        thumbnails = Thumbnails(self.data.images)
        searched = self._searched(encode, thumbnails)
        levels = {name: way.chance(self.recall_k) for name, way in searched.items()}
        chance = {f"{name}_{metric}": level for name, of in levels.items() for metric, level in of.items()}
        details: dict[str, Any] = {"truth": str(self.truth)}
        if self.index != EXACT:
            details["search"] = {name: way.ranked.how for name, way in searched.items()}
        if before := untrained_encoder(self.untrained, encode.world):
            others = self._searched(before, thumbnails)
            compared = comparison(self._values(searched), self._values(others), self._groups)
            details["baselines"] = {"untrained": {**compared, "metrics": self._metrics(others)}}
        sizes = {f"num_{name}": float(len(getattr(self.data, name))) for name in self.sizes}
        if examples is not None:
            gallery = {way.title: way.cases(examples) for way in searched.values()}
            details |= rank_0_only(encode.world, lambda: self._details(searched)) or {}
            details["gallery"] = gallery
        files = {".pictures": thumbnails.write} if examples is not None else {}
        return Report(self.task, self._metrics(searched) | sizes, chance, details, files)

    def higher_is_better(self) -> dict[str, bool]:
        ranks = ("mean_rank", "median_rank") if self.index == EXACT else ()  # an index finds the first ranks only
        metrics = {**{f"R@{k}": True for k in self.recall_k}, **dict.fromkeys(ranks, False)}
        return {f"{way}_{metric}": higher for way in self.ways for metric, higher in metrics.items()}

    def _searched(self, encode: Encoder, thumbnails: Thumbnails) -> Searched:
        """Encode images and captions and return the searches of both directions, by name (`ways`).

        thumbnails: collects the images that example cases show. All processes must call it together.
        """
        data, image, caption = self.data, partial(self._image, thumbnails), self._caption
        x_nD, y_mD = encode("x", data.images), encode("y", data.texts)
        how = (encode.world, self.index, max(self.recall_k))
        of_images, of_texts = match_pairs(data.owner, data.image_keys, data.text_keys, self.truth)
        image_side = (image, caption, data.image_keys, data.image_keys)
        text_side = (caption, image, data.text_keys, data.image_keys[data.owner])
        texts = images = None
        if self.truth is Truth.keys:  # with pairs, of equal items only one is right
            texts, images = np.array([content_key(text.encode()) for text in data.texts.texts]), data.image_keys
        return {
            "image_to_text": Direction("picture → texts", x_nD, y_mD, of_images, *image_side, *how, texts),
            "text_to_image": Direction("text → pictures", y_mD, x_nD, of_texts, *text_side, *how, images),
        }

    def _metrics(self, searched: Searched) -> dict[str, float]:
        return {
            f"{name}_{metric}": value
            for name, way in searched.items()
            for metric, value in {**rank_metrics(way.rank, self.recall_k), **way.ranked.recall_metrics}.items()
            if way.ranked.hits is None or not metric.endswith("_rank")  # an index finds the first ranks only
        }

    def _values(self, searched: Searched) -> Values:
        """Return metric → float64 (n,), 1 if the query is a hit, else 0, for R@K of all directions."""
        return {f"{name}_R@{k}": 1.0 * (way.rank <= k) for name, way in searched.items() for k in self.recall_k}

    def _groups(self, metric: str) -> list[int]:
        """Return the group of each query, for the bootstrap: the content key of its image.

        The image is the query or what a caption belongs to. metric: the name of a metric of this query.
        """
        keys = self.data.image_keys
        return (keys if metric.startswith("image_to_text") else keys[self.data.owner]).tolist()

    def _details(self, searched: Searched) -> dict[str, Any]:
        intervals = summary(self._values(searched), self._groups)["intervals"]
        return {"intervals": intervals, "scores": next(iter(searched.values())).histogram()}

    def _image(self, thumbnails: Thumbnails, i: int) -> Item:
        """Return the entry of image i in an example case: its id, first caption and name of the thumbnail.

        Asks `thumbnails` for the thumbnail, so that it is written.
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
    """Evaluator of two views of each image: given view x of an image, its view y is searched among all y views.

    data: data.images are the x views, data.texts the y views.
    """

    task: ClassVar[str] = "view_retrieval"
    sizes: ClassVar[tuple[str, ...]] = ("images",)
    ways: ClassVar[tuple[str, ...]] = ("view",)

    def _searched(self, encode: Encoder, thumbnails: Thumbnails) -> Searched:
        data, size = self.data, len(self.data.images)
        views_x, views_y = encode("x", data.images), encode("y", data.texts)
        matches, _ = match_pairs(data.owner, data.image_keys, data.text_keys, self.truth)

        def view(first: int, i: int) -> Item:
            return item(data.images.key(i), picture=thumbnails.name(first + i))

        shown, keys = (partial(view, 0), partial(view, size)), (data.image_keys, data.image_keys)
        how = (encode.world, self.index, max(self.recall_k))
        return {"view": Direction("view → other view", views_x, views_y, matches, *shown, *keys, *how)}

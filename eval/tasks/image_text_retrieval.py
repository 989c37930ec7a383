"""Image–text retrieval in both directions, by the rank of the best right item of each query (eval/search/ranks.py).

Right pairs: image i and caption j are right for each other if j belongs to i, if the image of j has the same
content as i, or if j has the same content as a caption of i. With `truth=pairs` only the first rule holds.

Median and mean rank are defined as in open_clip. Recall is defined as in CLIP_benchmark: an image with several
captions counts as found if any of its captions is among the first K. An approximate index gives no median and mean
rank, as it finds only the first items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dyad.data.image_text.items import RetrievalSet
from dyad.data.shards.content_keys import content_key
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.results.cases import Item, item
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.search.index_spec import EXACT
from dyad.eval.tasks.baselines import untrained_encoder
from dyad.eval.tasks.direction import Direction
from dyad.train.distributed.agreement import rank_0_only
from dyad.train.eval_config import Truth


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

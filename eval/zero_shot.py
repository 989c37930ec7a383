"""Zero-shot classification: pictures against prompts of each class.

Weight of a class = normalised mean of the normalised embeddings of its prompts (open_clip, CLIP_benchmark); a
picture's class is the best score. So this is retrieval with the classes as items, and the rank of the right class
gives every metric. At equal scores the earlier class is ahead. Classes without a picture count as candidates only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.errors import DataError, nearest
from data.image_text import Captions
from eval.encode import Encoder, Evaluator, Report
from eval.retrieval import Labels, Matches, count_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from data.image_text import LabelledSet


@dataclass(frozen=True)
class ZeroShot(Evaluator):
    """Every picture of a labelled set against the prompts of all classes."""

    data: LabelledSet
    classes: Mapping[str, Sequence[str]]
    tokenize: Callable[[list[str]], Tensor]

    def report(self, encode: Encoder, examples: int = 0) -> Report:
        target = _targets(self.data.labels, list(self.classes), self.name)
        images = encode("x", self.data.images)
        rank, _ = count_ranks(images, self._weights(encode), _matches(target, len(self.classes)), encode.world)
        share = np.bincount(target, minlength=len(self.classes)) / len(target)
        count = len(self.classes)
        chance = {"acc1": 1 / count, "mean_per_class_recall": 1 / count, "majority_class_share": float(share.max())}
        if count >= 5:
            chance["acc5"] = 5 / count
        metrics = {**accuracies(rank, target, count), "num_samples": float(len(target))}
        return Report("zeroshot_classification", metrics, chance, {"per_class": self._per_class(rank, target)})

    def _weights(self, encode: Encoder) -> np.ndarray:
        """(C, D): one unit vector per class."""
        texts = [text for prompts in self.classes.values() for text in prompts]
        embeddings = _unit(encode("y", Captions(texts, self.tokenize)))
        stops = np.cumsum([len(prompts) for prompts in self.classes.values()])
        return np.stack([_unit(part.mean(axis=0)) for part in np.split(embeddings, stops[:-1])])

    def _per_class(self, rank: np.ndarray, target: np.ndarray) -> dict[str, dict[str, Any]]:
        right = [rank[target == index] == 1 for index in range(len(self.classes))]
        return {
            name: {"num_samples": len(hits), "accuracy": float(hits.mean()) if len(hits) else None}
            for name, hits in zip(self.classes, right, strict=True)
        }


def accuracies(rank: np.ndarray, target: np.ndarray, count: int) -> dict[str, float]:
    """acc1, acc5 (left out below five classes), mean_per_class_recall over the classes that occur (as
    scikit-learn)."""
    recalls = [float((rank[target == c] == 1).mean()) for c in np.unique(target)]
    top5 = {"acc5": float((rank <= 5).mean())} if count >= 5 else {}
    return {"acc1": float((rank == 1).mean()), **top5, "mean_per_class_recall": float(np.mean(recalls))}


def _targets(labels: Sequence[str], classes: Sequence[str], name: str) -> np.ndarray:
    """(n,) class index of every sample."""
    index = {c: i for i, c in enumerate(classes)}
    strangers = [label for label in labels if label not in index]
    if strangers:
        raise DataError(
            f"{name}: {len(strangers)} of {len(labels)} samples have a label that is no class, first '{strangers[0]}'."
            f"{nearest(strangers[0], classes)}"
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


def _matches(target: np.ndarray, count: int) -> Matches:
    samples, classes = np.arange(len(target)), np.arange(count)
    return Matches(Labels.of((samples, target), size=len(target)), Labels.of((classes, classes), size=count))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)

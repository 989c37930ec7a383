"""Zero-shot classification of pictures with text prompts for each class.

The embedding of a class is the normalised mean of the normalised embeddings of its prompts, as in open_clip and
CLIP_benchmark. The predicted class is the one with the highest score. The task is evaluated as a search: pictures are
the queries and classes the items, and all metrics follow from the rank of the right class. If two classes have equal
scores, the earlier one is ahead. A class without pictures can still be predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dyad.data.base.errors import DataError, nearest
from dyad.data.image_text.dataset import Captions, LabelledSet
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, class_mean_interval, comparison, interval
from dyad.eval.metrics.matches import Labels, Matches, Ranking
from dyad.eval.results.cases import item
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.tasks.baselines import before_training
from dyad.eval.tasks.image_text_retrieval import STRIP, Direction
from dyad.train.distributed.agreement import rank_0_only

CLASSES = 50  # up to here the result has the whole confusion matrix
CONFUSED = 50  # pairs of classes in the result if there are more classes


@dataclass(frozen=True)
class ZeroShot(Evaluator):
    """Evaluator of zero-shot classification on one set of labelled pictures. classes: class name → its prompts."""

    data: LabelledSet
    classes: Mapping[str, Sequence[str]]
    tokenize: Callable[[list[str]], Tensor]

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        target = class_indices(self.data.labels, list(self.classes), self.name)
        thumbnails, count, world = Thumbnails(self.data.images), len(self.classes), encode.world
        direction, found = self._ranked(encode, target, thumbnails)
        share = np.bincount(target, minlength=count) / len(target)
        chance = {"acc1": 1 / count, "mean_per_class_recall": 1 / count, "majority_class_share": float(share.max())}
        if count >= 5:
            chance["acc5"] = 5 / count
        values, groups = accuracies(found.rank, target, count), lambda metric: range(len(target))
        metrics = {**{name: float(v.mean()) for name, v in values.items()}, "num_samples": float(len(target))}
        details: dict[str, Any] = {"per_class": per_class(found.rank, target, list(self.classes))}
        if before := before_training(self.untrained, world):
            others = accuracies(self._ranked(before, target, thumbnails)[1].rank, target, count)
            details["baselines"] = {"untrained": comparison(values, others, groups)}
        if examples is not None:
            make = partial(class_details, direction, found, target, values, list(self.classes), examples)
            details |= rank_0_only(world, make) or {}
        files = {".pictures": thumbnails.write} if examples is not None else {}
        return Report("zeroshot_classification", metrics, chance, details, files)

    def _ranked(self, encode: Encoder, target: np.ndarray, small: Thumbnails) -> tuple[Direction, Ranking]:
        """Encode pictures and classes, and rank the classes for each picture; return the search and its ranks."""
        names = list(self.classes)
        samples, classes = np.arange(len(target)), np.arange(len(names))
        direction = Direction(
            "picture → classes",
            encode("x", self.data.images),
            self._weights(encode),
            Matches(Labels(samples, target, len(samples)), Labels(classes, classes, len(classes))),
            lambda i: item(self.data.images.key(i), self.data.labels[i], picture=small.name(i)),
            lambda c: item(names[c], names[c]),
            keys=samples,
            groups=target,
        )
        return direction, direction.ranking(encode.world)

    def _weights(self, encode: Encoder) -> np.ndarray:
        """Return the embeddings (C, D) of the C classes: the mean embedding of the prompts of each class, scaled to
        length 1. D: embedding width.
        """
        texts = [text for prompts in self.classes.values() for text in prompts]
        embeddings = unit(encode("y", Captions(texts, self.tokenize)))
        stops = np.cumsum([len(prompts) for prompts in self.classes.values()])
        return np.stack([unit(part.mean(axis=0)) for part in np.split(embeddings, stops[:-1])])


def class_details(
    direction: Direction, found: Ranking, target: np.ndarray, values: Values, names: Sequence[str], examples: int
) -> dict[str, Any]:
    """Return the parts of a result with examples: intervals, confusions, score histograms and example cases.

    direction, found: the search for classes, and its ranks. target (n,): the index of the right class of n samples.
    values: metric → (n,) its values. names: the class names. examples: cases of each kind.
    """
    rank = found.rank
    intervals = {
        metric: class_mean_interval(rank == 1, target)
        if metric.endswith("mean_per_class_recall")
        else interval(v, range(len(v)))
        for metric, v in values.items()
    }
    return {
        "intervals": {metric: ends and [min(end, 1.0) for end in ends] for metric, ends in intervals.items()},
        **confusion(target, predictions(direction.queries_nD, direction.items_mD, rank, target), names),
        "scores": direction.histogram(found),
        "gallery": {direction.title: direction.cases(found, examples)},
    }


def accuracies(rank: np.ndarray, target: np.ndarray, count: int) -> Values:
    """Return acc1, acc5 (only with five classes or more) and mean_per_class_recall as metric → (n,) values of the
    pictures, whose mean is the metric.

    rank (n,): the rank (from 1) of the right class of each of n pictures. target (n,): the index of its class. count:
    the number of classes. The mean over classes takes only classes that have pictures, as in scikit-learn: a hit counts
    in inverse proportion to the number of pictures of its class.
    """
    size = np.bincount(target, minlength=count)
    weight = len(target) / (np.count_nonzero(size) * size[target])
    top5 = {"acc5": 1.0 * (rank <= 5)} if count >= 5 else {}
    return {"acc1": 1.0 * (rank == 1), **top5, "mean_per_class_recall": weight * (rank == 1)}


def per_class(rank: np.ndarray, target: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return class name → {"num_samples", "accuracy"}; the accuracy of a class without samples is None.

    rank, target (n,): the rank and the index of the right class of n samples. names: the class names.
    """
    right = [rank[target == index] == 1 for index in range(len(names))]
    return {
        name: {"num_samples": len(hits), "accuracy": float(hits.mean()) if len(hits) else None}
        for name, hits in zip(names, right, strict=True)
    }


def class_indices(labels: Sequence[str], classes: Sequence[str], name: str) -> np.ndarray:
    """Return (n,) int64: the class index of each of n labels. Raises DataError for a label that is no class.

    classes: the class names. name: the name of the evaluator, for the message.
    """
    index = {c: i for i, c in enumerate(classes)}
    strangers = [label for label in labels if label not in index]
    if strangers:
        raise DataError(
            f"{name}: {len(strangers)} of {len(labels)} samples have a label that is no class, first '{strangers[0]}'."
            f"{nearest(strangers[0], classes)}"
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


def predictions(images_nD: np.ndarray, classes_CD: np.ndarray, rank: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return (n,) int64: the predicted class index of each of n pictures.

    It is the right class if its rank is 1, else the wrong class with the highest score. images_nD: embeddings of the
    pictures; classes_CD: embeddings of C classes. rank, target (n,): the rank and the index of the right class.
    """
    predicted = target.copy()
    wrong = np.flatnonzero(rank > 1)
    size = max(1, STRIP // len(classes_CD))
    for start in range(0, len(wrong), size):
        rows = wrong[start : start + size]
        score = images_nD[rows] @ classes_CD.T
        score[np.arange(len(rows)), target[rows]] = -np.inf
        predicted[rows] = score.argmax(axis=1)
    return predicted


def confusion(target: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Count how often each class was predicted for each true class.

    Up to CLASSES classes it returns {"confusion": {"classes", "counts"}}; "counts" has a row for each true class and a
    column for each predicted one. For more classes it returns {"confused": […]}, the CONFUSED most frequent mistakes.
    target, predicted (n,): class indices of n pictures. names: the class names.
    """
    count = len(names)
    if count <= CLASSES:
        counts = np.bincount(target * count + predicted, minlength=count**2).reshape(count, count)
        return {"confusion": {"classes": list(names), "counts": counts.tolist()}}
    wrong = target != predicted
    pairs, times = np.unique(target[wrong] * count + predicted[wrong], return_counts=True)
    most = np.argsort(-times, kind="stable")[:CONFUSED]
    return {
        "confused": [
            {"true": names[pair // count], "predicted": names[pair % count], "count": time}
            for pair, time in zip(pairs[most].tolist(), times[most].tolist(), strict=True)
        ]
    }


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (…, D), each scaled to length 1; zeros stay zeros."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)

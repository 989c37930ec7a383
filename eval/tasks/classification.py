"""Classification of images, texts or sequences: the common base of zero-shot, trained classes and probes.

The predicted class is the one with the highest score. The task is evaluated as a search: samples are the queries and
classes the items, and the accuracies follow from the rank of the right class. If two classes have equal scores, the
earlier one is ahead. A class without samples can still be predicted.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dyad.data.base.errors import DataError, nearest
from dyad.data.image_text.items import LabelledSet, ReadableItems
from dyad.data.loading.class_batches import class_key
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, class_mean_interval, comparison, interval
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.results.cases import Item, excerpt, item
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.search.index_spec import EXACT
from dyad.eval.tasks.baselines import untrained_encoder
from dyad.eval.tasks.direction import Direction
from dyad.train.distributed.agreement import rank_0_only

CLASSES = 50  # the most classes for which the result has the whole confusion matrix
CONFUSED = 50  # the number of confused pairs of classes in the result if there are more classes


class Scored(NamedTuple):
    """The n samples and C classes of an evaluator, encoded and scored with one encoder, the model or a baseline.

    samples (n, D), classes (C, D): vectors whose inner products are the scores of a sample for the classes. values:
    further metrics → (n,) values of the samples, whose mean is the metric. per_class: class name → further numbers.
    details: further entries of the result's JSON.
    """

    samples: np.ndarray
    classes: np.ndarray
    values: Values
    per_class: dict[str, dict[str, float]]
    details: dict[str, Any]


Classified = tuple[Direction, Values, Scored]


@dataclass(frozen=True)
class Classification(Evaluator):
    """Evaluator of a classification of labelled samples.

    task: the `task` of its results; "text_" is put before it if the samples are texts, "sequence_" if they are
    sequences. start: a prefix of the names of its accuracies. data: the samples and their labels. classes: the names of
    the classes, in order. index: the specification of a FAISS index of the classes; "Flat" is exact. `report` raises
    DataError for a label that is no class.
    """

    task: ClassVar[str]
    start: ClassVar[str] = ""
    data: LabelledSet
    classes: Collection[str]
    index: str = field(default=EXACT, kw_only=True)

    @abstractmethod
    def scored(self, encode: Encoder, target: np.ndarray) -> Scored:
        """Encode samples and classes, and return them with further metrics. All processes must call it together.

        target (n,): the class index of each sample.
        """

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        names, world = list(self.classes), encode.world
        target = class_indices(self.data.labels, names, self.name)
        items = self.data.items
        small = None if isinstance(items, ReadableItems) else Thumbnails(items)
        direction, values, scored = self._classified(encode, target, small)
        by_name = {m: 0.5 if "auc" in m else (5 if m.endswith("acc5") else 1) / len(names) for m in values}
        chance = {**by_name, "majority_class_share": float(np.bincount(target).max() / len(target))}
        means = {name: float(v.mean()) for name, v in values.items()}
        metrics = {**means, **direction.ranked.recall_metrics, "num_samples": float(len(target))}
        right = {name: direction.rank[target == index] == 1 for index, name in enumerate(names)}
        accuracy = {name: float(hits.mean()) if len(hits) else None for name, hits in right.items()}
        numbers = {name: {"num_samples": len(right[name]), "accuracy": accuracy[name]} for name in names}
        details = {**scored.details, "per_class": {n: numbers[n] | scored.per_class.get(n, {}) for n in names}}
        if before := untrained_encoder(self.untrained, world):
            others = self._classified(before, target, small)[1]
            details["baselines"] = {"untrained": comparison(values, others, lambda metric: range(len(target)))}
        if self.index != EXACT:
            details["search"] = direction.ranked.how
        if examples is not None:
            predicted, gallery = predictions(direction, target), {direction.title: direction.cases(examples)}
            details |= rank_0_only(world, lambda: self._details(direction, values, target, predicted)) or {}
            details["gallery"] = gallery
        files = {".pictures": small.write} if small and examples is not None else {}
        return Report(self.task if small else f"{self._sort}_{self.task}", metrics, chance, details, files)

    def higher_is_better(self) -> dict[str, bool]:
        one = np.zeros(1, np.int64)
        return {f"{self.start}{name}": True for name in accuracies(one, one, len(self.classes))}

    def _classified(self, encode: Encoder, target: np.ndarray, small: Thumbnails | None) -> Classified:
        """Encode the samples and rank the classes for each; return (the search, metric → (n,) values, the Scored).

        target (n,): the class index of each sample. small: collects the images of the example cases; None for texts and
        sequences.
        """
        names, scored = list(self.classes), self.scored(encode, target)
        samples, classes = np.arange(len(target)), np.arange(len(names))
        direction = Direction(
            f"{self._sort} → classes",
            scored.samples,
            scored.classes,
            Matches(Labels(samples, target, len(samples)), Labels(classes, classes, len(classes))),
            lambda i: self._shown(small, i),
            lambda c: item(names[c], names[c]),
            keys=samples,
            groups=target,
            world=encode.world,
            spec=self.index,
        )
        shares = accuracies(direction.rank, target, len(names))
        return direction, {self.start + name: v for name, v in shares.items()} | scored.values, scored

    @property
    def _sort(self) -> str:
        """The word for a sample: "picture", "text" or "sequence"."""
        items = self.data.items
        return items.sort if isinstance(items, ReadableItems) else "picture"

    def _shown(self, small: Thumbnails | None, i: int) -> Item:
        """Return the entry of sample i in an example case.

        small: collects its thumbnail; None for texts and sequences.
        """
        items, label = self.data.items, self.data.labels[i]
        if isinstance(items, ReadableItems):
            return item(items.name(i), excerpt(items.text(i))[0])
        return item(items.key(i), label, picture=small and small.name(i))

    def _details(
        self, direction: Direction, values: Values, target: np.ndarray, predicted: np.ndarray
    ) -> dict[str, Any]:
        intervals = {name: interval(v, range(len(v))) for name, v in values.items()}
        intervals[f"{self.start}mean_per_class_recall"] = class_mean_interval(direction.rank == 1, target)
        return {
            "intervals": {name: ends and [min(end, 1.0) for end in ends] for name, ends in intervals.items()},
            **confusion(target, predicted, list(self.classes)),
            "scores": direction.histogram(),
        }


def accuracies(rank: np.ndarray, target: np.ndarray, count: int) -> Values:
    """Return the accuracies as metric → (n,) values of the samples, whose mean is the metric.

    The metrics are acc1, acc5 (only with five classes or more) and mean_per_class_recall. rank (n,): the rank (from 1)
    of the right class of each of n samples. target (n,): the index of its class. count: the number of classes. The mean
    over classes takes only classes that have samples, as in scikit-learn: a hit counts in inverse proportion to the
    number of samples of its class.
    """
    size = np.bincount(target, minlength=count)
    weight = len(target) / (np.count_nonzero(size) * size[target])
    top5 = {"acc5": 1.0 * (rank <= 5)} if count >= 5 else {}
    return {"acc1": 1.0 * (rank == 1), **top5, "mean_per_class_recall": weight * (rank == 1)}


def class_indices(labels: Sequence[str], classes: Sequence[str], name: str) -> np.ndarray:
    """Return (n,) int64: the class index of each of n labels. Raises DataError for a label that is no class.

    classes: the class names, which are compared by `class_key`. name: the name of the evaluator, for the message.
    """
    index = {class_key(c): i for i, c in enumerate(classes)}
    strangers = [label for label in labels if class_key(label) not in index]
    if strangers:
        raise DataError(
            f"{name}: {len(strangers)} of {len(labels)} samples have a label that is no class, first '{strangers[0]}'."
            f"{nearest(strangers[0], classes)}"
        )
    return np.array([index[class_key(label)] for label in labels], dtype=np.int64)


def predictions(direction: Direction, target: np.ndarray) -> np.ndarray:
    """Return the predicted class index of each of n samples, int64 (n,); the number of classes if none was found.

    An approximate index may find no class. The predicted class is the right class if the rank of the right class is 1,
    else the first wrong class that the search finds. direction: the search from samples to classes. target (n,): the
    index of the right class. All processes must call it together.
    """
    predicted = target.copy()
    wrong = np.flatnonzero(direction.rank > 1)
    found = direction.first(wrong).positions
    first, second = found[:, 0], found[:, min(1, found.shape[1] - 1)]
    # scores that differ in the last bit only may be in another order in this search than in the counting of ranks
    predicted[wrong] = np.where(first == target[wrong], second, first)
    return predicted


def confusion(target: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Count how often each class was predicted for each true class.

    Up to CLASSES classes it returns {"confusion": {"classes", "counts"}}; "counts" has a row for each true class and a
    column for each predicted one. For more classes it returns {"confused": […]}, the CONFUSED most frequent mistakes.
    target, predicted (n,): class indices of n samples; samples for which no class was found (`predictions`) do not
    count. names: the class names.
    """
    count = len(names)
    target, predicted = target[predicted < count], predicted[predicted < count]
    if count <= CLASSES:
        counts = np.bincount(target * count + predicted, minlength=count**2).reshape(count, count)
        return {"confusion": {"classes": list(names), "counts": counts.tolist()}}
    wrong = target != predicted
    pairs, times = np.unique(target[wrong] * count + predicted[wrong], return_counts=True)
    most = np.argsort(-times, kind="stable")[:CONFUSED]
    found = zip(pairs[most].tolist(), times[most].tolist(), strict=True)
    mistakes = [{"true": names[pair // count], "predicted": names[pair % count], "count": time} for pair, time in found]
    return {"confused": mistakes}

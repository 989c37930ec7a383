"""Evaluators of task=labelled: accuracies over all classes, and AUC and partial AUC of one rare class."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dyad.data.base.errors import DataError, nearest
from dyad.data.image_text.items import Captions, LabelledSet
from dyad.data.loading.class_batches import class_key
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.auc import MAX_FPR, auc_values
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.tasks.baselines import untrained_encoder
from dyad.eval.tasks.classification import class_indices
from dyad.eval.tasks.zero_shot import ZeroShot


@dataclass(frozen=True)
class TrainedClasses(ZeroShot):
    """Evaluator of the classes that a run of task=labelled trains, scored with the class embeddings of the y tower.

    The class embeddings are L2-normalised only if Encoder.cosine is True. classes: class name → [the text or name from
    which `tokenize` makes the tower's input for the class]. Raises DataError, when it is made, for a label that is no
    class.
    """

    task: ClassVar[str] = "classification"

    def __post_init__(self) -> None:  # before the first step: a run would fail at its end
        class_indices(self.data.labels, list(self.classes), self.name)

    def _weights(self, encode: Encoder) -> np.ndarray:
        return encode("y", Captions([text for (text,) in self.classes.values()], self.tokenize))


@dataclass(frozen=True)
class RareClass(Evaluator):
    """Evaluator of a score (embeddings of width 1) that tells one class from all others.

    data: samples with their classes. rare: the class. max_fpr: the largest false-positive rate of a further partial
    AUC, that of the run's objective (objective.alpha). Raises DataError, when it is made, unless some samples are of
    class `rare` and some are not.
    """

    data: LabelledSet
    rare: str
    max_fpr: float

    def __post_init__(self) -> None:  # before the first step: a run would fail at its end
        positive = self.positive
        if not 0 < positive.sum() < len(positive):
            of_all = f"{positive.sum()} of {len(positive)} samples are of class '{self.rare}'"
            hint = nearest(self.rare, set(self.data.labels))
            raise DataError(f"{self.name}: {of_all}, and both kinds are needed.{hint}")

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        values, groups = self._values(encode), lambda metric: range(len(self.positive))
        found = summary(values, groups)
        details: dict[str, Any] = {"intervals": found["intervals"]}
        if before := untrained_encoder(self.untrained, encode.world):
            details["baselines"] = {"untrained": comparison(values, self._values(before), groups)}
        metrics = {**found["metrics"], "num_samples": float(len(self.positive)), "num_rare": float(self.positive.sum())}
        return Report("rare_class", metrics, dict.fromkeys(values, 0.5), details)

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(self._limits, True)

    @property
    def _limits(self) -> dict[str, float]:
        """Name of a metric → its largest false-positive rate: "auc", and a partial AUC for MAX_FPR and for max_fpr."""
        return {"auc": 1.0, **{f"partial_auc@{limit:g}": limit for limit in (MAX_FPR, self.max_fpr)}}

    @cached_property
    def positive(self) -> np.ndarray:
        """Whether each of n samples is of the rare class, bool (n,)."""
        return np.array([class_key(label) == class_key(self.rare) for label in self.data.labels])

    def _values(self, encode: Encoder) -> Values:
        score = encode("x", self.data.items)[:, 0]
        return {name: auc_values(score, self.positive, limit) for name, limit in self._limits.items()}

"""Options that several objectives share, the ranges of numbers, and the row that registers an objective.

This package imports no torch, so that `--help` and the validation of a configuration start at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, make_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from omegaconf import MISSING

from dyad.data.base.errors import ConfigError
from dyad.data.config import described

if TYPE_CHECKING:
    from dyad.train.losses.objectives.base import Objective

Similarity = Enum("Similarity", {"cosine": "cosine", "dot": "dot"})
Duplicates = Enum("Duplicates", {"keep": "keep", "mask": "mask", "positive": "positive"})
Positives = Enum("Positives", {"single": "single", "each": "each", "exclude": "exclude", "merge": "merge"})
CandidateSet = Enum("CandidateSet", {"all": "all", "negatives": "negatives"})
Directions = Enum("Directions", {"sum": "sum", "mean": "mean", "x": "x", "y": "y"})

NO_FURTHER = "takes pairs only. Set data.negatives.per_row=0 and data.passage.positives=one"
NONE_IN_ONE = "global_batch_size=1 has no negatives. Set it to 2 or more"
SIMILARITY = "score of two embeddings; a SentenceTransformer brings its own"
DIRECTIONS = "x→y and y→x: their mean, their sum, or one of them"
RANGES: dict[str, Callable[[float], bool]] = {
    "above 0": lambda value: value > 0,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "0 or more": lambda value: not value < 0,  # NaN passes here and is refused as no finite number
    "0 or more and below 1": lambda value: 0 <= value < 1,
    "1 or more": lambda value: value >= 1,
    "2 or more": lambda value: value >= 2,
}


def number(default: Any, meaning: str, allowed: str) -> Any:
    """A field with its meaning, which `--help` prints, and its range, a key of RANGES. None is legal in every range."""
    return field(default=default, metadata={"help": meaning, "range": allowed})


@dataclass(frozen=True)
class ExpectedBatch:
    """The global batches that a run is going to have.

    pairs: pairs of all processes together. further: whether a row has y items besides that of its pair. several:
    whether some of these are positives.
    """

    pairs: int
    further: bool = False
    several: bool = False

    @property
    def without_negatives(self) -> bool:
        """Whether the own y item of a row is its only candidate."""
        return self.pairs < 2 and not self.further


@dataclass
class ObjectiveOptions:
    """Options of every objective. Raises ConfigError for a value out of range and for a broken rule."""

    formula: ClassVar[str]  # "module:Class" of the objective, imported when it is first used
    inputs: ClassVar[str] = "pairs"  # what the objective takes; the tasks of this program have pairs only

    name: str = MISSING
    similarity: Similarity = described(Similarity.cosine, SIMILARITY)

    @property
    def by_sample_id(self) -> bool:
        """Whether the objective needs sample ids: it keeps state for every sample, or reads numbers from a file."""
        return False

    def broken_rules(self) -> dict[str, bool]:
        """Message of each rule between options, and whether these options break it."""
        return {}

    def broken_by(self, batch: ExpectedBatch) -> dict[str, bool]:
        """Message of each rule about the batches of a run, and whether `batch` breaks it."""
        return {
            f"objective={self.name}: takes {self.inputs}, which no task has; use it in your own loop: from "
            "train.losses import build_objective": self.inputs != "pairs"
        }

    def __post_init__(self) -> None:
        broken, numbers = [], {f: getattr(self, f.name) for f in fields(self)}
        for f, value in numbers.items():
            if value is not None and "range" in f.metadata and not RANGES[f.metadata["range"]](value):
                broken.append(f"objective.{f.name}={value}: must be {f.metadata['range']}")
        broken += [message for message, is_broken in self.broken_rules().items() if is_broken]
        for f, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                broken.append(f"objective.{f.name}={value}: must be a finite number")
        if broken:
            raise ConfigError(broken[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name and values: no module holds the classes that ObjectiveRow makes."""
        from dyad.train.losses.options.registry import configure

        return partial(configure, **vars(self)), ()


class ObjectiveRow:
    """One objective of the registry.

    options: its options dataclass, with the defaults of this objective.
    """

    def __init__(self, name: str, family: type[ObjectiveOptions], summary: str | None = None, **defaults: Any) -> None:
        """summary: one line for `--help`, by default the docstring of `family`.

        defaults: those that differ from the defaults of `family`, as values, or as fields with a meaning of their own.
        """
        inherited, types = {f.name: f for f in fields(family)}, get_type_hints(family)
        changed = {
            key: value if isinstance(value, Field) else field(default=value, metadata=inherited[key].metadata)
            for key, value in {"name": name, **defaults}.items()
        }
        self.name = name
        self.options: type[ObjectiveOptions] = make_dataclass(
            family.__name__,
            [(key, types[key], value) for key, value in changed.items()],
            bases=(family,),
            namespace={"__doc__": summary or family.__doc__, "__module__": family.__module__},
        )

    def load(self) -> type[Objective]:
        """The class of the objective. The first call imports its module, and torch."""
        module, _, name = self.options.formula.partition(":")
        return getattr(import_module(module), name)

    @property
    def takes(self) -> frozenset[str]:
        """Which further inputs the objective takes: see Objective.takes."""
        return self.load().takes


@dataclass
class TemperatureOptions(ObjectiveOptions):
    """Objectives of scores divided by a temperature τ."""

    temperature: float = number(0.07, "τ, or where it starts when it learns", "above 0")
    learnable: bool = described(True, "whether τ learns (through logit_scale = log 1/τ)")
    min_temperature: float = number(
        0.01, "a learning τ is clamped to at least this after every step, and at most 1", "above 0 and at most 1"
    )

    def broken_rules(self) -> dict[str, bool]:
        tau, least = self.temperature, self.min_temperature
        return {
            **super().broken_rules(),
            f"objective.temperature={tau}: where τ learns it starts between objective.min_temperature={least} and 1. "
            "Change it, or set objective.learnable=false": self.learnable and not least <= tau <= 1,
        }


@dataclass
class PairOptions(TemperatureOptions):
    """Objectives that relate rows and columns by lists of pairs and by content keys."""

    candidates: CandidateSet = described(CandidateSet.all, "whether positives stand in their anchor's own sum")
    positives: Positives = described(
        Positives.each,
        "several positives: mean over each; each without the others; their sum; or one only",
    )
    duplicates: Duplicates = described(
        Duplicates.keep, "columns with an equal content key: negatives, left out, or positives"
    )

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            "objective.duplicates=positive with objective.positives=single: equal keys make several positives. "
            "Set objective.positives to each, exclude or merge, or objective.duplicates=mask": (
                self.duplicates is Duplicates.positive and self.positives is Positives.single
            ),
        }

    def broken_by(self, batch: ExpectedBatch) -> dict[str, bool]:
        negatives_only = self.candidates is CandidateSet.negatives
        return {
            **super().broken_by(batch),
            f"objective.candidates=negatives: {NONE_IN_ONE}": negatives_only and batch.without_negatives,
            "objective.positives=single with data.passage.positives=all: set objective.positives to each, exclude or "
            "merge, or data.passage.positives=one": self.positives is Positives.single and batch.several,
        }

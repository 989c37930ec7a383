"""What objectives have in common to be said about them. Torch-free, as all of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

from omegaconf import MISSING

from data.config import described
from data.errors import ConfigError


class Similarity(Enum):
    cosine = "cosine"
    dot = "dot"


class Duplicates(Enum):
    keep = "keep"
    mask = "mask"
    positive = "positive"


class Positives(Enum):
    single = "single"
    each = "each"
    exclude = "exclude"
    merge = "merge"


class Candidates(Enum):
    all = "all"
    negatives = "negatives"


class Directions(Enum):
    sum = "sum"
    mean = "mean"
    x = "x"
    y = "y"


NO_FURTHER = "takes pairs only. Set data.negatives.per_row=0 and data.passage.positives=one"
NONE_IN_ONE = "global_batch_size=1 has no negatives. Set it to 2 or more"
SIMILARITY = "score of two embeddings; a SentenceTransformer brings its own"
DIRECTIONS = "x→y and y→x: their mean, their sum, or one of them"


@dataclass(frozen=True)
class Expected:
    """The batches of a run: pairs over all processes; further: whether a row has passages beside its pair's; several:
    whether some of them are right, too."""

    pairs: int
    further: bool = False
    several: bool = False

    @property
    def alone(self) -> bool:
        """Whether a row has no candidate but its own."""
        return self.pairs < 2 and not self.further


@dataclass
class ObjectiveOptions:
    """What every objective has."""

    name: str = MISSING
    similarity: Similarity = described(Similarity.cosine, SIMILARITY)

    @property
    def by_sample_id(self) -> bool:
        """Whether something is known of every sample by its id: state that is kept, or numbers from a file."""
        return False

    def broken_rules(self) -> dict[str, bool]:
        """One line per rule, and whether these options break it."""
        return {}

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        """The same, for the batches that a run is going to have."""
        return {}

    def __post_init__(self) -> None:
        broken = [message for message, is_broken in self.broken_rules().items() if is_broken]
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                broken.append(f"objective.{name}={value}: must be a finite number")
        if broken:
            raise ConfigError(broken[0])


@dataclass
class TemperatureOptions(ObjectiveOptions):
    """Objectives of scores over a temperature τ."""

    temperature: float = described(0.07, "τ, or where it starts when it learns")
    learnable: bool = described(True, "whether τ learns (through logit_scale = log 1/τ)")
    min_temperature: float = described(0.01, "a learning τ is clamped to at least this after every step, and at most 1")

    def broken_rules(self) -> dict[str, bool]:
        tau, least = self.temperature, self.min_temperature
        return {
            **super().broken_rules(),
            f"objective.temperature={tau}: must be above 0": not tau > 0,
            f"objective.min_temperature={least}: must be above 0 and at most 1": not 0 < least <= 1,
            f"objective.temperature={tau}: where τ learns it starts between objective.min_temperature={least} and 1. "
            "Change it, or set objective.learnable=false": self.learnable and not least <= tau <= 1,
        }


@dataclass
class PairOptions(TemperatureOptions):
    """Objectives that relate rows and columns by lists of pairs and content keys."""

    candidates: Candidates = described(Candidates.all, "whether positives stand in their anchor's own sum")
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

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        return {
            **super().broken_by(batch),
            f"objective.candidates=negatives: {NONE_IN_ONE}": self.candidates is Candidates.negatives and batch.alone,
            "objective.positives=single with data.passage.positives=all: set objective.positives to each, exclude or "
            "merge, or data.passage.positives=one": self.positives is Positives.single and batch.several,
        }

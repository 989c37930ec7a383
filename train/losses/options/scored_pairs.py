"""Options of the objectives that learn given scores of pairs, such as similarities of sentences, and their presets."""

from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.common import ObjectiveOptions, TemperatureOptions, number, preset

TEACHER = frozenset({"teacher"})


@dataclass
class ScoredPairOptions(ObjectiveOptions):
    """Options of the squared error between the score of a pair and its given score, the objective cosine_mse.

    Options of the class SquaredError in objectives/scored_pairs.py.
    """

    formula: ClassVar[str] = "scored_pairs:SquaredError"
    takes: ClassVar[frozenset[str]] = TEACHER
    inputs: ClassVar[str] = "scored pairs"

    divisor: float = number(1.0, "divides the given scores: 5 for scores of 0 … 5", "above 0")


@dataclass
class CoSENTOptions(TemperatureOptions):
    """Options of CoSENT, a loss of the order of pairs by their given scores.

    Options of the class CoSENT in objectives/scored_pairs.py.
    """

    formula: ClassVar[str] = "scored_pairs:CoSENT"
    takes: ClassVar[frozenset[str]] = TEACHER
    inputs: ClassVar[str] = "scored pairs"


OBJECTIVES = [
    preset(
        "cosent",
        CoSENTOptions,
        "CoSENT: a pair of a higher score is more similar than each of a lower one (Huang et al. 2024).",
        temperature=0.05,
        learnable=described(False, "whether τ learns (through logit_scale = log 1/τ)"),
    ),
    preset(
        "cosine_mse",
        ScoredPairOptions,
        "Squared error: the cosine of a pair is its score (Reimers and Gurevych 2019).",
    ),
]

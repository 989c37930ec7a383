"""Options of the objectives that learn from a teacher's scores, and their presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import Matched
from dyad.train.losses.options.common import number, preset
from dyad.train.losses.options.softmax import DPR, SoftmaxOptions


@dataclass
class DistillationOptions(SoftmaxOptions):
    """Options of distillation: the scores of the items of a row's list become like a teacher's scores of them.

    Options of the class Distillation in objectives/distillation.py. The list of a row is its own y and its further
    columns, such as hard negatives. The options of SoftmaxOptions act on the softmax loss that `contrastive` weighs;
    those of τ, similarity and matryoshka act on both losses.
    """

    formula: ClassVar[str] = "distillation:Distillation"
    takes: ClassVar[frozenset[str]] = frozenset({"negatives", "excluded", "teacher"})
    inputs: ClassVar[str] = "scored lists"

    matched: Matched = described(
        Matched.kl, "kl: the teacher's distribution over a row's list; margin: its differences of scores"
    )
    teacher_temperature: float = number(1.0, "divides the teacher's scores", "above 0")
    contrastive: float = number(
        0.0, "weight of the softmax loss of the whole batch beside it, of the options above; 0: none", "0 or more"
    )

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.learnable and not self.contrastive and self.matched is Matched.margin:
            yield (
                "objective.learnable=true with objective.matched=margin: the scale of scores is the teacher's. Set "
                "objective.learnable=false"
            )


OBJECTIVES = [
    preset(
        "distill_kl",
        DistillationOptions,
        "Distillation: KL divergence of a teacher's distribution over a row's list to that of the scores.",
        **DPR,
    ),
    preset(
        "margin_mse",
        DistillationOptions,
        "MarginMSE: the score of the positive minus that of a negative, as a teacher's (Hofstätter et al. 2020).",
        **DPR,
        matched=Matched.margin,
    ),
]

"""Options of maximum likelihood, for scores that are log-likelihoods."""

from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import Similarity
from dyad.train.losses.options.common import SIMILARITY, ObjectiveOptions, preset


@dataclass
class NllOptions(ObjectiveOptions):
    """Negative log-likelihood of the right answers, −mean s(x_i, y_i): the baseline of fine-tuning by DPM.

    Options of the class NegativeLogLikelihood in objectives/likelihood.py.
    """

    formula: ClassVar[str] = "likelihood:NegativeLogLikelihood"
    takes: ClassVar[frozenset[str]] = frozenset({"relevance"})
    inputs: ClassVar[str] = "log-likelihoods"

    similarity: Similarity = described(Similarity.dot, SIMILARITY)


OBJECTIVES = [preset("nll", NllOptions)]

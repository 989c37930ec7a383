"""Options of the spectral family, and its presets: no temperature, and by default embeddings without normalisation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import Cov, Directions, PairSet, Similarity
from dyad.train.losses.options.common import SIMILARITY, WEIGHED, ObjectiveOptions, number, preset


@dataclass
class SpectralFamilyOptions(ObjectiveOptions):
    """Options of the spectral family: losses of the second moments of the embeddings, without temperature."""

    takes: ClassVar[frozenset[str]] = WEIGHED

    similarity: Similarity = described(Similarity.dot, SIMILARITY)

    @property
    def needs_others(self) -> bool:
        return True  # the loss of one pair has its minimum where the embeddings of all pairs are equal


@dataclass
class SpectralOptions(SpectralFamilyOptions):
    """Spectral contrastive loss: low-rank approximation of p(x, y)/√(p(x) p(y)) (HaoChen et al. 2021).

    Options of the class Spectral in objectives/spectral.py.
    """

    formula: ClassVar[str] = "spectral:Spectral"

    pairs: PairSet = described(PairSet.offdiag, "pairs of the squared term: no own pairs (unbiased), or all (D² form)")


@dataclass
class SpectralAlternatingOptions(SpectralFamilyOptions):
    """Spectral loss of one side (x or y) against the other side, whose embeddings get no gradient.

    Options of the class SpectralAlternating in objectives/spectral.py. With target.kind=ema the other side is embedded
    by an average of the weights, as in BYOL (Grill et al. 2020), without a predictor.
    """

    formula: ClassVar[str] = "spectral:SpectralAlternating"
    takes: ClassVar[frozenset[str]] = WEIGHED | {"targets"}

    directions: Directions = described(Directions.sum, "which side learns against the other, frozen")
    lambda_momentum: float = number(
        0.0, "Λ = E[ννᵀ]: share of the old running mean; 0: of this batch alone", "0 or more and below 1"
    )
    width: int | None = described(None, "D of the embeddings, needed for a running mean", least=1, most=1 << 16)

    @property
    def needs_others(self) -> bool:
        return not self.lambda_momentum  # a running mean has those of other batches

    def broken_rules(self) -> Iterator[str]:
        if self.lambda_momentum > 0 and (self.width is None or self.width < 1):
            yield (
                f"objective.width={self.width}: objective.lambda_momentum above 0 needs the width of the embeddings, "
                "1 or more"
            )


@dataclass
class PcaPenaltyOptions(SpectralFamilyOptions):
    """Alignment of pairs with a penalty on the second moment: λ‖E[aaᵀ] − I‖².

    Options of the class PcaPenalty in objectives/spectral.py. a: the embeddings of x, or of both sides; λ: the field
    penalty.
    """

    formula: ClassVar[str] = "spectral:PcaPenalty"

    penalty: float = number(1.0, "λ", "0 or more")
    cov: Cov = described(Cov.both, "second moment of x alone, or averaged over both sides")
    center: bool = described(False, "subtract the mean first (a covariance)")


@dataclass
class VicregOptions(SpectralFamilyOptions):
    """VICReg: distance of pairs, hinge on standard deviations, penalty on covariances (Bardes et al. 2022).

    Options of the class Vicreg in objectives/spectral.py.
    """

    formula: ClassVar[str] = "spectral:Vicreg"

    invariance: float = number(25.0, "λ: weight of the mean squared distance of pairs", "0 or more")
    variance: float = number(25.0, "μ: weight of the hinge on the standard deviation of each dimension", "0 or more")
    covariance: float = number(1.0, "ν: weight of the squared covariances of different dimensions", "0 or more")
    gamma: float = number(1.0, "γ: standard deviation from which the hinge is 0", "above 0")
    eps: float = number(1e-4, "ε: added to the variance before its root", "above 0")


OBJECTIVES = [
    preset("spectral", SpectralOptions),
    preset("spectral_alternating", SpectralAlternatingOptions),
    preset("pca_penalty", PcaPenaltyOptions),
    preset("vicreg", VicregOptions),
]

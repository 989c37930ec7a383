"""Options of the estimators of the loss over the whole data (SogCLR, iSogCLR, FastCLIP, NUCLR), and their presets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from dyad.data.config import AUTO, described
from dyad.train.losses.options.choices import Directions, Duplicates, TemperatureGradient
from dyad.train.losses.options.common import (
    DIRECTIONS,
    WEIGHED,
    X_NEGATIVES,
    ExpectedBatch,
    TemperatureOptions,
    number,
    preset,
)

ONE_POSITIVE = "Set data.passage.positives=one, or take clip or info_nce"


@dataclass
class EstimatorOptions(TemperatureOptions):
    """SogCLR: an estimate of the contrastive loss over the whole data set, with a fixed τ (Yuan et al. 2022).

    Options of the classes in objectives/estimators.py, such as SogCLR, which keep, for every sample, a running mean of
    e^((score difference)/τ) over negatives. γ is the share of the new batch in that mean.

    gamma=auto is the schedule that DRRho-CLIP's authors recommend for FastCLIP: a cosine from 1 to min(1, 4.177·
    E^−0.7265) over all E epochs of the run (README of Optimization-AI/DRRho-CLIP; Wei et al. 2025, arXiv:2505.06699).
    With γ = 1 old means are not used: the loss is one of the batch alone. This is so in runs of up to 7 epochs; at E =
    30, γ ends at 0.353. gamma_min and gamma_epochs replace the end and the length: LibAUC's schedule is gamma_min=0.2
    with half of the run's epochs.

    A run sets E to its number of epochs, which may be a fraction; in your own loop gamma=auto needs gamma_epochs. A run
    that is continued with more steps takes, from then on, the γ of the longer run.

    learnable_refused: the error message for learnable=true, empty if τ may learn.
    """

    formula: ClassVar[str] = "estimators:SogCLR"
    takes: ClassVar[frozenset[str]] = WEIGHED | X_NEGATIVES | {"negatives"}
    learnable_refused: ClassVar[str] = (
        "objective.learnable=true: a loss multiplied by τ has no optimum in τ. Set it false, or choose "
        "objective=fastclip_v3 (a radius ρ), fastclip_v0 (not multiplied) or isogclr (τ per sample)"
    )

    learnable: bool = described(False, "refused: the loss is scaled by τ")
    gamma: Any = described(
        AUTO, "γ: share of the new batch in u; auto: DRRho-CLIP's schedule; null: 0.8, or 1 where gamma_min ends one"
    )
    gamma_min: float | None = described(None, "γ at the end of a cosine schedule that begins at gamma, of auto at 1")
    gamma_epochs: float | None = number(None, "epochs of the γ schedule; null: with gamma=auto, of the run", "above 0")
    duplicates: Duplicates = described(Duplicates.keep, "columns with an equal content key: negatives, or left out")
    directions: Directions = described(Directions.sum, DIRECTIONS)
    num_samples: int | None = number(None, "number of samples; null: of the training data", "2 or more", most=1 << 33)
    samples_per_epoch: int | None = number(
        None, "samples in an epoch of a schedule; null: as in the run, or num_samples", "1 or more"
    )
    memory_budget_mb: int = number(
        4096, "MiB of state per process beyond which it lies in a file in TMPDIR", "0 or more"
    )

    def __post_init__(self) -> None:
        if type(self.gamma) is int:  # 1 and 1.0 are one value in the name of a run
            self.gamma = float(self.gamma)
        super().__post_init__()

    @property
    def by_sample_id(self) -> bool:
        return True

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        gamma, least, epochs = self.gamma, self.gamma_min, self.gamma_epochs
        if gamma not in (AUTO, None) and not (type(gamma) is float and 0 < gamma <= 1):
            yield f"objective.gamma={gamma}: must be auto, or a number above 0 and at most 1"
        elif gamma != AUTO and (least is None) != (epochs is None):
            yield f"objective.gamma_min={least} with objective.gamma_epochs={epochs}: a schedule needs both"
        elif least is not None and not 0 < least <= self.schedule[0]:
            yield f"objective.gamma_min={least}: must be above 0 and at most objective.gamma={self.schedule[0]}"
        if self.duplicates is Duplicates.positive:
            yield "objective.duplicates=positive: an estimator has one positive per sample. Set mask or keep"
        if self.learnable and self.learnable_refused:
            yield self.learnable_refused

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        if batch.several:
            yield f"objective={self.name}: a sample has one positive. {ONE_POSITIVE}"

    @property
    def schedule(self) -> tuple[float, float, float]:
        """The tuple (γ at the start, γ at the end, the number of epochs between them), see `gamma_at`.

        For a constant γ, start and end are equal. With gamma=auto, the end is gamma_min, or follows from gamma_epochs
        if gamma_min is None. While both are None, only the start is valid: a run sets gamma_epochs to its number of
        epochs before it uses the end.
        """
        gamma, last, epochs = self.gamma, self.gamma_min, self.gamma_epochs or math.inf
        if gamma == AUTO:
            return 1.0, min(1.0, 4.177 * epochs**-0.7265) if last is None else last, epochs
        if last is None:
            last = gamma = 0.8 if gamma is None else gamma
        return 1.0 if gamma is None else gamma, last, epochs

    def gamma_at(self, epoch: int) -> float:
        """Return γ in the epoch `epoch`, from 0: the share of the new batch in the running mean of each sample.

        γ_e = γ_min + (γ − γ_min) (1 + cos(π e/E))/2, and γ_min from epoch E on (Wei et al. 2024, arXiv:2407.01445, sec.
        4), with (γ, γ_min, E) = `schedule`.
        """
        first, last, epochs = self.schedule
        cosine = (1 + math.cos(math.pi * min(epoch / epochs, 1.0))) / 2
        return last + (first - last) * cosine

    def describe_gamma(self) -> str:
        """Return the schedule of γ as one line for a log."""
        first, last, epochs = self.schedule
        line = f"objective.gamma={self.gamma}: γ = {first:g}"
        if first != last:
            line += f" → {last:.3g} over {round(epochs, 2):g} epochs"
        if self.gamma == AUTO and self.gamma_min is None:
            line += " (DRRho-CLIP's cosine)"
            if epochs < 8:
                line += f". In {epochs:.2g} epochs no gain over an objective of the batch is expected: it takes about 8"
        return line


@dataclass
class FastClipV0Options(EstimatorOptions):
    """FastCLIP-v0: the loss of SogCLR without its factor τ, so that τ can learn (Wei et al. 2024).

    Options of the class FastClipV0 in objectives/estimators.py. learnable_refused: see EstimatorOptions.
    """

    formula: ClassVar[str] = "estimators:FastClipV0"
    learnable_refused: ClassVar[str] = ""

    learnable: bool = described(True, "whether τ learns")
    temperature_gradient: TemperatureGradient = described(
        TemperatureGradient.paper,
        "paper: exact for a given u; fastclip: the part through the batch twice, as the authors' code has",
    )


@dataclass
class FastClipV3Options(FastClipV0Options):
    """FastCLIP-v3: the loss of SogCLR plus ρτ, with a learning τ and the radius ρ of a KL ball (Wei et al. 2024).

    Options of the class FastClipV3 in objectives/estimators.py, whose loss is mean_i τ log u_i + ρτ.
    """

    formula: ClassVar[str] = "estimators:FastClipV3"

    rho: float = number(6.5, "ρ: radius of the KL ball, in nats; towards it τ learns", "0 or more")


@dataclass
class ISogCLROptions(EstimatorOptions):
    """iSogCLR: SogCLR with a learned temperature τ for each sample and direction (Qiu et al. 2023).

    Options of the class ISogCLR in objectives/estimators.py. The temperatures τ are kept as per-sample state.
    """

    formula: ClassVar[str] = "estimators:ISogCLR"
    learnable_refused: ClassVar[str] = (
        "objective.learnable=true: each sample's τ learns with objective.tau_lr. Set it false"
    )

    learnable: bool = described(False, "refused: each sample's τ learns with tau_lr")
    rho: float = number(6.0, "ρ: radius of the KL ball, in nats; towards it each τ learns", "0 or more")
    max_temperature: float = described(1.0, "largest τ of a sample; the smallest is min_temperature")
    tau_lr: float = number(1e-3, "step size of τ", "0 or more")
    tau_momentum: float = number(
        0.5, "share of the older gradients in the running mean that moves τ", "0 or more and below 1"
    )
    tau_clip: float = number(5.0, "largest gradient of a sample's τ", "above 0")

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if not self.min_temperature <= self.temperature <= self.max_temperature:
            yield (
                f"objective.temperature={self.temperature}: τ starts between "
                f"objective.min_temperature={self.min_temperature} and objective.max_temperature={self.max_temperature}"
            )


@dataclass
class NuclrOptions(EstimatorOptions):
    """NUCLR: a candidate has weight e^(ζ/τ), with ζ learned for each sample; popular items get less (Wang et al. 2024).

    Options of the class Nuclr in objectives/estimators.py. τ is the temperature; ζ is kept as per-sample state.
    """

    formula: ClassVar[str] = "estimators:Nuclr"

    zeta_lr: float = number(0.01, "step size of ζ", "0 or more")
    zeta_momentum: float = number(
        0.9, "share of the older gradients in the running mean that moves ζ", "0 or more and below 1"
    )
    zeta_warmup: float = number(5.0, "epochs in which ζ stays 0", "0 or more")


OBJECTIVES = [
    preset("sogclr", EstimatorOptions),
    preset("isogclr", ISogCLROptions),
    preset("fastclip_v0", FastClipV0Options),
    preset("fastclip_v3", FastClipV3Options),
    preset("nuclr", NuclrOptions),
]

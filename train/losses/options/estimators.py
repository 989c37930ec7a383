"""Options of the global estimators: the contrastive loss over the whole data set from small batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from data.config import described
from train.losses.options.common import DIRECTIONS, NONE_IN_ONE, Directions, Duplicates, Expected, TemperatureOptions


class TemperatureGradient(Enum):
    paper = "paper"
    fastclip = "fastclip"


TEMPERATURE_GRADIENT = (
    "paper: exact for a given u; fastclip: the part through the batch twice, as the authors' code has"
)


@dataclass
class EstimatorOptions(TemperatureOptions):
    """A running mean u_i of every anchor's mean exponential over negatives, kept for every sample."""

    learnable: bool = described(False, "refused: the loss is scaled by τ")
    gamma: float | None = described(None, "γ: share of the new batch in u; null: 0.8, and 1 where a schedule begins")
    gamma_min: float | None = described(None, "γ at the end of a cosine schedule that begins at gamma; null: γ stays")
    gamma_epochs: float | None = described(None, "epochs of the γ schedule, needed with gamma_min")
    duplicates: Duplicates = described(Duplicates.keep, "columns with an equal content key: negatives, or left out")
    directions: Directions = described(Directions.sum, DIRECTIONS)
    num_samples: int | None = described(None, "number of samples; null: of the training data")
    samples_per_epoch: int | None = described(
        None, "samples in an epoch of a schedule; null: as in the run, or num_samples"
    )
    memory_budget_mb: int = described(4096, "MiB of state per process beyond which it lies in a file in TMPDIR")

    @property
    def by_sample_id(self) -> bool:
        return True

    def broken_rules(self) -> dict[str, bool]:
        schedule, largest = (self.gamma_min, self.gamma_epochs), self.gamma_at(0)
        return {
            **super().broken_rules(),
            f"objective.gamma={self.gamma}: must be above 0 and at most 1": not 0 < largest <= 1,
            f"objective.gamma_min={self.gamma_min} with objective.gamma_epochs={self.gamma_epochs}: a schedule needs "
            "both": (self.gamma_min is None) != (self.gamma_epochs is None),
            f"objective.gamma_min={self.gamma_min}: must be above 0 and at most objective.gamma={largest}": (
                None not in schedule and not 0 < (self.gamma_min or 0.0) <= largest
            ),
            f"objective.gamma_epochs={self.gamma_epochs}: must be above 0": (
                None not in schedule and not (self.gamma_epochs or 0.0) > 0
            ),
            "objective.duplicates=positive: an estimator has one positive per sample. Set mask or keep": (
                self.duplicates is Duplicates.positive
            ),
            f"objective.num_samples={self.num_samples}: must be 2 or more": (
                self.num_samples is not None and self.num_samples < 2
            ),
            f"objective.memory_budget_mb={self.memory_budget_mb}: must be 0 or more": self.memory_budget_mb < 0,
            self._why_learnable_is_refused(): self.learnable and bool(self._why_learnable_is_refused()),
        }

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        return {**super().broken_by(batch), f"objective={self.name}: {NONE_IN_ONE}": batch.alone}

    def gamma_at(self, epoch: int) -> float:
        """γ_e = γ_min + (γ − γ_min) (1 + cos(π e/E))/2, γ_min from epoch E on (Wei et al. 2024, sec. 4)."""
        if self.gamma_min is None or not self.gamma_epochs or self.gamma_epochs <= 0:
            return 0.8 if self.gamma is None else self.gamma
        first = 1.0 if self.gamma is None else self.gamma
        cosine = (1 + math.cos(math.pi * min(epoch / self.gamma_epochs, 1.0))) / 2
        return self.gamma_min + (first - self.gamma_min) * cosine

    def _why_learnable_is_refused(self) -> str:
        """Empty where it is not."""
        return (
            "objective.learnable=true: a loss multiplied by τ has no optimum in τ. Set it false, or choose "
            "objective=fastclip_v3 (a radius ρ), fastclip_v0 (not multiplied) or isogclr (τ per sample)"
        )


@dataclass
class SogCLROptions(EstimatorOptions):
    """SogCLR: the contrastive loss over the whole data set, τ given (Yuan et al. 2022)."""

    name: str = "sogclr"


@dataclass
class FastClipV0Options(EstimatorOptions):
    """FastCLIP-v0: SogCLR not multiplied by τ, so that τ can learn (Wei et al. 2024)."""

    name: str = "fastclip_v0"
    learnable: bool = described(True, "whether τ learns")
    temperature_gradient: TemperatureGradient = described(TemperatureGradient.paper, TEMPERATURE_GRADIENT)

    def _why_learnable_is_refused(self) -> str:
        return ""


@dataclass
class FastClipV3Options(FastClipV0Options):
    """FastCLIP-v3: multiplied by τ, which learns towards a KL radius ρ (Wei et al. 2024)."""

    name: str = "fastclip_v3"
    rho: float = described(6.5, "ρ: radius of the KL ball, in nats; towards it τ learns")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            f"objective.rho={self.rho}: must be 0 or more": self.rho < 0,
        }


@dataclass
class ISogCLROptions(EstimatorOptions):
    """iSogCLR: a temperature of its own for every sample and direction (Qiu et al. 2023)."""

    name: str = "isogclr"
    learnable: bool = described(False, "refused: each sample's τ learns with tau_lr")
    rho: float = described(6.0, "ρ: radius of the KL ball, in nats; towards it each τ learns")
    max_temperature: float = described(1.0, "largest τ of a sample; the smallest is min_temperature")
    tau_lr: float = described(1e-3, "step size of τ")
    tau_momentum: float = described(0.5, "share of the older gradients in the running mean that moves τ")
    tau_clip: float = described(5.0, "largest gradient of a sample's τ")

    def broken_rules(self) -> dict[str, bool]:
        tau, least, most = self.temperature, self.min_temperature, self.max_temperature
        return {
            **super().broken_rules(),
            f"objective.rho={self.rho}: must be 0 or more": self.rho < 0,
            f"objective.temperature={tau}: τ starts between objective.min_temperature={least} and "
            f"objective.max_temperature={most}": not least <= tau <= most,
            f"objective.tau_lr={self.tau_lr}: must be 0 or more": self.tau_lr < 0,
            f"objective.tau_momentum={self.tau_momentum}: must be 0 or more and below 1": not 0
            <= self.tau_momentum
            < 1,
            f"objective.tau_clip={self.tau_clip}: must be above 0": not self.tau_clip > 0,
        }

    def _why_learnable_is_refused(self) -> str:
        return "objective.learnable=true: each sample's τ learns with objective.tau_lr. Set it false"


@dataclass
class NuclrOptions(EstimatorOptions):
    """NUCLR: candidates weigh e^(ζ/τ), ζ learned for every sample; popular items weigh less (Wang et al. 2024)."""

    name: str = "nuclr"
    zeta_lr: float = described(0.01, "step size of ζ")
    zeta_momentum: float = described(0.9, "share of the older gradients in the running mean that moves ζ")
    zeta_warmup: float = described(5.0, "epochs in which ζ stays 0")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            f"objective.zeta_lr={self.zeta_lr}: must be 0 or more": self.zeta_lr < 0,
            f"objective.zeta_momentum={self.zeta_momentum}: must be 0 or more and below 1": (
                not 0 <= self.zeta_momentum < 1
            ),
            f"objective.zeta_warmup={self.zeta_warmup}: must be 0 or more": self.zeta_warmup < 0,
        }

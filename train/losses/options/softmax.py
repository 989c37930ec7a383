"""Options of the softmax family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from data.config import described
from train.losses.options.common import (
    DIRECTIONS,
    NO_FURTHER,
    SIMILARITY,
    Candidates,
    Directions,
    Expected,
    PairOptions,
    Similarity,
    TemperatureOptions,
)


class Partition(Enum):
    sum = "sum"
    mean = "mean"


class Importance(Enum):
    none = "none"
    log_q = "log_q"
    zeta = "zeta"


class Views(Enum):
    stacked = "stacked"
    interleaved = "interleaved"


@dataclass
class SoftmaxOptions(PairOptions):
    """The softmax family: one core term and its options."""

    partition: Partition = described(Partition.sum, "sum or mean inside the log")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ learns only with a radius rho)")
    rho: float | None = described(None, "radius of a KL ball: adds ρτ; with tau_scaled, partition=mean")
    directions: Directions = described(Directions.mean, DIRECTIONS)

    def broken_rules(self) -> dict[str, bool]:
        ball = self.tau_scaled and self.partition is Partition.mean
        return {
            **super().broken_rules(),
            "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ (its "
            "slope keeps one sign whatever the data), so τ would run to the end of its range. Set "
            "objective.tau_scaled=false, objective.learnable=false, or objective.partition=mean with a radius "
            "objective.rho": self.learnable and self.tau_scaled and (self.rho is None or not ball),
            f"objective.rho={self.rho}: a radius needs objective.tau_scaled=true and objective.partition=mean": (
                self.rho is not None and not ball
            ),
            f"objective.rho={self.rho}: must be above 0": self.rho is not None and not self.rho > 0,
        }


@dataclass
class ClipOptions(SoftmaxOptions):
    """CLIP: both directions of InfoNCE, averaged (Radford et al. 2021)."""

    name: str = "clip"


@dataclass
class SymmetricDPMOptions(SoftmaxOptions):
    """Symmetric discriminative probabilistic modelling: τ · LSE of score differences, both directions summed."""

    name: str = "symmetric_dpm"
    learnable: bool = described(False, "refused while the loss is scaled by τ")
    tau_scaled: bool = described(True, "multiply the loss by τ")
    directions: Directions = described(Directions.sum, DIRECTIONS)


@dataclass
class GclOptions(SymmetricDPMOptions):
    """Global contrastive loss on the batch: symmetric DPM over negatives only, mean inside the log."""

    name: str = "gcl"
    candidates: Candidates = described(Candidates.negatives, "whether positives stand in their anchor's own sum")
    partition: Partition = described(Partition.mean, "sum or mean inside the log")


@dataclass
class OneSidedDPMOptions(SoftmaxOptions):
    """One-sided DPM: rows only, candidates weighted by importance (Wang et al. 2024)."""

    name: str = "one_sided_dpm"
    learnable: bool = described(False, "refused while the loss is scaled by τ")
    tau_scaled: bool = described(True, "multiply the loss by τ")
    directions: Directions = described(Directions.x, "x→y only")
    importance: Importance = described(
        Importance.none, "weight of a candidate in the sum: 1, 1/q from log q, or e^(ζ/τ) from ζ"
    )
    importance_file: str | None = described(None, ".npy of log q or ζ by sample id; null: the caller passes them")

    @property
    def by_sample_id(self) -> bool:
        return self.importance_file is not None

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            f"objective.directions={self.directions.value}: one_sided_dpm has directions=x only": (
                self.directions is not Directions.x
            ),
            f"objective.importance_file={self.importance_file}: needs objective.importance=log_q or zeta": (
                self.importance_file is not None and self.importance is Importance.none
            ),
        }

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        weighted = self.importance is not Importance.none
        return {
            **super().broken_by(batch),
            f"objective.importance={self.importance.value}: give objective.importance_file, an .npy by sample id": (
                weighted and self.importance_file is None
            ),
            f"objective.importance={self.importance.value}: {NO_FURTHER}": weighted and batch.further,
        }


@dataclass
class InfoNCEOptions(SoftmaxOptions):
    """InfoNCE: −log of the positive's share among all candidates, rows only (van den Oord et al. 2018)."""

    name: str = "info_nce"
    directions: Directions = described(Directions.x, DIRECTIONS)


@dataclass
class DprOptions(SoftmaxOptions):
    """DPR: question → passage over in-batch and hard negatives, dot product, τ = 1 (Karpukhin et al. 2020)."""

    name: str = "dpr"
    similarity: Similarity = described(Similarity.dot, SIMILARITY)
    temperature: float = described(1.0, "τ, or where it starts when it learns")
    learnable: bool = described(False, "whether τ learns (through logit_scale = log 1/τ)")
    directions: Directions = described(Directions.x, DIRECTIONS)


@dataclass
class EprOptions(DprOptions):
    """EPR: DPR with one hard negative per row, 2B − 1 negatives (Rubin et al. 2022)."""

    name: str = "epr"


@dataclass
class CrossEntropyOptions(DprOptions):
    """Cross-entropy over classes (the columns), as a robust loss: CE − log K. partition=sum gives CE itself."""

    name: str = "cross_entropy"
    partition: Partition = described(Partition.mean, "mean: CE − log K; sum: CE")


@dataclass
class ListwiseCEOptions(CrossEntropyOptions):
    """Listwise cross-entropy: every relevant column of a row against the row's whole list."""

    name: str = "listwise_ce"


@dataclass
class SimCLROptions(TemperatureOptions):
    """SimCLR: 2N views, each against all others but itself (Chen et al. 2020)."""

    name: str = "simclr"
    views: Views = described(Views.stacked, "how one tensor holds the views when y is not given")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ cannot learn: it has no optimum)")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ. "
            "Set one of them false": self.learnable and self.tau_scaled,
        }

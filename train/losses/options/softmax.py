"""Options of the softmax family, and its objectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.common import (
    DIRECTIONS,
    NO_FURTHER,
    CandidateSet,
    Directions,
    ExpectedBatch,
    ObjectiveRow,
    PairOptions,
    Similarity,
    TemperatureOptions,
    number,
)

Partition = Enum("Partition", {"sum": "sum", "mean": "mean"})
Importance = Enum("Importance", {"none": "none", "log_q": "log_q", "zeta": "zeta"})
Views = Enum("Views", {"stacked": "stacked", "interleaved": "interleaved"})


@dataclass
class SoftmaxOptions(PairOptions):
    """The softmax family: one core term and its options."""

    formula: ClassVar[str] = "dyad.train.losses.objectives.softmax:SoftmaxObjective"

    partition: Partition = described(Partition.sum, "sum or mean inside the log")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ learns only with a radius rho)")
    rho: float | None = number(None, "radius of a KL ball: adds ρτ; with tau_scaled, partition=mean", "above 0")
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
        }


@dataclass
class OneSidedDPMOptions(SoftmaxOptions):
    """One-sided DPM: rows only, candidates weighted by importance (Wang et al. 2024)."""

    formula: ClassVar[str] = "dyad.train.losses.objectives.softmax:OneSidedDPM"

    directions: Directions = described(Directions.x, "x→y only")
    importance: Importance = described(
        Importance.none, "weight of a candidate in the sum: 1, 1/q from log q, or e^(ζ/τ) from ζ"
    )
    importance_file: str | None = described(None, ".npy of log q or ζ by sample id; null: the caller passes them")

    @property
    def by_sample_id(self) -> bool:
        return self.importance_file is not None

    def broken_rules(self) -> dict[str, bool]:
        file, directions = self.importance_file, self.directions
        unused = file is not None and self.importance is Importance.none
        wrong = directions is not Directions.x
        return {
            **super().broken_rules(),
            f"objective.directions={directions.value}: one_sided_dpm has directions=x only": wrong,
            f"objective.importance_file={file}: needs objective.importance=log_q or zeta": unused,
        }

    def broken_by(self, batch: ExpectedBatch) -> dict[str, bool]:
        key, weighted = f"objective.importance={self.importance.value}", self.importance is not Importance.none
        no_file = weighted and self.importance_file is None
        return {
            **super().broken_by(batch),
            f"{key}: give objective.importance_file, an .npy by sample id": no_file,
            f"{key}: {NO_FURTHER}": weighted and batch.further,
        }


@dataclass
class SimCLROptions(TemperatureOptions):
    """SimCLR: 2N views, each against all others but itself (Chen et al. 2020)."""

    formula: ClassVar[str] = "dyad.train.losses.objectives.softmax:SimCLR"

    views: Views = described(Views.stacked, "how one tensor holds the views when y is not given")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ cannot learn: it has no optimum)")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ. "
            "Set one of them false": self.learnable and self.tau_scaled,
        }


DPM = {
    "learnable": described(False, "refused while the loss is scaled by τ"),
    "tau_scaled": described(True, "multiply the loss by τ"),
}
DPR = {"similarity": Similarity.dot, "temperature": 1.0, "learnable": False, "directions": Directions.x}
CROSS_ENTROPY = {**DPR, "partition": described(Partition.mean, "mean: CE − log K; sum: CE")}
OBJECTIVES = [
    ObjectiveRow(
        "symmetric_dpm",
        SoftmaxOptions,
        "Symmetric discriminative probabilistic modelling: τ · LSE of score differences, both directions summed.",
        **DPM,
        directions=Directions.sum,
    ),
    ObjectiveRow("clip", SoftmaxOptions, "CLIP: both directions of InfoNCE, averaged (Radford et al. 2021)."),
    ObjectiveRow(
        "gcl",
        SoftmaxOptions,
        "Global contrastive loss on the batch: symmetric DPM over negatives only, mean inside the log.",
        **DPM,
        directions=Directions.sum,
        candidates=CandidateSet.negatives,
        partition=Partition.mean,
    ),
    ObjectiveRow("one_sided_dpm", OneSidedDPMOptions, **DPM),
    ObjectiveRow(
        "info_nce",
        SoftmaxOptions,
        "InfoNCE: −log of the positive's share among all candidates, rows only (van den Oord et al. 2018).",
        directions=Directions.x,
    ),
    ObjectiveRow("simclr", SimCLROptions),
    ObjectiveRow(
        "dpr",
        SoftmaxOptions,
        "DPR: question → passage over in-batch and hard negatives, dot product, τ = 1 (Karpukhin et al. 2020).",
        **DPR,
    ),
    ObjectiveRow(
        "epr", SoftmaxOptions, "EPR: DPR with one hard negative per row, 2B − 1 negatives (Rubin et al. 2022).", **DPR
    ),
    ObjectiveRow(
        "cross_entropy",
        SoftmaxOptions,
        "Cross-entropy over classes (the columns), as a robust loss: CE − log K. partition=sum gives CE itself.",
        **CROSS_ENTROPY,
    ),
    ObjectiveRow(
        "listwise_ce",
        SoftmaxOptions,
        "Listwise cross-entropy: every relevant column of a row against the row's whole list.",
        **CROSS_ENTROPY,
    ),
]

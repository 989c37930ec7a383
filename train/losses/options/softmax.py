"""Options of the softmax family (InfoNCE, CLIP, DPR, SimCLR, DPM), and its presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import CandidateSet, Directions, Importance, Partition, Similarity, Views
from dyad.train.losses.options.common import (
    DIRECTIONS,
    WEIGHED,
    ExpectedBatch,
    NestedOptions,
    PairOptions,
    number,
    preset,
)


@dataclass
class SoftmaxOptions(PairOptions):
    """Options of the softmax family: of SoftmaxObjective in objectives/softmax.py and its subclasses."""

    formula: ClassVar[str] = "softmax:SoftmaxObjective"

    partition: Partition = described(Partition.sum, "sum or mean inside the log")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ learns only with a radius rho)")
    rho: float | None = number(None, "radius of a KL ball: adds ρτ; with tau_scaled, partition=mean", "above 0")
    directions: Directions = described(Directions.mean, DIRECTIONS)

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        ball = self.tau_scaled and self.partition is Partition.mean
        if self.learnable and self.tau_scaled and (self.rho is None or not ball):
            yield (
                "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ "
                "(its slope keeps one sign whatever the data), so τ would run to the end of its range. Set "
                "objective.tau_scaled=false, objective.learnable=false, or objective.partition=mean with a radius "
                "objective.rho"
            )
        if self.rho is not None and not ball:
            yield f"objective.rho={self.rho}: a radius needs objective.tau_scaled=true and objective.partition=mean"


@dataclass
class OneSidedDPMOptions(SoftmaxOptions):
    """One-sided DPM: rows only, candidates weighted by importance (Wang et al. 2024).

    Options of the class OneSidedDPM in objectives/softmax.py. DPM: discriminative probabilistic modelling.
    """

    formula: ClassVar[str] = "softmax:OneSidedDPM"
    takes: ClassVar[frozenset[str]] = PairOptions.takes | {"importance"}

    directions: Directions = described(Directions.x, "x→y only")
    importance: Importance = described(
        Importance.none, "weight of a candidate in the sum: 1, 1/q from log q, or e^(ζ/τ) from ζ"
    )
    importance_file: str | None = described(
        None, "log q or ζ by content key, as data weights makes it, or .npy by sample id; null: the caller passes them"
    )

    @property
    def number_file(self) -> str | None:
        return self.importance_file

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.directions is not Directions.x:
            yield f"objective.directions={self.directions}: one_sided_dpm has directions=x only"
        if self.importance_file is not None and self.importance is Importance.none:
            yield f"objective.importance_file={self.importance_file}: needs objective.importance=log_q or zeta"

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        if self.importance is not Importance.none and self.importance_file is None:
            yield (
                f"objective.importance={self.importance}: give objective.importance_file, as python -m data weights "
                "makes it"
            )


@dataclass
class SimCLROptions(NestedOptions):
    """SimCLR: 2N views, each compared with all other views (Chen et al. 2020).

    Options of the class SimCLR in objectives/softmax.py; the views are two of each of N items.
    """

    formula: ClassVar[str] = "softmax:SimCLR"
    takes: ClassVar[frozenset[str]] = WEIGHED

    views: Views = described(Views.stacked, "how one tensor holds the views when y is not given")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ cannot learn: it has no optimum)")

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.learnable and self.tau_scaled:
            yield (
                "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ. "
                "Set one of them false"
            )


DPM = {
    "learnable": described(False, "refused while the loss is scaled by τ"),
    "tau_scaled": described(True, "multiply the loss by τ"),
}
DPR = {"similarity": Similarity.dot, "temperature": 1.0, "learnable": False, "directions": Directions.x}
CROSS_ENTROPY = {**DPR, "partition": described(Partition.mean, "mean: CE − log K; sum: CE")}
OBJECTIVES = [
    preset(
        "symmetric_dpm",
        SoftmaxOptions,
        "Symmetric discriminative probabilistic modelling: τ · LSE of score differences, both directions summed.",
        **DPM,
        directions=Directions.sum,
    ),
    preset("clip", SoftmaxOptions, "CLIP: both directions of InfoNCE, averaged (Radford et al. 2021)."),
    preset(
        "gcl",
        SoftmaxOptions,
        "Global contrastive loss on the batch: symmetric DPM over negatives only, mean inside the log.",
        **DPM,
        directions=Directions.sum,
        candidates=CandidateSet.negatives,
        partition=Partition.mean,
    ),
    preset(
        "dcl",
        SoftmaxOptions,
        "Decoupled contrastive loss: CLIP without the positives in the sums; it may be below 0 (Yeh et al. 2022).",
        learnable=described(False, "the loss has no lower bound in τ once every positive has the highest score"),
        candidates=CandidateSet.negatives,
    ),
    preset("one_sided_dpm", OneSidedDPMOptions, **DPM),
    preset(
        "info_nce",
        SoftmaxOptions,
        "InfoNCE: −log of the positive's share among all candidates, rows only (van den Oord et al. 2018).",
        directions=Directions.x,
    ),
    preset("simclr", SimCLROptions),
    preset(
        "dpr",
        SoftmaxOptions,
        "DPR: question → passage over in-batch and hard negatives, dot product, τ = 1 (Karpukhin et al. 2020).",
        **DPR,
    ),
    preset(
        "epr", SoftmaxOptions, "EPR: DPR with one hard negative per row, 2B − 1 negatives (Rubin et al. 2022).", **DPR
    ),
    preset(
        "cross_entropy",
        SoftmaxOptions,
        "Cross-entropy over classes (the columns), as a robust loss: CE − log K. partition=sum gives CE itself.",
        **CROSS_ENTROPY,
    ),
    preset(
        "listwise_ce",
        SoftmaxOptions,
        "Listwise cross-entropy: every relevant column of a row against all columns, or with candidates=list its list.",
        **CROSS_ENTROPY,
    ),
]

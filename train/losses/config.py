"""What can be said about an objective: one dataclass per entry of OBJECTIVES. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from data.config import described


class Similarity(Enum):
    cosine = "cosine"
    dot = "dot"


class Duplicates(Enum):
    keep = "keep"
    mask = "mask"
    positive = "positive"


class Candidates(Enum):
    all = "all"
    negatives = "negatives"


class Partition(Enum):
    sum = "sum"
    mean = "mean"


class Directions(Enum):
    sum = "sum"
    mean = "mean"
    x = "x"
    y = "y"


@dataclass
class SoftmaxConfig:
    """The softmax family (objectives.md 2): one core term, its options."""

    name: str = MISSING
    temperature: float = described(0.07, "τ, or where it starts when it learns")
    learnable: bool = described(True, "whether τ learns (through logit_scale = log 1/τ)")
    min_temperature: float = described(0.01, "τ is clamped to at least this after every step")
    similarity: Similarity = described(Similarity.cosine, "score of two embeddings")
    candidates: Candidates = described(Candidates.all, "whether the positive stands in its own partition sum")
    partition: Partition = described(Partition.sum, "sum or mean inside the log")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ cannot learn: objectives.md 2.6)")
    directions: Directions = described(Directions.mean, "x→y and y→x: their mean, their sum, or one of them")
    duplicates: Duplicates = described(
        Duplicates.keep, "columns with an equal content key: negatives, left out, or positives"
    )


@dataclass
class ClipConfig(SoftmaxConfig):
    """CLIP: both directions of InfoNCE, averaged (objectives.md 2.1)."""

    name: str = "clip"


@dataclass
class SymmetricDPMConfig(SoftmaxConfig):
    """Symmetric discriminative probabilistic modelling, literally objectives.md 2.1."""

    name: str = "symmetric_dpm"
    learnable: bool = described(False, "refused while the loss is scaled by τ")
    tau_scaled: bool = described(True, "multiply the loss by τ")
    directions: Directions = described(Directions.sum, "x→y and y→x: their mean, their sum, or one of them")


CONFIGS: dict[str, type[SoftmaxConfig]] = {"clip": ClipConfig, "symmetric_dpm": SymmetricDPMConfig}

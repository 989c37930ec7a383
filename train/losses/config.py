"""What can be said about an objective: one dataclass per entry of OBJECTIVES. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.config import described
from data.errors import ConfigError, nearest


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
    """The softmax family: one core term and its options."""

    name: str = MISSING
    temperature: float = described(0.07, "τ, or where it starts when it learns")
    learnable: bool = described(True, "whether τ learns (through logit_scale = log 1/τ)")
    min_temperature: float = described(0.01, "τ is clamped to at least this after every step")
    similarity: Similarity = described(Similarity.cosine, "score of two embeddings")
    candidates: Candidates = described(Candidates.all, "whether the positive stands in its own partition sum")
    partition: Partition = described(Partition.sum, "sum or mean inside the log")
    tau_scaled: bool = described(False, "multiply the loss by τ (then τ cannot learn: it has no optimum)")
    directions: Directions = described(Directions.mean, "x→y and y→x: their mean, their sum, or one of them")
    duplicates: Duplicates = described(
        Duplicates.keep, "columns with an equal content key: negatives, left out, or positives"
    )

    def __post_init__(self) -> None:
        tau, least = self.temperature, self.min_temperature
        rules = {
            f"objective.temperature={tau}: must be above 0": tau <= 0,
            f"objective.min_temperature={least}: must be above 0 and at most 1": not 0 < least <= 1,
            f"objective.temperature={tau}: where τ learns it starts between objective.min_temperature={least} and 1. "
            "Change it, or set objective.learnable=false": self.learnable and not least <= tau <= 1,
            "objective.learnable=true with objective.tau_scaled=true: a loss multiplied by τ has no optimum in τ (its "
            "slope keeps one sign whatever the data), so τ would run to the end of its range. "
            "Set objective.tau_scaled=false, or objective.learnable=false": self.learnable and self.tau_scaled,
        }
        broken = [message for message, is_broken in rules.items() if is_broken]
        if broken:
            raise ConfigError(broken[0])


@dataclass
class ClipConfig(SoftmaxConfig):
    """CLIP: both directions of InfoNCE, averaged (Radford et al. 2021)."""

    name: str = "clip"


@dataclass
class SymmetricDPMConfig(SoftmaxConfig):
    """Symmetric discriminative probabilistic modelling: τ · LSE of score differences, both directions summed."""

    name: str = "symmetric_dpm"
    learnable: bool = described(False, "refused while the loss is scaled by τ")
    tau_scaled: bool = described(True, "multiply the loss by τ")
    directions: Directions = described(Directions.sum, "x→y and y→x: their mean, their sum, or one of them")


CONFIGS: dict[str, type[SoftmaxConfig]] = {"clip": ClipConfig, "symmetric_dpm": SymmetricDPMConfig}


def configure(name: str, **options: Any) -> SoftmaxConfig:
    """The configuration of objective `name` with these options; choices may be given as str.

    Raises ConfigError for an unknown name or option (with the nearest one), a value of the wrong type or out of range,
    and options that exclude each other.
    """
    if name not in CONFIGS:
        raise ConfigError(f"objective={name}: no such objective.{nearest(name, CONFIGS)} Choices: {', '.join(CONFIGS)}")
    known = [f.name for f in fields(CONFIGS[name]) if f.name != "name"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"objective.{option}: {name} has no such option.{nearest(option, known)} Options: {', '.join(known)}"
            )
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CONFIGS[name]), options))
    except OmegaConfBaseException as error:
        raise ConfigError(f"objective.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, SoftmaxConfig)
    return config

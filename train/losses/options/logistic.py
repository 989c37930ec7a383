"""Options of the logistic family, and of CPC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from data.config import described
from train.losses.options.common import NO_FURTHER, Duplicates, Expected, Similarity, TemperatureOptions


class Noise(Enum):
    unigram = "unigram"
    uniform = "uniform"
    file = "file"


@dataclass
class LogisticOptions(TemperatureOptions):
    """Binary decisions on pairs with logit s/τ + bias."""

    init_scale: float | None = described(None, "where 1/τ starts; instead of temperature")
    init_bias: float | None = described(0.0, "where the bias starts")
    bias_learnable: bool = described(True, "whether the bias learns")
    duplicates: Duplicates = described(Duplicates.keep, "columns with equal keys: negatives, left out, or positives")

    def broken_rules(self) -> dict[str, bool]:
        scale = self.init_scale
        return {
            f"objective.init_scale={scale}: must be above 0": scale is not None and not scale > 0,
            **super().broken_rules(),
        }

    def __post_init__(self) -> None:
        if self.init_scale:
            self.temperature = 1 / self.init_scale
        super().__post_init__()


@dataclass
class NceOptions(LogisticOptions):
    """Noise-contrastive estimation with the batch as noise: logit log u − log q − log k (Gutmann & Hyvärinen 2012)."""

    name: str = "nce"
    k: float | None = described(None, "noise points per data point; null: as many as the batch has, B − 1")
    noise: Noise = described(
        Noise.unigram, "q of the columns: the data's own (scores model the ratio to it), 1/num_samples, or from a file"
    )
    noise_file: str | None = described(None, "file: .npy of log q by sample id")
    init_bias: float | None = described(0.0, "where −log Z, an offset of log u, starts")
    bias_learnable: bool = described(False, "whether −log Z learns")
    num_samples: int | None = described(None, "uniform: number of items; null: of the training data")

    @property
    def by_sample_id(self) -> bool:
        return self.noise_file is not None

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            f"objective.k={self.k}: must be above 0": self.k is not None and not self.k > 0,
            f"objective.num_samples={self.num_samples}: must be 1 or more": (
                self.num_samples is not None and self.num_samples < 1
            ),
            "objective.noise=file: give objective.noise_file, an .npy of log q by sample id": (
                self.noise is Noise.file and self.noise_file is None
            ),
            f"objective.noise_file={self.noise_file}: is read with objective.noise=file only": (
                self.noise is not Noise.file and self.noise_file is not None
            ),
        }

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        from_file = self.noise is Noise.file
        return {**super().broken_by(batch), f"objective.noise=file: {NO_FURTHER}": from_file and batch.further}


@dataclass
class BinaryNceOptions(LogisticOptions):
    """NCE with equal priors: half data, half noise; noise from the batch, all of it or r columns per row."""

    name: str = "binary_nce"
    negatives_per_positive: int | None = described(None, "columns per row that are noise, cost O(B); null: all others")

    def broken_rules(self) -> dict[str, bool]:
        r = self.negatives_per_positive
        return {
            **super().broken_rules(),
            f"objective.negatives_per_positive={r}: must be 1 or more": r is not None and r < 1,
        }

    def broken_by(self, batch: Expected) -> dict[str, bool]:
        r = self.negatives_per_positive
        return {
            **super().broken_by(batch),
            f"objective.negatives_per_positive={r}: must be below global_batch_size={batch.pairs}": (
                r is not None and r >= batch.pairs
            ),
            f"objective.negatives_per_positive={r}: {NO_FURTHER}": r is not None and batch.further,
        }


@dataclass
class LocalNceOptions(LogisticOptions):
    """Local NCE: a logistic decision for every column of an anchor, summed (Ma & Collins 2018)."""

    name: str = "local_nce"
    init_bias: float | None = described(
        None, "where the bias starts; null: at 0, on top of −log(K − 1) of every batch's K columns"
    )


@dataclass
class SiglipOptions(LocalNceOptions):
    """SigLIP: pairwise sigmoid loss with learnt scale and bias (Zhai et al. 2023)."""

    name: str = "siglip"
    temperature: float = described(0.1, "τ, or where it starts when it learns")
    init_bias: float | None = described(
        -10.0, "where the bias starts; null: at 0, on top of −log(K − 1) of every batch's K columns"
    )


@dataclass
class CpcOptions(TemperatureOptions):
    """Contrastive predictive coding: contexts predict the encodings some steps ahead (van den Oord et al. 2018)."""

    name: str = "cpc"
    similarity: Similarity = described(Similarity.dot, "score of a prediction and an encoding")
    temperature: float = described(1.0, "τ, or where it starts when it learns")
    learnable: bool = described(False, "whether τ learns (through logit_scale = log 1/τ)")
    width: int = described(MISSING, "D of contexts and encodings")
    horizons: int = described(1, "steps ahead that are predicted")
    shared_w: bool = described(False, "one W for all horizons")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            f"objective.horizons={self.horizons}: must be 1 or more": self.horizons < 1,
            f"objective.width={self.width}: must be 1 or more": self.width < 1,
        }

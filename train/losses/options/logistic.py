"""Options of the logistic family (NCE, local NCE, SigLIP) and of CPC, and their presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from dyad.data.config import described
from dyad.train.losses.options.choices import Duplicates, Noise, Similarity
from dyad.train.losses.options.common import RELATED, ExpectedBatch, TemperatureOptions, number, preset


@dataclass
class LogisticOptions(TemperatureOptions):
    """Options of the logistic family, which classifies each pair as data or noise by its logit s/τ + bias.

    s is the score of the pair, τ the temperature; data are positives, noise are negatives. init_scale: if given, the
    temperature starts at 1/init_scale.
    """

    takes: ClassVar[frozenset[str]] = RELATED

    init_scale: float | None = number(None, "where 1/τ starts; instead of temperature", "above 0")
    init_bias: float | None = described(0.0, "where the bias starts")
    bias_learnable: bool = described(True, "whether the bias learns")
    duplicates: Duplicates = described(Duplicates.keep, "columns with equal keys: negatives, left out, or positives")

    def __post_init__(self) -> None:
        if self.init_scale and self.init_scale > 0:
            self.temperature = 1 / self.init_scale
        super().__post_init__()


@dataclass
class NceOptions(LogisticOptions):
    """Noise-contrastive estimation with the batch as noise: logit log u − log q − log k (Gutmann & Hyvärinen 2012).

    Options of the class Nce in objectives/logistic.py. u: the model, log u = s/τ + bias for a score s; q: the density
    of the noise; k: noise points per data point.
    """

    formula: ClassVar[str] = "logistic:Nce"

    k: float | None = number(None, "noise points per data point; null: as many as the batch has, B − 1", "above 0")
    noise: Noise = described(
        Noise.unigram, "q of the columns: the data's own (scores model the ratio to it), 1/num_samples, or from a file"
    )
    noise_file: str | None = described(
        None, "file: log q by content key, as data weights makes it, or .npy by sample id"
    )
    init_bias: float | None = described(0.0, "where −log Z, an offset of log u, starts")
    bias_learnable: bool = described(False, "whether −log Z learns")
    num_samples: int | None = number(None, "uniform: number of items; null: of the training data", "1 or more")

    @property
    def number_file(self) -> str | None:
        return self.noise_file

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.noise is Noise.file and self.noise_file is None:
            yield "objective.noise=file: give objective.noise_file, as python -m data weights makes it"
        if self.noise is not Noise.file and self.noise_file is not None:
            yield f"objective.noise_file={self.noise_file}: is read with objective.noise=file only"


@dataclass
class BinaryNceOptions(LogisticOptions):
    """NCE with equal priors: half data, half noise; noise from the batch, all of it or r columns per row.

    Options of the class BinaryNce in objectives/logistic.py; r is negatives_per_positive.
    """

    formula: ClassVar[str] = "logistic:BinaryNce"

    negatives_per_positive: int | None = number(
        None, "columns per row that are noise, cost O(B); null: all others", "1 or more"
    )

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        r = self.negatives_per_positive
        if r is not None and r >= batch.pairs:
            yield f"objective.negatives_per_positive={r}: must be below global_batch_size={batch.pairs}"
        if r is not None and batch.further:
            yield f"objective.negatives_per_positive={r}: {batch.no_further}"


@dataclass
class LocalNceOptions(LogisticOptions):
    """Local NCE: a logistic decision for every column of an anchor, summed (Ma & Collins 2018).

    Options of the class LocalNce in objectives/logistic.py, which also computes SigLIP. Each decision is whether the
    column is a positive or noise.
    """

    formula: ClassVar[str] = "logistic:LocalNce"

    init_bias: float | None = described(
        None, "where the bias starts; null: at 0, on top of −log(K − 1) of every batch's K columns"
    )

    @property
    def has_logit_bias(self) -> bool:
        return self.init_bias is not None


@dataclass
class CpcOptions(TemperatureOptions):
    """Contrastive predictive coding: contexts predict the encodings some steps ahead (van den Oord et al. 2018).

    Options of the class Cpc in objectives/cpc.py, for sequences of contexts and encodings.
    """

    formula: ClassVar[str] = "cpc:Cpc"
    takes: ClassVar[frozenset[str]] = frozenset({"lengths"})
    inputs: ClassVar[str] = "sequences"

    similarity: Similarity = described(Similarity.dot, "score of a prediction and an encoding")
    width: int = number(MISSING, "D of contexts and encodings", "1 or more")
    horizons: int = number(1, "steps ahead that are predicted", "1 or more")
    shared_w: bool = described(False, "one W for all horizons")


OBJECTIVES = [
    preset("nce", NceOptions),
    preset("binary_nce", BinaryNceOptions),
    preset("local_nce", LocalNceOptions),
    preset(
        "siglip",
        LocalNceOptions,
        "SigLIP: pairwise sigmoid loss with learnt scale and bias (Zhai et al. 2023).",
        temperature=0.1,
        init_bias=-10.0,
    ),
    preset("cpc", CpcOptions, temperature=1.0, learnable=False),
]

"""Options of the logistic family (NCE, local NCE, SigLIP) and of CPC, and their presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import Density, Duplicates, Noise, Similarity
from dyad.train.losses.options.common import (
    RELATED,
    TAKE_BOTH,
    X_NEGATIVES,
    ExpectedBatch,
    NestedOptions,
    TemperatureOptions,
    number,
    preset,
)


@dataclass
class LogisticOptions(NestedOptions):
    """Options of the logistic family, which classifies each pair as data or noise by its logit s/τ + bias.

    s is the score of the pair, τ the temperature; data are positives, noise are negatives. init_scale: if given, the
    temperature starts at 1/init_scale.
    """

    takes: ClassVar[frozenset[str]] = RELATED | X_NEGATIVES

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
    """Noise-contrastive estimation, noise from the batch or drawn: logit log(u/(q k)) (Gutmann & Hyvärinen 2012).

    Options of the class Nce in objectives/logistic.py. u: the model, log u = s/τ + bias for a score s; q: the density
    of the noise; k: noise points per data point. Noise is the batch, or k items that a run draws for each global batch.
    """

    formula: ClassVar[str] = "logistic:Nce"

    k: float | None = number(
        None, "noise points per data point; null: as many as the batch has, B − 1; drawn: as many as pairs", "above 0"
    )
    noise: Noise = described(
        Noise.batch,
        "the batch, or k items drawn for it of all y items: uniform, by their counts in the data (unigram), by a file",
    )
    density: Density = described(
        Density.unigram, "batch: q of the columns, the data's own (it cancels), 1/num_samples, or a file"
    )
    noise_file: str | None = described(
        None, "file: log q by content key, as data weights makes it; density=file also .npy by sample id"
    )
    init_bias: float | None = described(
        None, "where −log Z, an offset of log u, starts; null: at 0; drawn: at −log of the number of items"
    )
    bias_learnable: bool | None = described(None, "whether −log Z learns; null: with drawn noise")
    num_samples: int | None = number(None, "density=uniform: number of items; null: of the training data", "1 or more")

    def __post_init__(self) -> None:
        drawn = self.draws is not None
        if self.bias_learnable is None:
            self.bias_learnable = drawn  # pyright: ignore[reportIncompatibleVariableOverride]
        self.init_bias = 0.0 if self.init_bias is None and not drawn else self.init_bias
        super().__post_init__()

    @property
    def number_file(self) -> str | None:
        return self.noise_file if self.draws is None else None

    @property
    def draws(self) -> str | None:
        return None if self.noise is Noise.batch else str(self.noise)

    @property
    def needs_others(self) -> bool:
        return not self.draws

    @property
    def no_relevance_because(self) -> str:
        if self.draws:
            way_out = "Leave data.relevance out, or set objective.noise=batch"
            return f"objective.noise={self.draws}: takes no relevance. {way_out}"
        return super().no_relevance_because

    @property
    def no_x_negatives_because(self) -> str:
        return f"objective=nce: its noise is y drawn from q, and wrong x are drawn from no density. {TAKE_BOTH}"

    def drawn_items(self, pairs: int) -> int:
        return int(self.k or pairs) if self.draws else 0

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        of_columns = self.noise is Noise.batch and self.density is Density.file
        if self.noise is Noise.file and self.noise_file is None:
            yield "objective.noise=file: give objective.noise_file, as python -m data weights makes it"
        if of_columns and self.noise_file is None:
            yield "objective.density=file: give objective.noise_file, as python -m data weights makes it"
        if self.noise_file is not None and not (of_columns or self.noise is Noise.file):
            yield (
                f"objective.noise_file={self.noise_file}: is read with objective.noise=file, or with "
                "objective.noise=batch objective.density=file"
            )
        if self.draws and self.k is not None and self.k % 1:
            yield f"objective.k={self.k}: so many items are drawn with objective.noise={self.draws}. Set a whole number"
        if self.draws and self.duplicates is not Duplicates.keep:
            yield (
                f"objective.duplicates={self.duplicates}: what is drawn from q is noise, also the row's own positive. "
                "Set objective.duplicates=keep, or objective.noise=batch"
            )

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        if self.draws and batch.further:
            yield f"objective.noise={self.draws}: {batch.no_further}"
        if self.draws and not batch.catalogue:
            yield (
                f"objective.noise={self.draws}: is drawn from all captions or passages of data with an index. Take "
                "task=image_text or question_passage with data.mode=indexed, or objective.noise=batch"
            )


@dataclass
class BinaryNceOptions(LogisticOptions):
    """NCE with equal priors of data and noise; noise is all other columns of the batch, or r of them per row.

    Options of the class BinaryNce in objectives/logistic.py; r is negatives_per_positive.
    """

    formula: ClassVar[str] = "logistic:BinaryNce"

    negatives_per_positive: int | None = number(
        None, "columns per row that are noise, cost O(B); null: all others", "1 or more"
    )

    @property
    def no_x_negatives_because(self) -> str:
        if self.negatives_per_positive is not None:
            return f"objective.negatives_per_positive={self.negatives_per_positive}: its noise is pairs of the batch"
        return super().no_x_negatives_because

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        r = self.negatives_per_positive
        if r is not None and r >= batch.pairs:
            yield f"objective.negatives_per_positive={r}: must be below {batch.pairs}, the pairs of a batch"
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

    @property
    def no_x_negatives_because(self) -> str:
        if not self.has_logit_bias:
            return f"objective={self.name} classifies the K y of an x, by a bias of −log(K − 1). {TAKE_BOTH}"
        return super().no_x_negatives_because


@dataclass
class CpcOptions(TemperatureOptions):
    """Contrastive predictive coding: contexts predict the encodings some steps ahead (van den Oord et al. 2018).

    Options of the class Cpc in objectives/cpc.py, for sequences of contexts and encodings.
    """

    formula: ClassVar[str] = "cpc:Cpc"
    takes: ClassVar[frozenset[str]] = frozenset({"lengths"})
    inputs: ClassVar[str] = "sequences"

    similarity: Similarity = described(Similarity.dot, "score of a prediction and an encoding")
    width: int | None = number(None, "D of encodings; null: that of the model", "1 or more")
    context_width: int | None = number(None, "D of contexts; null: that of the model, else of encodings", "1 or more")
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

"""Pictures and their captions out of shards: batches for training, item sets for evaluation.

A sample has a picture, the first member that data.image_key names, and captions where data.captions says: "txt" is the
text member, one caption a line; any other name is a field of the json member, a string or a list of strings. Training
draws one caption by (seed, epoch, id); evaluation takes all captions of the first place in data.captions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.batch import Bad, Batch
from data.config import DataConfig
from data.keys import content_key
from data.sample import Sample
from data.shards import Shards
from data.substitutes import Substitutes
from data.transforms import Floats, ImageSpec, TrainingTransform, evaluation_transform, training_transform, uniforms
from data.workers import at

Tokenize = Callable[[list[str]], Tensor]  # n texts → int64 (n, L)
CAPTION_DRAWS = 2


def image_spec(spec: ImageSpec, config: DataConfig) -> ImageSpec:
    """The tower's preprocessing with data.resize in place of its own, when that is set."""
    return spec if config.resize is None else replace(spec, resize=config.resize.value)


@dataclass(frozen=True)
class Pair:
    """One training pair. x (3, S, S) uint8, at its size and before noise; draws (n,) what its noise is made of."""

    x: Tensor
    text: str
    sample_id: int
    x_key: int
    y_key: int
    draws: Floats


class PairMaker:
    """Samples → pairs → batches. Everything random about a pair comes from the seed and two numbers of its own."""

    def __init__(self, spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int) -> None:
        self.tokenize, self.config, self.seed = tokenize, config, seed
        self._transform = training_transform(image_spec(spec, config), config.augment)
        weights = config.caption_weights or [1.0] * len(config.captions)
        self._thresholds = np.array(list(accumulate(weights))) / sum(weights)

    def pair(self, sample: Sample, sample_id: int, *, epoch: int, place: int) -> Pair:
        """Random by (epoch, place). Raises DataError, naming shard and key, for a sample that cannot be used."""
        draws = uniforms(self.seed, epoch, place, CAPTION_DRAWS + TrainingTransform.DRAWS)
        text, y_key = self._text(sample, draws)
        noise = draws[CAPTION_DRAWS:]
        x = self._transform.at_size(sample.decoded(self.config.image_key, self.config.max_image_pixels), noise)
        return Pair(x, text, sample_id, content_key(sample.picture(self.config.image_key)), y_key, noise)

    def batch(self, pairs: Sequence[Pair], bad: tuple[Bad, ...] = ()) -> Batch:
        return Batch(
            x=self._transform.noisy(torch.stack([p.x for p in pairs]), np.stack([p.draws for p in pairs])),
            y=self.tokenize([p.text for p in pairs]),
            sample_ids=torch.tensor([p.sample_id for p in pairs]),
            x_keys=torch.tensor([p.x_key for p in pairs]),
            y_keys=torch.tensor([p.y_key for p in pairs]),
            bad=bad,
        )

    def check(self, sample: Sample) -> None:
        """Raise DataError when it cannot be used, by any of data.captions."""
        sample.decoded(self.config.image_key, self.config.max_image_pixels)
        for place in self.config.captions:
            text_key(sample, sample.captions(place)[0], self.config)

    def _text(self, sample: Sample, draws: Floats) -> tuple[str, int]:
        """One caption and its content key."""
        place = int(np.searchsorted(self._thresholds, draws[0], side="right"))
        captions = sample.captions(self.config.captions[min(place, len(self.config.captions) - 1)])
        text = captions[int(draws[1] * len(captions))]
        return text, text_key(sample, text, self.config)


class ImageText:
    """Training pairs by position (epoch, sample id); all depends on nothing but seed, position and shards."""

    def __init__(self, shards: Shards, spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int) -> None:
        """Raises DataError when none of the first samples can be used: a wrong key or field in the configuration
        shows before any process starts."""
        self.shards, self._maker = shards, PairMaker(spec, tokenize, config, seed)
        self._substitutes = Substitutes(shards.sizes, seed, config.tolerated)
        self._substitutes.first(len(shards), lambda i: self._maker.check(Sample.read(shards, i)))

    def __len__(self) -> int:
        return len(self.shards)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Raises DataError, naming the shard, for one that cannot be read, and for too many samples in a row."""
        pairs, bad = self._substitutes.all(positions, self._pair, self.shards.origin)
        return self._maker.batch(pairs, bad)

    def place(self, sample_id: int) -> str:
        index, row = self.shards.locate(sample_id)
        return f"sample {row} of {index.path}"

    def _pair(self, epoch: int, sample_id: int) -> Pair:
        at(sample_id)
        return self._maker.pair(Sample.read(self.shards, sample_id), sample_id, epoch=epoch, place=sample_id)


def text_key(sample: Sample, text: str, config: DataConfig) -> int:
    """Content key of a caption: of the field data.text_key, which many texts may share, or of the text itself."""
    meaning = text if config.text_key is None else str(sample.field(config.text_key))
    return content_key(meaning.encode())


# Evaluation -----------------------------------------------------------------------------------------------------------


class Items(Protocol):
    """Tower inputs by position; can be pickled, since loader processes read them."""

    def __len__(self) -> int: ...

    def block(self, start: int, stop: int) -> Tensor:
        """Inputs of items [start, stop): uint8 (k, 3, S, S) or int64 (k, L)."""
        ...


@dataclass(frozen=True)
class Pictures:
    """The pictures of all samples, in order."""

    shards: Shards
    spec: ImageSpec
    config: DataConfig

    def __len__(self) -> int:
        return len(self.shards)

    def block(self, start: int, stop: int) -> Tensor:
        transform = evaluation_transform(self.spec)
        return torch.stack([transform(self.decoded(i)).contiguous() for i in range(start, min(stop, len(self)))])

    def decoded(self, i: int) -> Tensor:
        """Picture i as it is, uint8 (3, H, W)."""
        return Sample.read(self.shards, i).decoded(self.config.image_key, self.config.max_image_pixels)

    def key(self, i: int) -> str:
        """The key of its sample."""
        return self.shards.key(i)


@dataclass(frozen=True)
class Captions:
    """Texts, tokenised when they are read."""

    texts: Sequence[str]
    tokenize: Tokenize

    def __len__(self) -> int:
        return len(self.texts)

    def block(self, start: int, stop: int) -> Tensor:
        return self.tokenize(list(self.texts[start:stop]))


@dataclass(frozen=True)
class RetrievalSet:
    """N pictures and their M captions. owner (M,): the picture of each caption, ascending; keys: content ids; int64."""

    images: Pictures
    texts: Captions
    owner: np.ndarray
    image_keys: np.ndarray
    text_keys: np.ndarray


@dataclass(frozen=True)
class LabelledSet:
    """N pictures and the class of each."""

    images: Pictures
    labels: Sequence[str]


def retrieval_set(shards: Shards, spec: ImageSpec, tokenize: Tokenize, config: DataConfig) -> RetrievalSet:
    """All pictures with all their captions at the first place of data.captions. DataError for a sample without."""
    texts: list[str] = []
    owner, image_keys, text_keys = [], [], []
    for number, sample in enumerate(_samples(shards)):
        image_keys.append(content_key(sample.picture(config.image_key)))
        for text in sample.captions(config.captions[0]):
            texts.append(text)
            owner.append(number)
            text_keys.append(text_key(sample, text, config))
    return RetrievalSet(
        Pictures(shards, image_spec(spec, config), config),
        Captions(texts, tokenize),
        *(np.array(column, dtype=np.int64) for column in (owner, image_keys, text_keys)),
    )


def labelled_set(shards: Shards, spec: ImageSpec, config: DataConfig, label: str) -> LabelledSet:
    """All pictures with their class: `label` is a json field, or "cls" for the number in the cls member."""
    labels = [sample.label(label) for sample in _samples(shards)]
    return LabelledSet(Pictures(shards, image_spec(spec, config), config), labels)


def _samples(shards: Shards) -> Iterator[Sample]:
    return (Sample.read(shards, sample_id) for sample_id in range(len(shards)))

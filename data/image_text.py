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

from data.batch import Batch
from data.config import DataConfig
from data.keys import content_key
from data.sample import Sample
from data.shards import Shards
from data.transforms import Floats, ImageSpec, TrainingTransform, evaluation_transform, training_transform, uniforms

Tokenize = Callable[[list[str]], Tensor]  # n texts → int64 (n, L)
CAPTION_DRAWS = 2


def image_spec(spec: ImageSpec, config: DataConfig) -> ImageSpec:
    """The tower's preprocessing with data.resize in place of its own, when that is set."""
    return spec if config.resize is None else replace(spec, resize=config.resize.value)


class ImageText:
    """Training pairs by position (epoch, sample id); all depends on nothing but seed, position and shards."""

    def __init__(self, shards: Shards, spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int) -> None:
        self.shards, self.tokenize, self.config, self.seed = shards, tokenize, config, seed
        self._transform = training_transform(image_spec(spec, config), config.augment)
        weights = config.caption_weights or [1.0] * len(config.captions)
        self._thresholds = np.array(list(accumulate(weights))) / sum(weights)
        if len(shards):
            self._check(Sample.read(shards, 0))

    def __len__(self) -> int:
        return len(self.shards)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Raises DataError, naming shard and key, for a sample that cannot be used."""
        count = CAPTION_DRAWS + TrainingTransform.DRAWS
        draws = np.stack([uniforms(self.seed, epoch, sample_id, count) for epoch, sample_id in positions])
        samples = [Sample.read(self.shards, sample_id) for _, sample_id in positions]
        texts, keys = zip(*(self._text(s, row) for s, row in zip(samples, draws, strict=True)), strict=True)
        config = self.config
        pictures = (sample.decoded(config.image_key, config.max_image_pixels) for sample in samples)
        return Batch(
            x=self._transform(pictures, draws[:, CAPTION_DRAWS:]),
            y=self.tokenize(list(texts)),
            sample_ids=torch.tensor([sample_id for _, sample_id in positions]),
            x_keys=torch.tensor([content_key(sample.picture(config.image_key)) for sample in samples]),
            y_keys=torch.tensor(keys),
        )

    def _check(self, sample: Sample) -> None:
        """A wrong key or field in the configuration shows before any process starts."""
        sample.decoded(self.config.image_key, self.config.max_image_pixels)
        for place in self.config.captions:
            text_key(sample, sample.captions(place)[0], self.config)

    def _text(self, sample: Sample, draws: Floats) -> tuple[str, int]:
        """One caption and its content key."""
        place = int(np.searchsorted(self._thresholds, draws[0], side="right"))
        captions = sample.captions(self.config.captions[min(place, len(self.config.captions) - 1)])
        text = captions[int(draws[1] * len(captions))]
        return text, text_key(sample, text, self.config)


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

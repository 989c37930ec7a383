"""Pictures and their captions from shards: batches for training, sets of items for evaluation.

A sample has a picture, the first member that data.image_key names, and captions under the names in data.captions: "txt"
is the text member, one caption a line; any other name is a field of the json member, a string or a list of strings.
Training draws one caption by (seed, epoch, id). Evaluation takes all captions under the first name in data.captions.

b pictures of a batch; S side of the tower's input; L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dyad.data.batch import BadSample, Batch
from dyad.data.config import DataConfig
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import (
    CROP_DRAWS,
    DRAWS,
    ImageSpec,
    add_noise,
    evaluation_transform,
    training_size,
    uniforms,
)
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards

Tokenize = Callable[[list[str]], Tensor]  # n texts → int64 (n, L)
CAPTION_DRAWS = 2  # uniforms: which name in data.captions, which caption under it


def image_spec(spec: ImageSpec, config: DataConfig) -> ImageSpec:
    """`spec`, which is the preprocessing of a tower, with its `resize` replaced by data.resize where that is set."""
    return spec if config.resize is None else replace(spec, resize=config.resize.value)


@dataclass(frozen=True)
class TrainingPair:
    """A picture and a caption of one sample.

    x (3, S, S) uint8: the picture, resized, cropped and without noise. draws (DRAWS,): random numbers in [0, 1) of its
    augmentation. x_key, y_key: content ids of picture and caption.
    """

    x: Tensor
    text: str
    sample_id: int
    x_key: int
    y_key: int
    draws: np.ndarray


class PairMaker:
    """Makes training pairs from samples, and batches from training pairs."""

    def __init__(self, spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int) -> None:
        self.spec, self.tokenize, self.config, self.seed = image_spec(spec, config), tokenize, config, seed
        weights = config.caption_weights or [1.0] * len(config.captions)
        self._thresholds = np.array(list(accumulate(weights))) / sum(weights)

    def pair(self, sample: ShardSample, sample_id: int, *, epoch: int, position: int) -> TrainingPair:
        """A pair whose random parts depend only on (seed, epoch, position).

        Raises SampleError, naming shard and key, for a sample that cannot be used.
        """
        config = self.config
        draws = uniforms(self.seed, epoch, position, CAPTION_DRAWS + DRAWS)
        number = int(np.searchsorted(self._thresholds, draws[0], side="right"))
        captions = sample.captions(config.captions[min(number, len(config.captions) - 1)])
        text = captions[int(draws[1] * len(captions))]
        y_key = text_key(sample, text, config)
        draws = draws[CAPTION_DRAWS:]
        x = training_size(sample.decoded(config.image_key, config.max_image_pixels), self.spec, config.augment, draws)
        return TrainingPair(x, text, sample_id, content_key(sample.picture(config.image_key)), y_key, draws)

    def batch(self, pairs: Sequence[TrainingPair], bad: tuple[BadSample, ...] = ()) -> Batch:
        """The batch of some pairs: noise is added to the pictures, captions are tokenised. bad: replaced samples."""
        draws = np.stack([p.draws for p in pairs])[:, CROP_DRAWS:]
        return Batch(
            x=add_noise(torch.stack([p.x for p in pairs]), self.config.augment, draws),
            y=self.tokenize([p.text for p in pairs]),
            sample_ids=torch.tensor([p.sample_id for p in pairs]),
            x_keys=torch.tensor([p.x_key for p in pairs]),
            y_keys=torch.tensor([p.y_key for p in pairs]),
            bad=bad,
        )

    def check(self, sample: ShardSample) -> None:
        """Raise SampleError when the picture, or the captions under any of data.captions, cannot be used."""
        sample.decoded(self.config.image_key, self.config.max_image_pixels)
        for name in self.config.captions:
            text_key(sample, sample.captions(name)[0], self.config)


class ImageText:
    """The training data set of image_text. A batch depends only on the seed, its positions and the shards."""

    def __init__(self, shards: Shards, spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int) -> None:
        """Raises SampleError when none of the first samples can be used. So a wrong key or field in the configuration
        is reported before any loader process starts."""
        self.shards, self._maker = shards, PairMaker(spec, tokenize, config, seed)
        self._replacements = Replacements(shards.sizes, seed, config.tolerated)
        checked = range(min(len(shards), max(config.tolerated, 1)))
        check_any(checked, lambda i: self._maker.check(ShardSample.read(shards, i)))

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """The batch of some positions (epoch, sample id).

        Raises DataError, naming the shard, when it cannot be read, and for too many bad samples in a row.
        """

        def pair(epoch: int, sample_id: int) -> TrainingPair:
            sample = ShardSample.read(self.shards, sample_id)
            return self._maker.pair(sample, sample_id, epoch=epoch, position=sample_id)

        return self._maker.batch(*self._replacements.load(positions, pair, self.shards.origin))

    def where(self, sample_id: int) -> str:
        index, row = self.shards.locate(sample_id)
        return f"sample {row} of {index.path}"


def text_key(sample: ShardSample, text: str, config: DataConfig) -> int:
    """Content key of a caption: of the field data.text_key, which several texts may share, or of the text itself."""
    meaning = text if config.text_key is None else str(sample.field(config.text_key))
    return content_key(meaning.encode())


# Evaluation -----------------------------------------------------------------------------------------------------------


class Items(Protocol):
    """Inputs of a tower, such as pictures or tokens, by position. Loader processes read them."""

    def __len__(self) -> int: ...

    def block(self, start: int, stop: int) -> Tensor:
        """Inputs of items [start, stop): uint8 (k, 3, S, S) or int64 (k, L)."""
        ...


@dataclass(frozen=True)
class Pictures:
    """The pictures of all samples of some shards, by sample id, as tower inputs without augmentation."""

    shards: Shards
    spec: ImageSpec
    config: DataConfig

    def __len__(self) -> int:
        return len(self.shards)

    def block(self, start: int, stop: int) -> Tensor:
        decoded = (self.decoded(i) for i in range(start, min(stop, len(self))))
        return torch.stack([evaluation_transform(picture, self.spec).contiguous() for picture in decoded])

    def decoded(self, i: int) -> Tensor:
        """Picture i in its own size, uint8 (3, H, W)."""
        return ShardSample.read(self.shards, i).decoded(self.config.image_key, self.config.max_image_pixels)

    def key(self, i: int) -> str:
        """The key of sample i in its shard."""
        return self.shards.key(i)


@dataclass(frozen=True)
class Captions:
    """Texts as tower inputs. A block is tokenised when it is read."""

    texts: Sequence[str]
    tokenize: Tokenize

    def __len__(self) -> int:
        return len(self.texts)

    def block(self, start: int, stop: int) -> Tensor:
        return self.tokenize(list(self.texts[start:stop]))


@dataclass(frozen=True)
class RetrievalSet:
    """N pictures and their M captions.

    owner (M,): row of each caption's picture, ascending; image_keys (N,), text_keys (M,): content ids; all int64.
    """

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
    """The retrieval set of all samples, with all their captions under the first name in data.captions.

    Raises SampleError for a sample that cannot be used.
    """
    texts: list[str] = []
    owner, image_keys, text_keys = [], [], []
    for number in range(len(shards)):
        sample = ShardSample.read(shards, number)
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
    """All pictures with their class. label: a json field, or "cls" for the number in the cls member."""
    labels = [ShardSample.read(shards, i).label(label) for i in range(len(shards))]
    return LabelledSet(Pictures(shards, image_spec(spec, config), config), labels)

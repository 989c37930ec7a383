"""Images that are wrong for a caption: members of its sample, such as a.negative.jpg beside a.jpg, or images of
other samples that `python -m eval.mine mine=pictures` found, named by their content keys.

They are drawn, cropped and augmented by random numbers of the row that draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import DataError, SampleError
from dyad.data.base.progress import tracked
from dyad.data.batch import ExtraX, Noise
from dyad.data.config import DataConfig, NegativeList
from dyad.data.image_text.negatives import FORMAT, Mined, place_of, sorted_table
from dyad.data.image_text.noise import Cropped, stacked
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import DRAWS, ImageSpec, training_size
from dyad.data.loading.negatives import distinct, sample
from dyad.data.shards.content_keys import Int64s, content_key, key_name, key_of_name
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.shards import Shards

Drawn = Sequence[tuple[Cropped, int]]  # images before noise, with their content keys


class WrongImage(NamedTuple):
    """An image that is wrong for a caption: its content key, and what decodes it, uint8 (3, H, W)."""

    key: int
    decoded: Callable[[], Tensor]


class MinedImages(Mined):
    """The mined images of each caption. They are images of the training data."""

    key = "data.negatives.picture_file"
    line = '{"query_id": content key of a caption, "negatives": [content keys of images]}'

    def __init__(self, path: str, shards: Shards, config: DataConfig) -> None:
        """Open the file `path` of mined images of `shards`. Errors as of Mined.

        The first call for some shards reads all of their images to find them by their content, and stores where they
        are.
        """
        super().__init__(path)
        self._shards, self._config = shards, config
        first, *others = [index.path for index in shards.indexes]
        made_of = [FORMAT, shards.fingerprint, config.image_key]
        self._samples = cached_array([first], "pictures", others, made_of, lambda: _samples_by_key(shards, config))

    @staticmethod
    def is_negative(value: object) -> bool:
        return key_of_name(value) is not None

    def images(self, text: str) -> list[WrongImage]:
        """Return the mined images of a caption, best ranked first; none if it has no line."""
        keys = (key_of_name(name) or 0 for name in self.negatives(content_key(text.encode())))
        return [WrongImage(key, partial(self._decoded, key)) for key in keys]

    def _decoded(self, key: int) -> Tensor:
        """Decode the image with this content key. Raises DataError where no sample of the data has it."""
        if (sample_id := place_of(key, self._samples)) is None:
            problem = f"{self.key}={self.path}: no sample of data.train has its image {key_name(key)}"
            raise DataError(f"{problem}. Mine these data: python -m eval.mine run=… mine=pictures")
        found = ShardSample.read(self._shards, sample_id)
        return found.decoded(self._config.image_key, self._config.max_image_pixels)


@dataclass(frozen=True)
class WrongImages:
    """Draws the images that are wrong for the caption of a row, and makes them further items of a batch."""

    spec: ImageSpec
    config: DataConfig
    mined: MinedImages | None

    @property
    def draws(self) -> int:
        """How many random numbers a row takes: one to choose each image, and DRAWS for its augmentation."""
        return self.config.negatives.pictures * (1 + DRAWS)

    def drawn(self, own: ShardSample, text: str, x_key: int, draws: np.ndarray) -> Drawn:
        """Draw images that are wrong for the caption `text` of a sample, at most data.negatives.pictures.

        x_key: content key of the sample's own image, which is never drawn; no other is drawn twice. draws: random
        numbers in [0, 1). Raises SampleError for an image that cannot be decoded.
        """
        which, of_images = np.split(draws, [self.config.negatives.pictures])
        size = partial(training_size, spec=self.spec, augment=self.config.augment)
        each = zip(self._chosen(own, text, x_key, which), of_images.reshape(-1, DRAWS), strict=False)
        return tuple(((size(image.decoded(), draws=crop), crop), image.key) for image, crop in each)

    def any_for(self, own: ShardSample, texts: Iterable[str], x_key: int) -> bool:
        """Whether a caption in `texts` of a sample has wrong images, or was mined, with what result ever. One image
        is decoded. Errors as of `drawn`."""
        for text in texts:
            for image in self._chosen(own, text, x_key, np.zeros(1)):
                image.decoded()
                return True
            if self.mined and content_key(text.encode()) in self.mined:
                return True
        return False

    def extra(self, x: Tensor, noise: Noise, drawn: Sequence[Drawn]) -> ExtraX:
        """Return the wrong images of all rows of a batch as its further items. x, noise: of the batch."""
        row = torch.tensor([row for row, own in enumerate(drawn) for _ in own], dtype=torch.int64)
        keys = torch.tensor([key for own in drawn for _, key in own], dtype=torch.int64)
        if not len(row):
            return ExtraX(x[:0], row, keys, noise[row])
        more, more_noise = stacked((cropped for own in drawn for cropped, _ in own), self.config.augment)
        return ExtraX(more, row, keys, more_noise)

    def _chosen(self, own: ShardSample, text: str, x_key: int, draws: np.ndarray) -> Iterable[WrongImage]:
        """Draw at most one image for each random number, from the first list in data.negatives.lists that has any."""
        if not len(draws):
            return ()
        names, most = self.config.negatives.picture_fields, self.config.max_image_pixels
        lists = {
            NegativeList.hard_negatives: lambda: [
                WrongImage(content_key(own.members[name]), partial(own.decoded, name, most))
                for name in names
                if name in own.members
            ],
            NegativeList.mined: lambda: self.mined.images(text) if self.mined else [],
        }
        found = next((f for name in self.config.negatives.lists if name in lists and (f := lists[name]())), ())
        return (found[i] for i in sample(distinct([image.key for image in found], {x_key}), draws))


def _samples_by_key(shards: Shards, config: DataConfig) -> Int64s:
    """Return the content keys of all images, ascending, and the first sample of each, (2, n). Reads all samples."""
    found: dict[int, int] = {}
    for i in tracked(range(len(shards)), "Content keys of images", len(shards)):
        try:
            found.setdefault(content_key(ShardSample.read(shards, i).image(config.image_key)), i)
        except SampleError:  # training replaces it
            continue
    return sorted_table(found)

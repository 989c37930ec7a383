"""Hard negative images of captions (images that do not match a caption): members of the caption's sample, such as
a.negative.jpg beside a.jpg, or images of other samples that `python -m eval.mine` (mine=pictures) found.

The random numbers of the caption's row in the batch decide which are drawn, and how they are cropped and augmented.
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
from dyad.data.image_text.transforms import DRAWS, ImageSpec, crop_and_resize
from dyad.data.loading.negatives import draw_entries, first_indices
from dyad.data.shards.content_keys import Int64s, content_key, key_name, key_of_name
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.shards import Shards

Drawn = Sequence[tuple[Cropped, int]]  # (image before noise with its random numbers, content key) of each drawn image


class WrongImage(NamedTuple):
    """An image that does not match a caption. key: content key of the image. decoded(): returns the image decoded,
    uint8 (3, H, W); raises SampleError if it cannot be decoded, and DataError for a mined image that is in no sample of
    data.train."""

    key: int
    decoded: Callable[[], Tensor]


class MinedImages(Mined):
    """A file of mined images for captions: hard negative images of each caption, which must be in the training data."""

    key = "data.negatives.picture_file"
    line = '{"query_id": content key of a caption, "negatives": [content keys of images]}'

    def __init__(self, path: str, shards: Shards, config: DataConfig) -> None:
        """Open the file `path` of mined images, which lie in `shards`. config: gives the keys by which they are read.

        The first call for given shards reads all of their images, shows its progress, and stores the content key of
        each in a cache file. Raises ConfigError when the file is missing, and DataError when a line is malformed or
        repeats a caption.
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
        """Return the mined images of the caption `text`, best ranked first. Each is decoded only by its method
        `decoded`. The list is empty if the file has no line for this caption."""
        keys = (key_of_name(name) or 0 for name in self.negatives(content_key(text.encode())))
        return [WrongImage(key, partial(self._decoded, key)) for key in keys]

    def _decoded(self, key: int) -> Tensor:
        """Decode the image with this content key, uint8 (3, H, W). Raises DataError if no sample has this image, and
        SampleError if it cannot be decoded."""
        if (sample_id := place_of(key, self._samples)) is None:
            problem = f"{self.key}={self.path}: no sample of data.train has its image {key_name(key)}"
            raise DataError(f"{problem}. Mine these data: python -m eval.mine run=… mine=pictures")
        found = ShardSample.read(self._shards, sample_id)
        return found.decoded(self._config.image_key, self._config.max_image_pixels)


@dataclass(frozen=True)
class WrongImages:
    """Draws hard negative images for the caption of a row, and puts those of all rows into a batch. spec: preprocessing
    of the image tower. mined: the file of mined images; None: there is none."""

    spec: ImageSpec
    config: DataConfig
    mined: MinedImages | None

    @property
    def draws(self) -> int:
        """The number of random numbers that a row takes: for each image, one to choose it, and DRAWS to augment it."""
        return self.config.negatives.pictures * (1 + DRAWS)

    def drawn(self, own: ShardSample, text: str, x_key: int, draws: np.ndarray) -> Drawn:
        """Draw hard negative images for the caption `text` of the sample `own`, at most data.negatives.pictures.

        Each is cropped and resized to the input of the tower; its noise is still to be added. The result is () if there
        are no candidates. x_key: content key of the sample's own image, which is never drawn. No image is drawn twice.
        draws: as many random numbers in [0, 1) as the property `draws` says. Raises SampleError for an image that
        cannot be decoded, and DataError for a mined image that is in no sample of data.train.
        """
        which, of_images = np.split(draws, [self.config.negatives.pictures])
        size = partial(crop_and_resize, spec=self.spec, augment=self.config.augment)
        each = zip(self._chosen(own, text, x_key, which), of_images.reshape(-1, DRAWS), strict=False)
        return tuple(((size(image.decoded(), draws=crop), crop), image.key) for image, crop in each)

    def any_for(self, own: ShardSample, texts: Iterable[str], x_key: int) -> bool:
        """Whether one of the captions `texts` of the sample `own` has hard negative images or a line in the mined file.

        The line may be empty. The first image that is found is decoded: SampleError is raised if this fails, and
        DataError for a mined image that is in no sample of data.train. x_key: content key of the sample's own image,
        which does not count.
        """
        for text in texts:
            for image in self._chosen(own, text, x_key, np.zeros(1)):
                image.decoded()
                return True
            if self.mined and content_key(text.encode()) in self.mined:
                return True
        return False

    def extra(self, x: Tensor, noise: Noise, drawn: Sequence[Drawn]) -> ExtraX:
        """Return the hard negative images of all rows of a batch in the form of Batch.extra_x. x, noise: Batch.x and
        Batch.x_noise. drawn: the images of each row."""
        row = torch.tensor([row for row, own in enumerate(drawn) for _ in own], dtype=torch.int64)
        keys = torch.tensor([key for own in drawn for _, key in own], dtype=torch.int64)
        if not len(row):
            return ExtraX(x[:0], row, keys, noise[row])
        more, more_noise = stacked((cropped for own in drawn for cropped, _ in own), self.config.augment)
        return ExtraX(more, row, keys, more_noise)

    def _chosen(self, own: ShardSample, text: str, x_key: int, draws: np.ndarray) -> Iterable[WrongImage]:
        """Draw hard negative images of the caption `text`, at most one for each number in `draws`; do not decode them.

        All are from the first list in data.negatives.lists that has any. Arguments as of `drawn`.
        """
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
        return (found[i] for i in draw_entries(first_indices([image.key for image in found], {x_key}), draws))


def _samples_by_key(shards: Shards, config: DataConfig) -> Int64s:
    """Read all samples and return the id of the first sample with each image, by content key, as int64 (2, n).

    Row 0 has the content keys of the n different images, ascending; row 1 the ids. Samples without an image, and those
    whose bytes are damaged, are left out.
    """
    found: dict[int, int] = {}
    for i in tracked(range(len(shards)), "Content keys of images", len(shards)):
        try:
            found.setdefault(content_key(ShardSample.read(shards, i).image(config.image_key)), i)
        except SampleError:  # training replaces it
            continue
    return sorted_table(found)

"""Data set for task=views: two views of one image as a training pair, the image augmented twice.

The view x is augmented as data.augment says, the view y as data.augment with the changes of data.augment_y. The random
numbers depend only on the seed, the epoch, the sample id and the view. Both views have the content key of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dyad.data.batch import Batch
from dyad.data.config import BadSamples, DataConfig
from dyad.data.image_text import transforms
from dyad.data.image_text.dataset import image_spec
from dyad.data.image_text.items import Images, RetrievalSet
from dyad.data.image_text.noise import Cropped, stacked
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.loading.sample_rng import uniforms
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards


class ImageViews:
    """The training data set of two views of each image. A batch depends only on the seed, its positions (epoch,
    sample id) and the shards."""

    def __init__(self, shards: Shards, spec: ImageSpec, config: DataConfig, seed: int) -> None:
        """Set up the data set, and check its first samples until one is usable: at most data.bad_in_a_row, at least
        one.

        spec: preprocessing of the image tower (encoder); data.resize replaces its resize mode. seed: the seed of the
        run. Raises SampleError when all checked samples are unusable.
        """
        self.shards, self.config, self.seed = shards, config, seed
        self.spec, self.augments = image_spec(spec, config), config.augments
        self._replacements = Replacements(shards.sizes, seed, config.bad_in_a_row_limit)
        check_any(range(min(len(shards), max(config.bad_in_a_row_limit, 1))), lambda i: self._cropped(0, i))

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of the samples at the given b positions, each a pair (epoch, sample id): x, y uint8 (b, 3,
        S, S), S the side of the tower's input in pixels. Their noise is still to be added.

        Bad (unusable) samples are replaced by others. Raises DataError, naming the shard, when a shard cannot be read,
        and when a sample and its replacements, data.bad_in_a_row samples in all, are bad. With data.bad_samples=stop
        no sample is replaced: the first bad one raises SampleError.
        """
        cropped, bad = self._replacements.load(positions, self._cropped, self.shards.origin)
        ids, keys, *views = zip(*cropped, strict=True)
        (x, x_noise), (y, y_noise) = map(stacked, views, self.augments)
        ids, keys = torch.tensor(ids), torch.tensor(keys)
        return Batch(x, y, ids, keys, keys.clone(), bad=bad, x_noise=x_noise, y_noise=y_noise)

    def where(self, sample_id: int) -> str:
        """Return the location of a sample as text for messages: its row and its shard or table."""
        index, row = self.shards.locate(sample_id)
        return f"sample {row} of {index.path}"

    def _cropped(self, epoch: int, sample_id: int) -> tuple[int, int, Cropped, Cropped]:
        """Return (sample id, content key of the image, view x, view y). The views are cropped and resized; their noise
        is still to be added."""
        sample, config = ShardSample.read(self.shards, sample_id), self.config
        image = sample.decoded(config.image_key, config.max_image_pixels)
        x, y = (self.cropped(image, epoch, sample_id, view) for view in range(2))
        return sample_id, content_key(sample.image(config.image_key)), x, y

    def cropped(self, image: Tensor, epoch: int, sample_id: int, view: int) -> Cropped:
        """Return one view of the decoded image `image`, uint8 (3, H, W): the image cropped and resized to uint8 (3, S,
        S), and the random numbers in [0, 1) of its augmentation, float64 (DRAWS,). Its noise is still to be added.
        view: 0 for x, 1 for y."""
        draws = uniforms(self.seed, epoch, sample_id, 2 * transforms.DRAWS).reshape(2, -1)[view]
        return transforms.crop_and_resize(image, self.spec, self.augments[view], draws), draws


@dataclass(frozen=True)
class ViewItems(Images):
    """One view of each of N images as inputs of a tower (encoder), fully augmented by the random numbers of epoch 0.

    views: makes the views. view: which view `block` returns, 0 for x, 1 for y.
    """

    views: ImageViews
    view: int

    def block(self, start: int, stop: int) -> Tensor:
        """Return the views of the k images start … stop - 1, uint8 (k, 3, S, S), S the side of the tower's input."""
        images = ((i, Images.decoded(self, i)) for i in range(start, min(stop, len(self))))
        cropped = (self.views.cropped(image, 0, i, self.view) for i, image in images)
        views, noise = stacked(cropped, self.views.augments[self.view])
        return noise.added(views)

    def decoded(self, i: int) -> Tensor:
        """Return a view to display, uint8 (3, S, S): view x of image i for i < N, view y of image i - N for i ≥ N."""
        return replace(self, view=i // len(self)).block(i % len(self), i % len(self) + 1)[0]


def view_pairs(shards: Shards, spec: ImageSpec, config: DataConfig, seed: int) -> RetrievalSet:
    """Build the set on which retrieval of the other view of an image is evaluated: two views of each image in `shards`.

    Views x are its `images`, and views y its `texts` (ViewItems in place of Captions). Arguments as of `ImageViews`.
    data.bad_samples counts as "stop": no image is replaced. Raises SampleError when a sample has no image, or the first
    image cannot be decoded. The other images are decoded only when a block is read.
    """
    views = ImageViews(shards, spec, replace(config, bad_samples=BadSamples.stop), seed)
    images = (ShardSample.read(shards, i).image(config.image_key) for i in range(len(shards)))
    keys = np.array([content_key(image) for image in images], dtype=np.int64)
    x, y = (ViewItems(shards, views.spec, config, views, view) for view in range(2))
    return RetrievalSet(x, cast(Any, y), np.arange(len(keys)), keys, keys)

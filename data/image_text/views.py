"""Two views of one picture as a training pair: the picture, augmented twice.

The view x is augmented as data.augment says, the view y as data.augment_y, each by random numbers of its own, which
depend only on the seed, the epoch, the sample id and the view. Pictures of equal content have equal keys on both sides.
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
from dyad.data.image_text.dataset import RetrievalSet, image_spec
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards


class PictureViews:
    """The training data set of two views of each picture. A batch depends only on the seed, its positions (epoch,
    sample id) and the shards."""

    def __init__(self, shards: Shards, spec: ImageSpec, config: DataConfig, seed: int) -> None:
        """Set up the data set and check its first samples.

        spec: preprocessing of the picture tower (encoder). seed: the seed of the run. Raises SampleError when all
        checked samples are unusable.
        """
        self.shards, self.spec, self.config, self.seed = shards, image_spec(spec, config), config, seed
        self._replacements = Replacements(shards.sizes, seed, config.tolerated)
        check_any(range(min(len(shards), max(config.tolerated, 1))), lambda i: self._cropped(0, i))

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of the samples at the given positions, each a pair (epoch, sample id): x, y uint8 (b, 3, S,
        S).

        Bad (unusable) samples are replaced by others, unless data.bad_samples=stop. Raises DataError, naming the shard,
        when a shard cannot be read, and after too many consecutive bad samples.
        """
        cropped, bad = self._replacements.load(positions, self._cropped, self.shards.origin)
        ids, keys, views, draws = zip(*cropped, strict=True)
        noise = np.stack(draws)[:, :, transforms.CROP_DRAWS :]
        x, y = (
            transforms.add_noise(torch.stack([each[view] for each in views]), augment, noise[:, view])
            for view, augment in enumerate(self.config.augments)
        )
        return Batch(x, y, torch.tensor(ids), torch.tensor(keys), torch.tensor(keys), bad=bad)

    def where(self, sample_id: int) -> str:
        index, row = self.shards.locate(sample_id)
        return f"sample {row} of {index.path}"

    def _cropped(self, epoch: int, sample_id: int) -> tuple[int, int, list[Tensor], np.ndarray]:
        """Return the sample id, the content key of its picture, its two views before noise, each uint8 (3, S, S), and
        random numbers in [0, 1) for each view (2, DRAWS)."""
        sample, image_key = ShardSample.read(self.shards, sample_id), self.config.image_key
        picture = sample.decoded(image_key, self.config.max_image_pixels)
        draws = transforms.uniforms(self.seed, epoch, sample_id, 2 * transforms.DRAWS).reshape(2, transforms.DRAWS)
        each_view = zip(self.config.augments, draws, strict=True)
        views = [transforms.training_size(picture, self.spec, augment, own) for augment, own in each_view]
        return sample_id, content_key(sample.picture(image_key)), views, draws


@dataclass(frozen=True)
class ViewItems:
    """One view of each of N pictures as inputs of a tower (encoder), with the random numbers of epoch 0.

    view: 0 for x, 1 for y. As pictures to look at, 0 … N - 1 are the views x and N … 2 N - 1 the views y.
    """

    data: PictureViews
    view: int

    def __len__(self) -> int:
        return len(self.data.shards)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the views of pictures start … stop - 1, uint8 (k, 3, S, S)."""
        batch = self.data.__getitems__([(0, i) for i in range(start, min(stop, len(self)))])
        return (batch.x, batch.y)[self.view]

    def decoded(self, i: int) -> Tensor:
        """Return picture i to look at, uint8 (3, S, S)."""
        return replace(self, view=i // len(self)).block(i % len(self), i % len(self) + 1)[0]

    def key(self, i: int) -> str:
        """Return the key of picture i, its name in the shard."""
        return self.data.shards.key(i)


def view_pairs(shards: Shards, spec: ImageSpec, config: DataConfig, seed: int) -> RetrievalSet:
    """Build the set on which retrieval of the other view is evaluated: two views of all pictures in `shards`, x in the
    place of the pictures and y in that of the texts.

    Arguments as of `PictureViews`. Raises SampleError for a picture that cannot be used.
    """
    data = PictureViews(shards, spec, replace(config, bad_samples=BadSamples.stop), seed)
    pictures = (ShardSample.read(shards, i).picture(config.image_key) for i in range(len(shards)))
    keys = np.array([content_key(picture) for picture in pictures], dtype=np.int64)
    x, y = (cast(Any, ViewItems(data, view)) for view in range(2))
    return RetrievalSet(x, y, np.arange(len(keys)), keys, keys)

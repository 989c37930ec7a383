"""Lists of items to encode (images, captions), and the sets of items on which models are evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from dyad.data.config import DataConfig
from dyad.data.image_text import transforms
from dyad.data.image_text.dataset import Tokenize, image_spec, text_key
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.data.shards.shards import Shards


class Items(Protocol):
    """A list of inputs of a tower (encoder), such as images or tokens of texts, which loader processes read.

    block: returns the inputs of the k items at positions start … stop - 1. Images: uint8 (k, 3, S, S), S their side in
    pixels. Captions: tokens, int64 (k, L), L the number of tokens of a row, padding included. If `stop` is more than
    the number of items, the block ends with the last item.
    """

    def __len__(self) -> int: ...

    def block(self, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Images:
    """The images of all samples in shards as inputs of a tower (encoder), without augmentation. The position of an
    image is its sample id. spec: the tower's preprocessing."""

    shards: Shards
    spec: ImageSpec
    config: DataConfig

    def __len__(self) -> int:
        return len(self.shards)

    def block(self, start: int, stop: int) -> Tensor:
        return transforms.evaluation_batch(map(self.decoded, range(start, min(stop, len(self)))), self.spec)

    def decoded(self, i: int) -> Tensor:
        """Return the decoded image of sample i in its own height H and width W, uint8 (3, H, W). Raises SampleError for
        an image that is missing or cannot be decoded."""
        return ShardSample.read(self.shards, i).decoded(self.config.image_key, self.config.max_image_pixels)

    def key(self, i: int) -> str:
        """Return the key of sample i as text: its name in a tar shard or a folder of images, its row in a table."""
        return self.shards.origin(i)[1]

    def chosen(self, rows: Sequence[int] | Int64s) -> "ChosenImages":
        """Return the images at the positions `rows` as a list of inputs of its own."""
        return ChosenImages(self.shards, self.spec, self.config, rows)


@dataclass(frozen=True)
class ChosenImages(Images):
    """Some of the images of shards: image i of this object is the image with the sample id rows[i]."""

    rows: Sequence[int] | Int64s

    def __len__(self) -> int:
        return len(self.rows)

    def decoded(self, i: int) -> Tensor:
        return super().decoded(int(self.rows[i]))

    def key(self, i: int) -> str:
        return super().key(int(self.rows[i]))


@runtime_checkable
class ReadableItems(Items, Protocol):
    """Items with a readable form. name(i): a short name of item i, such as "row 3". text(i): its text. sort: the word
    for one item, such as "text"."""

    @property
    def sort(self) -> str: ...

    def name(self, i: int) -> str: ...

    def text(self, i: int) -> str: ...


@dataclass(frozen=True)
class Captions:
    """A list of texts as inputs of a text tower (encoder). tokenize: the tower's tokenizer, called by `block`. sort:
    the word for one item."""

    texts: Sequence[str]
    tokenize: Tokenize
    sort: str = "text"

    def name(self, i: int) -> str:
        return f"row {i + 1}"

    def text(self, i: int) -> str:
        return self.texts[i]

    def __len__(self) -> int:
        return len(self.texts)

    def block(self, start: int, stop: int) -> Tensor:
        return self.tokenize(list(self.texts[start:stop]))


@dataclass(frozen=True)
class RetrievalSet:
    """N images and their M captions, to evaluate retrieval.

    owner, int64 (M,): index of the image of each caption, ascending. image_keys (N,), text_keys (M,): content keys
    (64-bit hashes) of the images and captions, int64; those of captions as `text_key` returns them.
    """

    images: Images
    texts: Captions
    owner: np.ndarray
    image_keys: np.ndarray
    text_keys: np.ndarray


@dataclass(frozen=True)
class LabelledSet:
    """N images, texts or sequences and the class label of each. keys (N,) int64: content keys (64-bit hashes) of the
    items."""

    items: Images | ReadableItems
    labels: Sequence[str]
    keys: np.ndarray


def retrieval_set(shards: Shards, spec: ImageSpec, tokenize: Tokenize, config: DataConfig) -> RetrievalSet:
    """Build the set on which image-text retrieval is evaluated: all images, and the captions under the first
    data.captions name.

    spec: preprocessing of the image tower (encoder); data.resize replaces its resize mode. tokenize: the tokenizer of
    the text tower. All samples are read now, and captions kept in memory; images are decoded only when a block is read.
    Raises SampleError for a sample that has no image, no usable captions or, if data.text_key is set, no such field.
    """
    texts: list[str] = []
    owner, image_keys, text_keys = [], [], []
    for number in range(len(shards)):
        sample = ShardSample.read(shards, number)
        image_keys.append(content_key(sample.image(config.image_key)))
        for text in sample.captions(config.captions[0], config.caption_per):
            texts.append(text)
            owner.append(number)
            text_keys.append(text_key(sample, text, config))
    columns = (np.array(column, dtype=np.int64) for column in (owner, image_keys, text_keys))
    return RetrievalSet(Images(shards, image_spec(spec, config), config), Captions(texts, tokenize), *columns)


def labelled_set(shards: Shards, spec: ImageSpec, config: DataConfig, label: str) -> LabelledSet:
    """Return all images in shards with their class labels. spec: preprocessing of the image tower; data.resize replaces
    its resize mode. label: where the class label is, in the form that `ShardSample.label` takes: the name of a json
    field, "cls" for the number in the cls member, or "txt" for the txt member.

    All samples are read now; images are decoded only when a block is read. Raises SampleError for a sample without a
    label or an image.
    """
    samples = (ShardSample.read(shards, i) for i in range(len(shards)))
    found = [(sample.label(label), content_key(sample.image(config.image_key))) for sample in samples]
    images, keys = Images(shards, image_spec(spec, config), config), np.array([key for _, key in found], np.int64)
    return LabelledSet(images, [name for name, _ in found], keys)

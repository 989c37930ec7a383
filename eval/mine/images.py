"""Images and the captions that training may draw, as queries and items of mining.

The hard negatives are captions that are wrong for an image, or images that are wrong for a caption.

Shape letters: n distinct images; m distinct captions; C columns of the table that `write_captions` writes.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import DataError, SampleError
from dyad.data.base.files import whole_file
from dyad.data.base.progress import tracked
from dyad.data.config import DataConfig
from dyad.data.image_text.dataset import Tokenize, caption_draws, text_key
from dyad.data.image_text.in_memory import GivenImages
from dyad.data.image_text.items import Images
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import evaluation_batch
from dyad.data.question_passage.corpus import Corpus, open_corpus
from dyad.data.shards.content_keys import Int64s, content_key, key_name
from dyad.data.shards.shards import Shards
from dyad.eval.encode.embeddings import WINDOW
from dyad.eval.encode.encoder import Encoder
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.mine.mining import LabelledQuery, Side, grouped

CAPTIONS, TABLE = "captions.jsonl", "pictures.npy"
SAMPLE, IMAGE, MEANING, CAPTION = range(4)  # rows of the table
BLACK = torch.zeros(3, 1, 1, dtype=torch.uint8)
ENOUGH = 10_000  # images like a black one that can be decoded, after which the search for others ends
SAME = 0.05  # relative distance of embeddings of equal images: bf16 rounds them by the batch that they are in


def write_captions(shards: Shards, config: DataConfig, folder: Path) -> None:
    """Write the distinct captions from which training draws, and a table of their pairs with samples, into `folder`.

    The m captions go to captions.jsonl, one a line, the table to pictures.npy, int64 (4, C). `folder` must exist; only
    one process may call it.

    A column of the table is a pair of a sample and one of its captions. Its rows: the sample id; the content key of the
    sample's image; the key of the caption's meaning (data.text_key); the caption's line in captions.jsonl, from 0.
    Captions with weight 0 are never drawn in training. A meaning that only such captions of a sample have gets one
    column with the line −1, because captions with this meaning must not be negatives of the sample's image.

    Reads all samples. A sample whose image is missing, or whose captions of another weight than 0 cannot be used, has
    no column, because training replaces it; images are not decoded. Raises DataError if no sample can be used.
    """
    lines: dict[int, int] = {}
    columns, unusable = array("q"), ""
    with whole_file(folder / CAPTIONS) as file:
        for i in tracked(range(len(shards)), "Captions", len(shards)):
            try:
                sample = ShardSample.read(shards, i)
                image = content_key(sample.image(config.image_key))
                drawn = [(meaning, text) for meaning, _, text in caption_draws(sample, config)]
                meanings = set[int]()
                for name in config.captions:
                    with suppress(SampleError):  # under a name of weight 0; training takes the sample without them
                        own = sample.captions(name, config.caption_per)
                        meanings |= {text_key(sample, text, config) for text in own}
                for meaning, text in drawn:
                    key = content_key(text.encode())
                    if key not in lines:
                        lines[key] = len(lines)
                        row = {"_id": key_name(key), "text": text}
                        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    columns.extend((i, image, meaning, lines[key]))
                for meaning in sorted(meanings.difference(meaning for meaning, _ in drawn)):
                    columns.extend((i, image, meaning, -1))
            except SampleError as error:
                unusable = unusable or f" The first: {error}"
        if not lines:
            raise DataError(f"queries={config.train}: none of {len(shards):,} samples can be used.{unusable}")
    with whole_file(folder / TABLE) as file:
        np.save(file, np.frombuffer(columns, np.int64).reshape(-1, 4).T, allow_pickle=False)


@dataclass(frozen=True)
class ImageInputs:
    """The images of some samples as inputs of a tower (SizedItems). Can be pickled. samples: the sample ids, (n,).

    An image that cannot be decoded is replaced by a black one. Negatives mined for it as a query are never used, since
    training replaces its sample by another. As an item, it is left out (`undecodable`).
    """

    images: Images
    samples: Int64s

    @property
    def lengths(self) -> Int64s:
        return np.zeros(len(self), np.int64)  # all take equal time

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, rows: Sequence[int]) -> Tensor:
        decoded = map(self._decoded, rows)
        return evaluation_batch((BLACK if image is None else image for image in decoded), self.images.spec)

    def undecodable(self, encode: Encoder, embeddings_nD: np.ndarray) -> Int64s:
        """Return the indices of the images that cannot be decoded. All processes must call it together.

        embeddings_nD: the embeddings of the images by `encode`, (n, D). Only images with about the embedding of a black
        one are decoded, and no more of them once ENOUGH could be: a tower that has collapsed embeds all images alike.
        """
        black_D = encode("x", GivenImages([BLACK], self.images.spec, max_pixels=1))[0]
        most = SAME * np.linalg.norm(black_D)
        found, near = list[int](), 0
        for start in range(0, len(self), WINDOW):
            far = np.linalg.norm(embeddings_nD[start : start + WINDOW].astype(np.float32) - black_D, axis=1)
            like_black = (start + np.flatnonzero(far <= most)).tolist()
            found += (i for i in like_black if self._decoded(i) is None)
            near += len(like_black)
            if near - len(found) > ENOUGH:
                break
        return np.array(found, np.int64)

    def _decoded(self, row: int) -> Tensor | None:
        try:
            return self.images.decoded(int(self.samples[row]))
        except SampleError:
            return None


@dataclass(frozen=True)
class CaptionInputs:
    """Captions as inputs of a tower (SizedItems), read and tokenized on request. Can be pickled."""

    captions: Corpus
    tokenize: Tokenize

    @property
    def lengths(self) -> Int64s:
        return self.captions.lengths

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, rows: Sequence[int]) -> Tensor:
        return self.tokenize([self.captions[i].text for i in rows])


class ImagesAndCaptions:
    """MiningData whose queries are the n distinct images of samples and whose items are their m distinct captions."""

    names: ClassVar[tuple[str, str]] = ("pictures", "captions")

    def __init__(self, images: Images, tokenize: Tokenize, folder: Path) -> None:
        """Open the files that `write_captions` wrote into `folder`.

        images: the images of all samples, by sample id. tokenize: the tokenizer of the model.
        """
        self._images, self._tokenize = images, tokenize
        self._captions = open_corpus(str(folder / CAPTIONS), "out")
        self._table = map_array(folder / TABLE, folder)
        order, ends = grouped(self._table[IMAGE])
        self._first_n = order[ends[:-1]]  # column of the table
        self._row_C = np.empty_like(order)
        self._row_C[order] = np.repeat(np.arange(len(self._first_n)), np.diff(ends))
        self._keys_n: Int64s = self._table[IMAGE, self._first_n]

    @property
    def row_keys(self) -> Int64s:
        return self._keys_n

    @property
    def item_keys(self) -> Int64s:
        return self._captions.keys

    def sides(self) -> tuple[Side, Side]:
        return self._side_of_images, self._side_of_captions

    @cached_property
    def _side_of_images(self) -> Side:
        def ids(start: int, stop: int) -> list[str]:
            return [key_name(int(key)) for key in self._keys_n[start:stop]]

        digest = hashlib.sha256(self._keys_n.tobytes()).hexdigest()
        images = ImageInputs(self._images, self._table[SAMPLE, self._first_n])
        read_as = f"{self._images.spec}, {self._images.config.max_image_pixels}"
        return Side("x", images, ids, digest, read_as, images.undecodable)

    @cached_property
    def _side_of_captions(self) -> Side:
        captions = CaptionInputs(self._captions, self._tokenize)
        return Side("y", captions, self._captions.ids, self._captions.fingerprint, "")

    def item(self, position: int) -> tuple[str, str]:
        text = self._captions[position].text
        return text, text

    def labelled(self, groups: Sequence[list[int]], queries_bD: np.ndarray) -> list[LabelledQuery]:
        """Return b queries with the indices of their right items.

        An image and a caption are right for each other if the meaning of the caption (data.text_key) is that of a
        caption of the image. groups: for each query a list with its one row. queries_bD: embeddings of the queries, (b,
        D).
        """
        none, names = np.empty(0, np.int64), self.sides()[0].ids
        return [
            LabelledQuery(names(row, row + 1)[0], (), none, self._right.pairs(row, row + 1)[1], query_D)
            for (row,), query_D in zip(groups, queries_bD, strict=True)
        ]

    @cached_property
    def _right(self) -> Matches:
        return Matches(*self._meanings())

    def _meanings(self) -> tuple[Labels, Labels]:
        """Return (the labels of the queries, the labels of the items), by which Matches finds right pairs.

        A label is a meaning, a key of data.text_key: an image has the meanings of its captions, a caption its own
        meanings.
        """
        meaning_C, caption_C = self._table[MEANING], self._table[CAPTION]
        drawn = caption_C >= 0
        return (
            Labels.of((self._row_C, meaning_C), size=len(self._keys_n)),
            Labels.of((caption_C[drawn], meaning_C[drawn]), size=len(self._captions)),
        )


class CaptionsAndImages(ImagesAndCaptions):
    """MiningData whose queries are the distinct captions and whose items are the distinct images (by content key)."""

    names: ClassVar[tuple[str, str]] = ("captions", "pictures")

    @property
    def row_keys(self) -> Int64s:
        return self._captions.keys

    @property
    def item_keys(self) -> Int64s:
        return self._keys_n

    def sides(self) -> tuple[Side, Side]:
        return self._side_of_captions, self._side_of_images

    def item(self, position: int) -> tuple[str, str]:
        return key_name(int(self._keys_n[position])), ""

    def _meanings(self) -> tuple[Labels, Labels]:
        images, captions = super()._meanings()
        return captions, images

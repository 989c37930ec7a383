"""The items of sequences (ids, texts, images or frames), and their conversion to inputs of a tower (encoder).

Letters in shapes: N items; k items to read; L tokens; S side of an image in pixels; F features of a frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import DataError, nearest
from dyad.data.batch import Lengths, text_lengths
from dyad.data.config import DataConfig
from dyad.data.image_text.items import Images
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.question_passage.corpus import Corpus, open_corpus
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.passages import Passage
from dyad.data.sequence.frames import Frames
from dyad.data.shards.content_keys import Int64s, content_key, json_digest
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import prepared_tables, table_options

SHOWN = 3  # ids in a message


@dataclass(frozen=True)
class NamedItems:
    """Base of N items that have ids and are read by their numbers 0 … N − 1. names: their ids."""

    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def shown(self, number: int) -> str:
        """Return a readable text for an item: its text if it has one, else its id."""
        return self.names[number]


@dataclass(frozen=True)
class ItemNumbers(NamedItems):
    """Items that have ids only. The tower input of an item is its number, its index in `names`: int64 (k,).
    fingerprint: a hash of the content of the items, "" as they have none beside their ids."""

    fingerprint: str = ""

    def inputs(self, numbers_k: Int64s) -> tuple[Tensor, Lengths | None]:
        """Return the tower inputs of the items with numbers numbers_k (k,), (k, …), and the number of tokens of each.

        The latter is None if items are no texts or the tokenizer gives no lengths. Raises DataError for an item that
        cannot be read.
        """
        return torch.from_numpy(numbers_k), None


@dataclass(frozen=True)
class ItemTexts(NamedItems):
    """Items that are texts. Tower inputs are tokens, int64 (k, L). corpus: the texts by id; None: an id is the text
    itself. places (N,) int64: position of each item in the corpus; not used without a corpus."""

    corpus: Corpus | None
    places: Int64s
    tokenize: TokenizeTexts
    config: DataConfig

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint if self.corpus else ""

    def text(self, number: int) -> Passage:
        """Return an item as a Passage with the prefix data.passage.prefix. number: its index in `names`."""
        found = Passage(self.names[number]) if self.corpus is None else self.corpus[int(self.places[number])]
        return replace(found, prefix=self.config.passage.prefix)

    def shown(self, number: int) -> str:
        return self.text(number).text

    def inputs(self, numbers_k: Int64s) -> tuple[Tensor, Lengths | None]:
        found = tokens([self.text(number) for number in numbers_k.tolist()], self.tokenize, self.config.passage)
        return found, text_lengths(self.tokenize, found)


@dataclass(frozen=True)
class ItemImages(NamedItems):
    """Items that are images, without augmentation. Tower inputs are uint8 (k, 3, S, S). places (N,) int64: index in
    `images` of each item's image."""

    images: Images
    places: Int64s

    @property
    def fingerprint(self) -> str:
        return self.images.shards.fingerprint

    def inputs(self, numbers_k: Int64s) -> tuple[Tensor, Lengths | None]:
        found = [self.images.block(place, place + 1) for place in self.places[numbers_k].tolist()]
        return torch.cat(found), None


@dataclass(frozen=True)
class ItemFrames:
    """Items that are frames (feature vectors in arrays). Tower inputs are float32 (k, F). The number of an item is the
    number of its frame; `names` is empty, as frames have no ids."""

    frames: Frames

    @property
    def fingerprint(self) -> str:
        return json_digest(self.frames.digests)

    @property
    def names(self) -> Sequence[str]:
        return ()

    def __len__(self) -> int:
        return len(self.frames)

    def shown(self, number: int) -> str:
        return f"frame {number}"

    def inputs(self, numbers_k: Int64s) -> tuple[Tensor, Lengths | None]:
        return torch.from_numpy(self.frames.read(numbers_k)), None


CatalogueItems = ItemNumbers | ItemTexts | ItemImages | ItemFrames


def item_keys(names: Sequence[str]) -> Int64s:
    """Return the content key of each item, the 64-bit hash of its id, int64 (N,)."""
    return np.fromiter((content_key(name.encode()) for name in names), np.int64, len(names))


def texts_of_items(names: Sequence[str], tokenize: TokenizeTexts, config: DataConfig) -> ItemTexts:
    """Open the texts of the items with the ids `names`, in data.sequence.items; if this key is None, ids are the texts.
    Raises DataError for an id that data.sequence.items lacks and for a damaged file, ConfigError if it names no
    file."""
    if config.sequence.items is None:
        return ItemTexts(names, None, np.empty(0, np.int64), tokenize, config)
    corpus = open_corpus(config.sequence.items, "data.sequence.items")
    places = corpus.positions(names)
    _refuse_unknown([names[i] for i in np.flatnonzero(places < 0).tolist()], corpus.ids(0, 1000), config)
    return ItemTexts(names, corpus, places, tokenize, config)


def images_of_items(names: Sequence[str], spec: ImageSpec, config: DataConfig) -> ItemImages:
    """Open the images of the items with the ids `names`: samples of the shards data.sequence.items, whose keys are the
    ids.

    data.sequence.items must be set. spec: preprocessing of the image tower. Images are decoded only when inputs are
    read. Raises DataError for an id that the shards lack and for a damaged shard, ConfigError if the key names no
    shard.
    """
    tables = prepared_tables(table_options(config))
    images = Images(
        open_shards(parse_sources(config.sequence.items, "data.sequence.items", tables=tables)), spec, config
    )
    place_of = {images.key(i): i for i in range(len(images))}
    _refuse_unknown([name for name in names if name not in place_of], [*place_of], config)
    return ItemImages(names, images, np.array([place_of[name] for name in names]))


def _refuse_unknown(unknown: Sequence[str], there: Sequence[str], config: DataConfig) -> None:
    if unknown:
        shown = ", ".join(f"'{name:.40}'" for name in unknown[:SHOWN])
        raise DataError(
            f"data.sequence.items={config.sequence.items}: lacks {len(unknown):,} items of the log: {shown}."
            f"{nearest(unknown[0], there)} Its first id is '{there[0] if there else ''!s:.40}'"
        )

"""Hard negative texts of images (texts that do not match an image), and files of mined hard negatives.

The texts are in a json field of the sample (data.negatives.fields), or were mined by `python -m eval.mine`. A file of
mined negatives has a line per item: {"query_id": the item's content key in hexadecimal digits, "negatives": [best
ranked first], "scores": [...]}. Items of equal content share a line. Hard negative images:
data/image_text/wrong_images.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, NegativeList
from dyad.data.image_text.sample import MAX_LETTERS, ShardSample
from dyad.data.loading.negatives import draw_entries, first_indices, is_text, open_mined
from dyad.data.shards.content_keys import Int64s, content_key, key_of_name
from dyad.data.shards.index_cache import MemmapArray, cached_array
from dyad.data.shards.manifest import file_entries
from dyad.data.shards.rows import Rows

FORMAT = "1"


class Mined:
    """Base of files of mined negatives, in which the negatives of an item are found by its content key. Can be pickled.

    A subclass sets key and line. key: the configuration key that names the file. line: the form of its lines, for
    messages. files: entries that describe the file in the manifest of a run.
    """

    key: ClassVar[str]
    line: ClassVar[str]

    def __init__(self, path: str) -> None:
        """Open the file `path` of mined negatives. The first call reads all lines, and stores a table of their content
        keys in a cache file.

        Raises ConfigError when the file is missing, and DataError, naming the line, when a line is not of the form
        {"query_id": content key, "negatives": […]}, or repeats an item.
        """
        self._rows = rows = open_mined(path, self.key)
        self.path, self.fingerprint, self.files = path, rows.fingerprint, file_entries(rows.shards.indexes)
        kind = f"mined {self.key}"
        self._mapped = cached_array(rows.files, kind, [], [FORMAT, rows.fingerprint], lambda: self._by_key(rows))

    def negatives(self, key: int) -> Sequence[str]:
        """Return the list "negatives" in the line of an item; () if the file has no line for this item. key: content
        key of the item. The other fields of the line, such as "scores", are not read."""
        line = place_of(key, self._mapped)
        return () if line is None else self._rows.fields(line)["negatives"]

    def __contains__(self, key: int) -> bool:
        return place_of(key, self._mapped) is not None

    @staticmethod
    def is_negative(value: object) -> bool:
        """Whether `value` is valid as an entry of the list "negatives" of a line."""
        return is_text(value)

    def _by_key(self, rows: Rows) -> Int64s:
        """Return, for all n lines, the content keys of their items, ascending, and the index of each line from 0: int64
        (2, n). Raises DataError for a malformed line and for two lines of one item."""
        found = {}
        for i in range(len(rows)):
            fields = rows.fields(i)
            key, negatives = key_of_name(fields.get("query_id")), fields.get("negatives")
            if key is None or not isinstance(negatives, list) or not all(map(self.is_negative, negatives)):
                raise DataError(f"{rows.where(i)} is not {self.line}. python -m eval.mine makes such files")
            if found.setdefault(key, i) != i:
                raise DataError(f"{rows.where(i)}: its query_id is there already, {rows.where(found[key])}")
        return sorted_table(found)


class MinedTexts(Mined):
    """A file of mined texts for images: hard negative texts of each image."""

    key = "data.negatives.file"
    line = '{"query_id": content key of an image, "negatives": [texts]}'

    def texts(self, x_key: int) -> Sequence[str]:
        """Return the mined texts of an image, best ranked first, each cut to MAX_LETTERS characters. x_key: content key
        of the image. The list is empty if the file has no line for this image."""
        return [text[:MAX_LETTERS] for text in self.negatives(x_key)]


def wrong_texts(own: ShardSample, x_key: int, config: DataConfig, mined: MinedTexts | None) -> Sequence[str]:
    """Return the hard negative texts of an image, from the first list in data.negatives.lists that has any.

    own: the sample of the image. x_key: content key of the image. mined: the file of mined texts; None: there is none.
    A json field of data.negatives.fields that is missing, null or empty has no texts. The result is empty if no list
    has any. It may hold captions of the sample, which `draw_texts` leaves out. Raises SampleError if another of these
    fields is no text or list of texts, or a text is blank or no valid Unicode.
    """
    lists = {
        NegativeList.hard_negatives: lambda: [
            text for name in config.negatives.fields if own.fields.get(name) for text in own.captions(name)
        ],
        NegativeList.mined: lambda: mined.texts(x_key) if mined else (),
    }
    return next((texts for name in config.negatives.lists if name in lists and (texts := lists[name]())), ())


def draw_texts(texts: Sequence[str], right: Sequence[str], draws: np.ndarray) -> tuple[str, ...]:
    """Draw texts without replacement, at most one for each number in `draws`, which are random in [0, 1). Equal texts
    are drawn at most once. right: texts that are never drawn."""
    keys, excluded = ([content_key(text.encode()) for text in some] for some in (texts, right))
    return tuple(texts[i] for i in draw_entries(first_indices(keys, set(excluded)), draws))


def sorted_table(found: dict[int, int]) -> Int64s:
    """Return a dict {key: number} of n entries as an array, int64 (2, n): the keys, ascending, and their numbers."""
    return np.array(sorted(found.items()), np.int64).reshape(-1, 2).T


def place_of(key: int, table: MemmapArray) -> int | None:
    """Return the number of `key` in a stored table (see sorted_table); None if the table lacks the key."""
    keys_n, numbers_n = table.array
    place = int(np.searchsorted(keys_n, key))
    return int(numbers_n[place]) if place < len(keys_n) and keys_n[place] == key else None

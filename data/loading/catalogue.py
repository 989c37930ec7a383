"""The catalogue of a data set: a table of its distinct items of side y, such as passages, from which noise is drawn.

An item has one content key, and one entry in the table for each different text of it. Shape letters: E entries; N
items; k content keys or draws.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.index_cache import MemmapArray

FORMAT = "1"
KEY, PLACE, PART, DRAWS = range(4)  # rows of the table
# Key of the item, key of its text, place and part (two numbers by which a data set reads the text again), expected
# number of times that an epoch draws it as a positive
Occurrence = tuple[int, int, int, int, float]
OCCURRENCE = np.dtype([("key", "i8"), ("text", "i8"), ("place", "i8"), ("part", "i8"), ("draws", "f8")])


def catalogue_table(occurrences: Iterable[Occurrence]) -> Int64s:
    """Return the table of a catalogue, int64 (4, E): KEY, PLACE, PART and DRAWS of each entry, ascending by KEY.

    Its row DRAWS has the bits of float64 numbers. occurrences: at least one. Occurrences with equal key and equal text
    become one entry, with PLACE and PART of the first of them, and the sum of their DRAWS.
    """
    every = np.fromiter(occurrences, OCCURRENCE)
    every = every[np.lexsort((every["text"], every["key"]))]  # is stable: the first occurrence stays the first
    names = every[["key", "text"]]
    first_E = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    draws_E = np.add.reduceat(every["draws"], first_E)
    return np.stack([*(every[name][first_E] for name in ("key", "place", "part")), draws_E.view(np.int64)])


class Catalogue:
    """The N distinct items of side y of a data set. Each has one or more of the E entries, its texts.

    starts (N,) int64: index of the first entry of each item, ascending. keys (N,) int64: the items' content keys,
    ascending. draws_E (E,), draws_N (N,) float64: the expected number of times that an epoch draws each entry and each
    item as a positive. tokens(texts): converts k texts to tower inputs, such as int64 (k, L). tokenize: the tokenizer
    that `tokens` calls. len() is N.
    """

    def __init__(
        self,
        mapped: MemmapArray,
        read: Callable[[int, int], Any],
        tokens: Callable[[Sequence[Any]], Tensor],
        tokenize: Any,
    ) -> None:
        """Open a catalogue. mapped: the table that `catalogue_table` returned. read(place, part): returns the text of
        an entry, such as a Passage. tokens, tokenize: see the class."""
        self.mapped, self.read, self.tokens, self.tokenize = mapped, read, tokens, tokenize
        keys_E = mapped.array[KEY]
        self.starts = np.flatnonzero(np.append(True, keys_E[1:] != keys_E[:-1]))
        self.keys, self.draws_E = keys_E[self.starts], mapped.array[DRAWS].view(np.float64)
        self.draws_N = np.add.reduceat(self.draws_E, self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, entry: int) -> Any:
        """Return the text of the entry with index `entry` (of E, not of N), as `read` gives it.

        Raises DataError or SampleError if it cannot be read any more.
        """
        return self.read(*self.mapped.array[[PLACE, PART], entry].tolist())

    def positions(self, keys_k: Int64s) -> Int64s:
        """Return the index among the N items of the item with each content key, int64 (k,); −1 for an unknown key."""
        position_k = np.searchsorted(self.keys, keys_k).clip(max=len(self) - 1)
        return np.where(self.keys[position_k] == keys_k, position_k, -1)

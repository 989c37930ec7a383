"""The catalogue of a data set: its distinct items of side y, such as passages.

Shape letters: E entries; N items; k content keys or draws.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.index_cache import MemmapArray

FORMAT = "1"
KEY, PLACE, PART, COUNT = range(4)  # rows of the table
Occurrence = tuple[int, int, int, int, bool]  # key of the item, key of its text, place, part, whether it is a positive


def catalogue_table(occurrences: Iterable[Occurrence]) -> Int64s:
    """Return the table of a catalogue, int64 (4, E): KEY, PLACE, PART and COUNT of each entry, ascending by KEY.

    occurrences: of items in the data, at least one. Those with one key and one text become one entry, whose PLACE and
    PART are those of the first of them; COUNT is how many of them are positives.
    """
    every = np.fromiter(occurrences, np.dtype((np.int64, 5))).T
    every = every[:, np.lexsort((every[1], every[0]))]  # is stable: the first of them stays the first
    first_E = np.flatnonzero(np.append(True, (every[:2, 1:] != every[:2, :-1]).any(0)))
    return np.stack([*every[[0, 2, 3]][:, first_E], np.add.reduceat(every[4], first_E)])


class Catalogue:
    """The N distinct items of side y by content key. Each has one or more entries, its texts.

    starts (N,): the first entry of each item, ascending. keys (N,): their content keys, ascending. counts (N,): how
    often each is a positive in the data. tokens(texts): converts k texts to tower inputs, int64 (k, L). tokenize: the
    tokenizer behind it.
    """

    def __init__(
        self,
        mapped: MemmapArray,
        read: Callable[[int, int], Any],
        tokens: Callable[[Sequence[Any]], Tensor],
        tokenize: Any,
    ) -> None:
        """mapped: the table of `catalogue_table`. read(place, part): returns the text of an entry, such as a
        Passage."""
        self.mapped, self.read, self.tokens, self.tokenize = mapped, read, tokens, tokenize
        keys_E = mapped.array[KEY]
        self.starts = np.flatnonzero(np.append(True, keys_E[1:] != keys_E[:-1]))
        self.keys, self.counts = keys_E[self.starts], np.add.reduceat(mapped.array[COUNT], self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, entry: int) -> Any:
        """Read the text of an entry. Raises DataError or SampleError if its file has changed."""
        return self.read(*self.mapped.array[[PLACE, PART], entry].tolist())

    def positions(self, keys_k: Int64s) -> Int64s:
        """Return the position among the N items of each content key, (k,); −1 for a key of no item."""
        position_k = np.searchsorted(self.keys, keys_k).clip(max=len(self) - 1)
        return np.where(self.keys[position_k] == keys_k, position_k, -1)

"""Histories: the items of a user before an event, from which its item is to be predicted.

Letters in shapes: n events to predict; N items; T items of the longest history that is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import DataError
from dyad.data.batch import PADDING
from dyad.data.sequence.items import CatalogueItems
from dyad.data.sequence.log import Log
from dyad.data.shards.content_keys import Int64s


@dataclass(frozen=True)
class NextItems:
    """n events to predict, each from the items of its user before it.

    log: all events. event_n (n,): which are to be predicted, each with an event before it. items: the N items that can
    be answers, the first N of the log; the log may have others, which no history has. length: items of a history that a
    model sees, the last ones. train_e (E,) bool: which events are those of training.
    """

    log: Log
    event_n: Int64s
    items: CatalogueItems
    length: int
    train_e: np.ndarray

    @property
    def target_n(self) -> Int64s:
        """The number of the item of each event to predict, (n,). N or more: it is none of the N items that can be
        answers, so no ranking has it."""
        return self.log.item_e[self.event_n]

    @cached_property
    def user_n(self) -> Int64s:
        """The user of each event to predict, (n,)."""
        return np.searchsorted(self.log.starts, self.event_n, side="right") - 1

    def before(self, i: int) -> Int64s:
        """Return the items of the history of event i, all of them, oldest first."""
        items = self.log.item_e[self.log.starts[self.user_n[i]] : self.event_n[i]]
        return items[items < len(self.items.names)]

    def seen(self) -> tuple[Int64s, Int64s]:
        """Return the pairs of an event and an item of its history, except its own target, as two arrays (p,)."""
        found = [np.setdiff1d(self.before(i), self.target_n[i : i + 1]) for i in range(len(self.event_n))]
        return np.repeat(np.arange(len(found)), [len(each) for each in found]), np.concatenate(found)

    def __len__(self) -> int:
        return len(self.event_n)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the histories start … stop − 1 as numbers of items, int64 (k, T), filled up with PADDING."""
        return padded([self.before(i)[-self.length :] for i in range(start, min(stop, len(self)))])


def padded(histories: Sequence[Int64s]) -> Tensor:
    """Return k histories of numbers of items as int64 (k, T), filled up with PADDING."""
    block = np.full((len(histories), max(map(len, histories))), PADDING, np.int64)
    for row, items in zip(block, histories, strict=True):
        row[: len(items)] = items
    return torch.from_numpy(block)


@dataclass(frozen=True)
class ItemList:
    """The inputs of all N items, read by number."""

    items: CatalogueItems

    def __len__(self) -> int:
        return len(self.items.names)

    def block(self, start: int, stop: int) -> Tensor:
        return self.items.inputs(np.arange(start, min(stop, len(self))))[0]


def next_items(log: Log, items: CatalogueItems, length: int, first_file: int, training_files: int) -> NextItems:
    """Take the events of the log's files from `first_file` on as those to predict. Raises DataError if there are none.

    An event without an item before it is left out. training_files: how many files of the log are those of training.
    """
    known_e = log.item_e < len(items.names)
    known_before_e = np.cumsum(known_e) - known_e
    own_e = np.repeat(known_before_e[log.starts[:-1]], np.diff(log.starts))  # before the user's first event
    event_n = np.flatnonzero((log.file_e >= first_file) & (known_before_e > own_e))
    if not len(event_n):
        raise DataError(
            f"{', '.join(file.name for file in log.files[first_file:])}: no event has an earlier one of its user, "
            "also in data.train: nothing can be predicted"
        )
    return NextItems(log, event_n, items, length, log.file_e < training_files)

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

SHOWN = 5  # items of a history


@dataclass(frozen=True)
class Histories:
    """n histories: each has the items of a user before an event, one at least.

    log: all events. event_n (n,): the event after the last of each history, E at the end of the log. items: the N items
    that have an embedding, the first N of the log; the log may have others, which no history has. length: items of a
    history that a model sees, the last ones.
    """

    log: Log
    event_n: Int64s
    items: CatalogueItems
    length: int

    @cached_property
    def user_n(self) -> Int64s:
        """The user of each history, (n,)."""
        return np.searchsorted(self.log.starts, self.event_n - 1, side="right") - 1

    def before(self, i: int) -> Int64s:
        """Return the items of history i, all of them, oldest first."""
        items = self.log.item_e[self.log.starts[self.user_n[i]] : self.event_n[i]]
        return items[items < len(self.items)]

    @property
    def sort(self) -> str:
        return "sequence"

    def name(self, i: int) -> str:
        """Return the id of the user of history i; of frames the file."""
        return self.log.users[int(self.user_n[i])]

    def text(self, i: int) -> str:
        """Return the last items of history i, as texts or else ids, for people to read."""
        return " → ".join(map(self.items.shown, self.before(i)[-SHOWN:].tolist()))

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
class NextItems(Histories):
    """n events to predict, each from the history before it. event_n (n,): their places among the E events of the log.
    train_e (E,) bool: whether an event is one of training."""

    train_e: np.ndarray

    @property
    def target_n(self) -> Int64s:
        """The number of the item of each event to predict, (n,). N or more: it is none of the N items that can be
        answers, so no ranking has it."""
        return self.log.item_e[self.event_n]

    def seen(self) -> tuple[Int64s, Int64s]:
        """Return the pairs of an event and an item of its history, except its own target, as two arrays (p,)."""
        found = [np.setdiff1d(self.before(i), self.target_n[i : i + 1]) for i in range(len(self.event_n))]
        return np.repeat(np.arange(len(found)), [len(each) for each in found]), np.concatenate(found)


@dataclass(frozen=True)
class ItemList:
    """The inputs of all N items, read by number."""

    items: CatalogueItems

    def __len__(self) -> int:
        return len(self.items)

    def block(self, start: int, stop: int) -> Tensor:
        return self.items.inputs(np.arange(start, min(stop, len(self))))[0]


def next_items(log: Log, items: CatalogueItems, length: int, first_file: int, training_files: int) -> NextItems:
    """Return the events to predict: those in the log's files number `first_file` and later. Raises DataError for none.

    Left out are events whose user has no earlier event with one of `items`. length: the most items of a history that a
    model sees. training_files: how many files, the first of the log, hold events of training.
    """
    known_e = log.item_e < len(items)
    known_before_e = np.cumsum(known_e) - known_e
    own_e = np.repeat(known_before_e[log.starts[:-1]], np.diff(log.starts))  # before the user's first event
    event_n = np.flatnonzero((log.file_e >= first_file) & (known_before_e > own_e))
    if not len(event_n):
        raise DataError(
            f"{', '.join(file.name for file in log.files[first_file:])}: no event has an earlier one of its user, "
            "also in data.train: nothing can be predicted"
        )
    return NextItems(log, event_n, items, length, log.file_e < training_files)

"""Histories for the evaluation of sequence models: the items of a user before an event, from which a model predicts the
item of the event.

Letters in shapes: n histories; E events of the log; N items; k histories of a block; T items of the longest history in
a block.
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

SHOWN = 5  # number of items of a history that Histories.text shows


@dataclass(frozen=True)
class Histories:
    """n histories. A history has the items of a user before an event, at least one item.

    log: all E events. event_n (n,) int64: index of the event after the last event of each history; may be E. items: the
    N items that have an embedding, numbers 0 … N − 1 of the log; items of the log with larger numbers are left out of
    histories. length: the most items of a history that a model gets; of a longer history it gets the last ones.
    """

    log: Log
    event_n: Int64s
    items: CatalogueItems
    length: int

    @cached_property
    def user_n(self) -> Int64s:
        """The index of the user of each history, int64 (n,)."""
        return np.searchsorted(self.log.starts, self.event_n - 1, side="right") - 1

    def before(self, i: int) -> Int64s:
        """Return the numbers of all items of history i that have an embedding, oldest first, int64."""
        items = self.log.item_e[self.log.starts[self.user_n[i]] : self.event_n[i]]
        return items[items < len(self.items)]

    @property
    def sort(self) -> str:
        """The word for one history in a report."""
        return "sequence"

    def name(self, i: int) -> str:
        """Return the id of the user of history i; if items are frames, the name of the file."""
        return self.log.users[int(self.user_n[i])]

    def text(self, i: int) -> str:
        """Return the last SHOWN items of history i as a readable text, each as `CatalogueItems.shown` gives it."""
        return " → ".join(map(self.items.shown, self.before(i)[-SHOWN:].tolist()))

    def __len__(self) -> int:
        return len(self.event_n)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the item numbers of the k histories start … stop − 1, int64 (k, T), padded at the right with PADDING.
        A history is cut to its last `length` items."""
        return padded([self.before(i)[-self.length :] for i in range(start, min(stop, len(self)))])


def padded(histories: Sequence[Int64s]) -> Tensor:
    """Return k ≥ 1 histories, arrays of item numbers, as one tensor int64 (k, T), padded at the right with PADDING."""
    block = np.full((len(histories), max(map(len, histories))), PADDING, np.int64)
    for row, items in zip(block, histories, strict=True):
        row[: len(items)] = items
    return torch.from_numpy(block)


@dataclass(frozen=True)
class NextItems(Histories):
    """n events to predict, each from the history before it. event_n (n,) int64: index of each event to predict among
    the E events of the log. train_e (E,) bool: whether each event of the log is training data. without_history: the
    number of events that are not predicted, as their user has no earlier event with one of the N items."""

    train_e: np.ndarray
    without_history: int

    @property
    def target_n(self) -> Int64s:
        """The item number of each event to predict, int64 (n,). If it is N or more, the item is none of the N items
        that are ranked, so no prediction is right."""
        return self.log.item_e[self.event_n]

    @cached_property
    def repeated_n(self) -> np.ndarray:
        """Whether the item of each event to predict is in its history, bool (n,)."""
        user_e = np.repeat(np.arange(len(self.log.users)), np.diff(self.log.starts))
        _, first = np.unique(user_e * len(self.log.items) + self.log.item_e, return_index=True)  # in time
        return ~np.isin(self.event_n, first) & (self.target_n < len(self.items))

    def seen(self) -> tuple[Int64s, Int64s]:
        """Return all p pairs of an event to predict and an item of its history, as two int64 arrays (p,).

        They are the index of the event, 0 … n − 1, and the item number. A pair comes once, even if the item is in the
        history several times. The event's own item is left out.
        """
        found = [np.setdiff1d(self.before(i), self.target_n[i : i + 1]) for i in range(len(self.event_n))]
        return np.repeat(np.arange(len(found)), [len(each) for each in found]), np.concatenate(found)


@dataclass(frozen=True)
class ItemList:
    """All N items as a list of tower inputs, in the order of their numbers. block(start, stop): returns the inputs of
    the items start … stop − 1, as `CatalogueItems.inputs` does, without their lengths."""

    items: CatalogueItems

    def __len__(self) -> int:
        return len(self.items)

    def block(self, start: int, stop: int) -> Tensor:
        return self.items.inputs(np.arange(start, min(stop, len(self))))[0]


def next_items(log: Log, items: CatalogueItems, length: int, first_file: int, training_files: int) -> NextItems:
    """Return the events to predict: those in the log's files from index `first_file` on that have a history.

    An event is left out if its user has no earlier event with one of `items`. Raises DataError if none is left. length:
    the most items of a history that a model gets. training_files: how many of the log's files are training data; these
    are its first files.
    """
    own_e, known_e = log.file_e >= first_file, log.item_e < len(items)
    known_before_e = np.cumsum(known_e) - known_e
    start_e = np.repeat(known_before_e[log.starts[:-1]], np.diff(log.starts))  # count before the user's first event
    event_n = np.flatnonzero(own_e & (known_before_e > start_e))
    if not len(event_n):
        raise DataError(
            f"{', '.join(file.name for file in log.files[first_file:])}: no event has an earlier one of its user "
            "in any log of histories: nothing can be predicted."
        )
    return NextItems(log, event_n, items, length, log.file_e < training_files, int(own_e.sum()) - len(event_n))

"""The training data set of task=sequence. A sample is a window (consecutive steps) of a sequence; each step is a pair.

x is the item of a step. A tower makes the context of the step from this item and the items before it in the window. y
is the next item, or the item of the step itself for objectives that choose later steps as positives themselves (CPC).

Letters in shapes: S steps of all samples of a batch; N items.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dyad.data.batch import Batch
from dyad.data.loading.catalogue import Catalogue
from dyad.data.sequence.items import CatalogueItems, item_keys
from dyad.data.sequence.log import Log
from dyad.data.sequence.windows import windows_of
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.index_cache import cached_array

NEXT, OWN = 1, 0  # number of steps from the item of x to the item of y


class Sequences:
    """The training data set of sequences: sample i is window i (consecutive steps of a sequence), each step a row of a
    Batch.

    A batch depends only on its positions. windows: all windows. pairs: the number of steps of all windows together.
    """

    def __init__(self, log: Log, items: CatalogueItems, length: int, ahead: int) -> None:
        """Set up the data set. log: the events of all sequences. items: the items of these events. length: the most
        steps of a window. ahead: number of steps from the item of x to the item of y: NEXT (1) or OWN (0, y is the item
        of x)."""
        self.log, self.items, self.ahead = log, items, ahead
        self.windows = windows_of(log.starts, length, ahead)
        self._firsts, self._keys = self.windows.firsts, item_keys(items.names)
        self.pairs = int(self._firsts[-1])

    @property
    def fingerprint(self) -> str:
        """A hash of the sequences of items, the windows, the ids and the contents of the items, as hexadecimal text."""
        windows = (content_key(bounds.tobytes()) for bounds in (self.windows.starts, self.windows.stops))
        made_of = [self.log.fingerprint, self.items.fingerprint, *map(str, (*windows, self.ahead))]
        return hashlib.sha256(repr(made_of).encode()).hexdigest()

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of the windows at the given positions, each a pair (epoch, index of the window).

        The epoch is not used. The batch has a row for each of the S steps of these windows, window after window. x and
        y have the form that `CatalogueItems.inputs` returns. x_places has the place of each step in its window, from 0.
        sample_ids, and x_keys too, are indices among the steps of all windows. y_keys are content keys (64-bit hashes)
        of the items' ids; if items are frames, they equal sample_ids. Raises DataError for an item that cannot be read.
        """
        windows = np.array([window for _, window in positions], np.int64)
        sizes = self.windows.sizes[windows]
        place_S = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        event_S = np.repeat(self.windows.starts[windows], sizes) + place_S
        id_S = torch.from_numpy(np.repeat(self._firsts[windows], sizes) + place_S)
        x_item_S, y_item_S = self.log.item_e[event_S], self.log.item_e[event_S + self.ahead]
        distinct, of_both = np.unique(np.concatenate([x_item_S, y_item_S]), return_inverse=True)
        inputs, lengths = self.items.inputs(distinct)
        x_row, y_row = np.split(of_both, 2)
        y_keys = torch.from_numpy(self._keys[y_item_S]) if len(self._keys) else id_S.clone()
        return Batch(
            x=inputs[torch.from_numpy(x_row)],
            y=inputs[torch.from_numpy(y_row)],
            sample_ids=id_S,
            x_keys=id_S.clone(),
            y_keys=y_keys,
            x_lengths=None if lengths is None else lengths[x_row],
            y_lengths=None if lengths is None else lengths[y_row],
            x_places=place_S,
        )

    def notes(self) -> list[str]:
        """Return a list with one line for the log: the numbers of steps, sequences, items, samples, and of samples that
        are left out because they have one step and nothing to predict."""
        items = f", {len(self.items.names):,} items" if len(self.items.names) else ""
        steps = f"{self.pairs:,} steps of {len(self.log.users):,} sequences{items}"
        longest = self.windows.sizes.max(initial=0)
        left_out = len(self.log.item_e) - self.ahead * len(self.log.users) - self.pairs
        rest = f"; left out: {left_out:,} of one step" if left_out else ""
        return [f"{steps}: {len(self.windows):,} samples of at most {longest} steps{rest}"]

    def where(self, sample_id: int) -> str:
        """Return the location of a window as text for messages: the id of its user. sample_id: index of the window; not
        one of the sample_ids of a Batch, which count steps."""
        user = int(np.searchsorted(self.log.starts, self.windows.starts[sample_id], side="right")) - 1
        return f"data.train: the sequence of '{self.log.users[user]:.40}'"


def catalogue_of(data: Sequences, paths: Sequence[str], tokenize: Any) -> Catalogue:
    """Return the Catalogue (data/loading/catalogue.py) of all items of the log, from which NCE draws noise samples.

    The catalogue also has the number of times that each item is a target (y) in one epoch, counted over all steps of
    the training windows. Items must have ids: frames have no catalogue. paths: the files of the log; a cache file is
    stored for the first. tokenize: the tokenizer of items that are texts; None for other items.
    """

    def table() -> np.ndarray:
        steps = [np.arange(a, b) + data.ahead for a, b in zip(data.windows.starts, data.windows.stops, strict=True)]
        names = data.items.names
        draws_N = np.bincount(data.log.item_e[np.concatenate(steps)], minlength=len(names)).astype(np.float64)
        keys_N = item_keys(names)
        order = np.argsort(keys_N, kind="stable")
        return np.stack([keys_N[order], order, np.zeros_like(order), draws_N[order].view(np.int64)])

    mapped = cached_array([paths[0]], "sequence_items", paths[1:], [data.fingerprint], table)
    return Catalogue(mapped, lambda place, part: place, lambda places: data.items.inputs(np.array(places))[0], tokenize)

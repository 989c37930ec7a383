"""The order of samples for data.batches=by_source: all samples of a global batch come from one source.

Each source has an order of its own, with an epoch of ⌊round(w · n) / G⌋ batches (w: its weight, n: its number of
samples, G: samples of a global batch). An epoch of the run is one epoch of each source, with all their batches
permuted.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dyad.data.base.errors import ConfigError
from dyad.data.loading.order import Ids, Order, permuted


class BySource(Order):
    """The order of training samples in which all samples of a global batch come from one source.

    names: the name of each source in messages. how: the arguments of Order other than sizes and weights, by keyword.
    The constructor raises ConfigError, naming the source, when a source has less than one global batch in an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], names: Sequence[str], **how: Any) -> None:
        batch, seed = how["global_batch_size"], how.pop("seed")
        for name, size, weight in zip(names, sizes, weights, strict=True):
            if (count := round(weight * size)) < batch:
                least = f", or a weight of {-(-batch // size):,}" if size else ""
                raise ConfigError(
                    f"data.batches=by_source: {name} gives {count:,} samples an epoch, and a batch of one source needs "
                    f"global_batch_size={batch}. Set global_batch_size={max(count, 1)} or less{least}, or "
                    "data.batches=mixed"
                )
        super().__init__(sizes, weights, seed=seed, **how)
        pairs = enumerate(zip(sizes, weights, strict=True))
        self._orders = [Order([size], [w], seed=f"{seed}/of {i}", **how) for i, (size, w) in pairs]
        self._first_batches = [0, *accumulate(order.steps_per_epoch for order in self._orders)]
        self._first_ids = [0, *accumulate(sizes)]
        self.steps_per_epoch = self._first_batches[-1]

    def source(self, step: int) -> tuple[int, int]:
        """Return the index of the source of optimiser step `step`, and which of the source's own steps it is.

        Both kinds of steps are counted from 0, over all epochs.
        """
        epoch, batch = divmod(step, self.steps_per_epoch)
        place = int(permuted(np.array([batch]), self.steps_per_epoch, self._keys(epoch, "batches"))[0])
        source = bisect_right(self._first_batches, place) - 1
        return source, epoch * self._orders[source].steps_per_epoch + place - self._first_batches[source]

    def ids(self, step: int) -> Ids:
        source, own_step = self.source(step)
        return self._first_ids[source] + self._orders[source].ids(own_step)

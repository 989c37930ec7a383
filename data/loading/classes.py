"""Batches of samples that have a class, put together from batches whose y is the number of each sample's class.

`completed` runs once for a batch of a rank, where the loader has joined its parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError, SampleError, nearest
from dyad.data.batch import Batch, lengths_by
from dyad.data.loading.loader import BatchSource, Positions
from dyad.data.loading.order import Ids, Order, local_rows


@dataclass(frozen=True)
class ClassNumbers:
    """The names of C classes. A call converts n names to their numbers 0 … C − 1, int64 (n,).

    With one name, every other label is the class 1.
    """

    names: Sequence[str]

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def __call__(self, names: Sequence[str]) -> Tensor:
        strangers = [name for name in names if len(self.names) > 1 and name not in self.places]
        if strangers:
            raise ConfigError(f"'{strangers[0]}' is no class of this model.{nearest(strangers[0], self.names)}")
        return torch.tensor([self.places.get(name, 1) for name in names], dtype=torch.int64)

    def checked(self, label: str, where: str) -> str:
        """Return the label of a sample. Raises SampleError, which begins with `where`, if it is no class."""
        if len(self.names) > 1 and label not in self.places:
            raise SampleError(f"{where}: its class '{label}' is none of data.classes.{nearest(label, self.names)}")
        return label


@dataclass(frozen=True)
class WithClasses:
    """Samples against all classes: side y has the classes, shared over the ranks, whatever the samples are.

    samples: the data set of x. classes: a text for each of C classes; tokenize(classes) are their inputs of the y
    tower.
    """

    samples: BatchSource
    classes: list[str]
    tokenize: Any

    def __getitems__(self, positions: Positions) -> Batch:
        return self.samples.__getitems__(positions)

    def where(self, sample_id: int) -> str:
        return self.samples.where(sample_id)

    @cached_property
    def _inputs(self) -> Tensor:
        return self.tokenize(self.classes)

    def completed(self, batch: Batch, rank: int, world_size: int) -> Batch:
        """Return the batch with this rank's share of the classes as y, and the number of each sample's class as its
        positive."""
        own = local_rows(len(self.classes), rank, world_size)
        y = self._inputs[own]
        lengths = lengths_by(self.tokenize, y)
        return replace(batch, y=y, y_keys=torch.arange(own.start, own.stop), y_lengths=lengths, positives=batch.y)


@dataclass(frozen=True)
class RareAgainstOthers:
    """Samples of one class, number 0, on side x, all others on side y. samples: the data set of both."""

    samples: BatchSource

    def __getitems__(self, positions: Positions) -> Batch:
        return self.samples.__getitems__(positions)

    def where(self, sample_id: int) -> str:
        return self.samples.where(sample_id)

    def completed(self, batch: Batch, rank: int, world_size: int) -> Batch:
        """Return the batch with its samples of class 0 as x, and the others as y."""
        (x, *of_x), (y, *of_y) = ((batch.x[own], batch.x_keys[own], own) for own in (batch.y == 0, batch.y != 0))
        lengths = [None if batch.x_lengths is None else batch.x_lengths[own.numpy()] for _, own in (of_x, of_y)]
        keys, ids = (of_x[0], of_y[0]), batch.sample_ids[of_x[1]]
        of_sides = {"x_keys": keys[0], "y_keys": keys[1], "x_lengths": lengths[0], "y_lengths": lengths[1]}
        return replace(batch, x=x, y=y, sample_ids=ids, **of_sides)


class RareOrder(Order):
    """The order in which each global batch has `rare_per_batch` samples of a rare class, spread evenly over its rows.

    These samples and the others have an order each, so a rare sample may come again before all others came once; an
    epoch is a pass over the others. is_rare: (n,) bool, of each sample. name: of the class, for messages. The other
    arguments are those of Order. Raises ConfigError if there are too few samples of either kind.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        is_rare: np.ndarray,
        rare_per_batch: int,
        name: str,
        **how: Any,
    ) -> None:
        total, seed = how.pop("global_batch_size"), how.pop("seed")
        self._ids, self._orders = [np.flatnonzero(is_rare == kind) for kind in (True, False)], []
        counts, ends = (rare_per_batch, total - rare_per_batch), [0, *accumulate(sizes)]
        for what, ids, count in zip((name, "others"), self._ids, counts, strict=True):
            own = np.diff(np.searchsorted(ids, ends)).tolist()
            if sum(own) < count:
                raise ConfigError(
                    f"data.rare={name}: {sum(own):,} samples of {what}, and each batch needs {count} of them. Set "
                    "data.rare_per_batch, or global_batch_size, to less"
                )
            self._orders.append(Order(own, weights, seed=f"{seed}/{what}", global_batch_size=count, **how))
        super().__init__(sizes, weights, seed=seed, global_batch_size=total, **how)
        self.steps_per_epoch = self._orders[1].steps_per_epoch
        shares = np.arange(total + 1) * rare_per_batch // total
        self._rare_rows = shares[1:] > shares[:-1]

    def ids(self, step: int) -> Ids:
        ids = np.empty(self.global_batch_size, np.int64)
        for rows, own, order in zip((self._rare_rows, ~self._rare_rows), self._ids, self._orders, strict=True):
            ids[rows] = own[order.ids(step)]
        return ids

    def local(self, step: int, rank: int, world_size: int) -> tuple[int, Ids]:
        return step, super().local(step, rank, world_size)[1]  # a rare sample is augmented anew each time

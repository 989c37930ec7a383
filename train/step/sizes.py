"""How many rows each rank has in a step, exchanged between the hosts while the towers run on the devices."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dyad.data.batch import Batch
from dyad.train.distributed.world import World
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import Sizes


class SizeExchange:
    """Tells every rank the numbers of x rows, y columns and further y items of all ranks.

    pairs: the numbers of rows of all ranks, if they are the same in every step and there are as many columns; None:
    rows and columns are exchanged too. A batch with such pairs and without further items needs no communication.
    """

    def __init__(self, world: World, pairs: tuple[int, ...] | None) -> None:
        self._world, self._pairs = world, pairs
        # the numbers never enter a device, for which the host would have to wait
        self._group: Any = world.control or world.group

    def begin(self, batch: Batch) -> Callable[[], Sizes]:
        """Send this rank's numbers; return a function that waits for those of all ranks. Every rank must call both."""
        extra, world = batch.extra, self._world
        further = (0, 0) if extra is None else (len(extra.row), extra.positives)
        own = torch.tensor([len(batch), len(batch.y), *further])
        every, work = own[None], None
        if world.size > 1 and extra is None and self._pairs is not None:
            if self._pairs[world.rank] != len(batch):
                raise ValueError(f"{len(batch)} pairs of rank {world.rank}, not its share {self._pairs[world.rank]}")
            every = torch.tensor([(pairs, pairs, 0, 0) for pairs in self._pairs])
        elif world.size > 1:
            every = own.new_empty(world.size, len(own))
            work = dist.all_gather_into_tensor(every.view(-1), own, group=self._group, async_op=True)

        def wait() -> Sizes:
            if work is not None:
                work.wait()
            return Sizes(*(Layout(tuple(column), world.rank) for column in every.T.tolist()))

        return wait

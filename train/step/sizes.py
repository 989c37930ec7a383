"""How many rows each rank has in a step, exchanged between the hosts while the towers run on the devices."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dyad.data.batch import Batch
from dyad.train.distributed.world import World
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import Sizes


def exchange_sizes(batch: Batch, world: World, pairs: tuple[int, ...] | None) -> Callable[[], Sizes]:
    """Send how many x rows, y columns and further y items this rank has; return what waits for those of all ranks.

    pairs: the numbers of rows of all ranks, if they are the same in every step and there are as many columns; None:
    rows and columns are exchanged too. A batch with such pairs and without further items needs no communication. Every
    rank must call this function and its result.
    """
    extra = batch.extra
    further = (0, 0) if extra is None else (len(extra.row), extra.positives)
    own = torch.tensor([len(batch), len(batch.y), *further])
    every, work = own[None], None
    if world.size > 1 and extra is None and pairs is not None:
        if pairs[world.rank] != len(batch):
            raise ValueError(f"{len(batch)} pairs of rank {world.rank}, not its share {pairs[world.rank]}")
        every = torch.tensor([(rows, rows, 0, 0) for rows in pairs])
    elif world.size > 1:
        every = own.new_empty(world.size, len(own))
        # the numbers never enter a device, for which the host would have to wait
        group: Any = world.control or world.group
        work = dist.all_gather_into_tensor(every.view(-1), own, group=group, async_op=True)

    def wait() -> Sizes:
        if work is not None:
            work.wait()
        return Sizes(*(Layout(tuple(column), world.rank) for column in every.T.tolist()))

    return wait

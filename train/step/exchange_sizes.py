"""Exchange how many rows each rank has in a step, between the CPUs of the ranks while the towers run on the GPUs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dyad.data.batch import Batch
from dyad.train.distributed.world import World
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import Sizes


def exchange_sizes(batch: Batch, world: World, pairs: tuple[int, ...] | None) -> Callable[[], Sizes]:
    """Begin to exchange between ranks how many rows each has; return a function that waits for the numbers.

    The numbers are those of x rows, y columns, extra y items, and positives among these; the returned function returns
    them for all ranks as Sizes (losses/sums/conditions.py). pairs: the number of pairs of each rank, if it is the same
    in every step and each x row has one y column; then a batch without extra items needs no communication. None:
    unknown. Every rank must call both functions, all with extra items or all without. Raises ValueError if, on several
    ranks and without communication, the batch has another number of rows than `pairs` says.
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

"""Data parallelism of the towers: gradients are averaged over ranks once per step, in the last backward of a tower."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dyad.train.distributed.world import World
from dyad.train.towers.tower import TwoTower


def wrap_towers(towers: TwoTower, compiled: bool, world: World) -> tuple[nn.Module, nn.Module]:
    """Wrap the x and the y tower in DistributedDataParallel, each on its own, and return both.

    A shared tower is wrapped once. Towers without trainable parameters, and all towers of a single process, are
    returned unwrapped. compiled: whether to torch.compile them first.
    """

    def wrapped(tower: nn.Module) -> nn.Module:
        if compiled:
            tower.compile()
        if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return tower
        devices = [world.device] if world.device.type == "cuda" else None
        parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
        # The step synchronises buffers itself. An attribute, as versions of torch disagree on the name of the argument.
        parallel.broadcast_buffers = False
        _rebuild_buckets(parallel)
        return parallel

    x_tower = wrapped(towers.x_tower)
    return x_tower, x_tower if towers.y_tower is towers.x_tower else wrapped(towers.y_tower)


@contextmanager
def no_gradient_sync(towers: Iterable[nn.Module]) -> Iterator[None]:
    """During the block, backward does not average gradients over ranks, except after `sync_in_next_backward`."""
    with ExitStack() as stack:
        for tower in towers:
            if isinstance(tower, DistributedDataParallel):
                stack.enter_context(tower.no_sync())
        yield


def sync_in_next_backward(towers: Iterable[nn.Module]) -> None:
    """Make the next backward average gradients over ranks, although it is inside the block of `no_gradient_sync`.

    towers: as returned by wrap_towers. DistributedDataParallel prepares the averaging in a forward, for the backward
    that follows. In a step with several chunks, forwards of other chunks may lie between the two, so this function
    prepares it explicitly.
    """
    for tower in dict.fromkeys(towers):  # a shared tower once
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])


def _rebuild_buckets(tower: DistributedDataParallel) -> None:
    """Make DistributedDataParallel choose its final gradient buckets now, by a backward of zeros, before any step.

    DistributedDataParallel begins with one bucket and regroups the parameters after the first backward. The position in
    a bucket decides how the sum over three or more ranks is rounded; without this call, the first step of a resumed run
    would differ in the last bits from the same step of an uninterrupted run.
    """
    sync_in_next_backward([tower])
    trained = [p for p in tower.parameters() if p.requires_grad]
    torch.autograd.backward([p.view_as(p) for p in trained], [torch.zeros_like(p) for p in trained])
    tower.zero_grad()

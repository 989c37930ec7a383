"""Data parallelism of the towers: gradients are averaged over ranks once per step, in the last backward of a tower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dyad.train.distributed.world import World
from dyad.train.towers.tower import TwoTower


def wrap_towers(towers: TwoTower, compiled: bool, world: World) -> tuple[nn.Module, nn.Module]:
    """The x and y tower, each wrapped in DistributedDataParallel on its own. A shared tower is wrapped once.

    Towers with nothing to train, and those of a single process, are returned as they are. compiled: torch.compile them.
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
    """Inside, a backward leaves the gradients of this rank as they are, unless `sync_in_next_backward` came before."""
    with ExitStack() as stack:
        for tower in towers:
            if isinstance(tower, DistributedDataParallel):
                stack.enter_context(tower.no_sync())
        yield


def sync_in_next_backward(towers: Iterable[nn.Module]) -> None:
    """Average gradients over ranks in the next backward.

    DDP arms its reducer in forward, for the backward that follows. Here forwards of other chunks may lie between the
    two, so the reducer is armed explicitly.
    """
    for tower in dict.fromkeys(towers):  # a shared tower once
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])


def _rebuild_buckets(tower: DistributedDataParallel) -> None:
    """Make DDP choose its final gradient buckets now, by a backward of zeros, before any step.

    DDP begins with one bucket. After the first backward it regroups the parameters in reverse order. The position in a
    bucket decides how the sum of three or more ranks is rounded, so without this the first step of a resumed run would
    differ in the last bits from the same step of an undisturbed run.
    """
    sync_in_next_backward([tower])
    trained = [p for p in tower.parameters() if p.requires_grad]
    torch.autograd.backward([p.view_as(p) for p in trained], [torch.zeros_like(p) for p in trained])
    tower.zero_grad()

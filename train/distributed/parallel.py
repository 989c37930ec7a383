"""The towers on all ranks: gradients are averaged in one backward of a step, however many it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.distributed.world import World
from train.towers.tower import TwoTower


def wrap_towers(towers: TwoTower, compiled: bool, world: World) -> tuple[nn.Module, nn.Module]:
    """The towers, each on its own, so that gradients are averaged over ranks; one module for both sides stays one."""

    def wrapped(tower: nn.Module) -> nn.Module:
        if compiled:
            tower.compile()
        if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return tower
        devices = [world.device] if world.device.type == "cuda" else None
        parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False  # set here, as the argument changes its name between versions of torch
        _order_buckets(parallel)
        return parallel

    x_tower = wrapped(towers.x_tower)
    return x_tower, x_tower if towers.y_tower is towers.x_tower else wrapped(towers.y_tower)


@contextmanager
def no_gradient_sync(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Gradients stay this rank's own, but in a backward after `sync_in_next_backward`."""
    with ExitStack() as stack:
        for tower in towers:
            if isinstance(tower, DistributedDataParallel):
                stack.enter_context(tower.no_sync())
        yield


def sync_in_next_backward(towers: Iterable[nn.Module]) -> None:
    """DDP expects its backward right after a forward, and is told so there; here others may lie between."""
    for tower in dict.fromkeys(towers):
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])


def _order_buckets(tower: DistributedDataParallel) -> None:
    """Buckets of all steps in the order of the parameters, the last first.

    DDP starts with one bucket and divides it anew, by the first backward, in the forward after that. The sum of three
    or more ranks is rounded by the place in a bucket, so a resumed run would differ in its first step. This backward
    of zeros comes before any step.
    """
    sync_in_next_backward([tower])
    trained = [p for p in tower.parameters() if p.requires_grad]
    torch.autograd.backward([p.view_as(p) for p in trained], [torch.zeros_like(p) for p in trained])
    tower.zero_grad()

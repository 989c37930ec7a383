"""The towers on all ranks: gradients are averaged in one backward of a step, however many it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.distributed.world import World
from train.towers.tower import TwoTower


def in_parallel(towers: TwoTower, compiled: bool, world: World) -> tuple[nn.Module, nn.Module]:
    """The towers, each on its own, so that gradients are averaged over ranks; one module for both sides stays one."""

    def wrapped(tower: nn.Module) -> nn.Module:
        if compiled:
            tower.compile()
        if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return tower
        devices = [world.device] if world.device.type == "cuda" else None
        parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False  # set here, as the argument changes its name between versions of torch
        return parallel

    x_tower = wrapped(towers.x_tower)
    return x_tower, x_tower if towers.y_tower is towers.x_tower else wrapped(towers.y_tower)


@contextmanager
def without_averages(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Gradients stay this rank's own, but in a backward after `average_in_next_backward`."""
    with ExitStack() as stack:
        for tower in towers:
            if isinstance(tower, DistributedDataParallel):
                stack.enter_context(tower.no_sync())
        yield


def average_in_next_backward(towers: Iterable[nn.Module]) -> None:
    """DDP expects its backward right after a forward, and is told so there; here others may lie between."""
    for tower in dict.fromkeys(towers):
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])

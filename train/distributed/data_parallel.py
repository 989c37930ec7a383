"""Data parallelism of the towers: gradients are averaged over ranks once per step, in the last backward of a tower."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dyad.train.distributed.world import World
from dyad.train.towers.tower import TwoTower

Pair = tuple[nn.Module, nn.Module]  # an x tower and a y tower


def wrap_losses(losses: Sequence[TwoTower], compiled: bool, world: World) -> tuple[list[Pair], Sequence[nn.Module]]:
    """Return the towers of each loss as they are to be run, and what the other functions of this file take.

    The towers of one loss are wrapped as by `wrap_towers`. Those of several losses, which may share weights, are run as
    they are; their gradients are averaged by `average_now`. compiled: whether to torch.compile them first.
    """
    if len(losses) == 1:
        pair = wrap_towers(losses[0], compiled, world)
        return [pair], pair
    pairs: list[Pair] = [(towers.x_tower, towers.y_tower) for towers in losses]
    distinct = list(dict.fromkeys(tower for pair in pairs for tower in pair))
    for tower in distinct if compiled else ():
        tower.compile()
    return pairs, [_wrapped(nn.ModuleList(distinct), world)]


def wrap_towers(towers: TwoTower, compiled: bool, world: World) -> Pair:
    """Wrap the x and the y tower in DistributedDataParallel, each on its own, and return both.

    A shared tower is wrapped once. Towers without trainable parameters, and all towers of a single process, are
    returned unwrapped. compiled: whether to torch.compile them first.
    """
    found = {tower: tower for tower in (towers.x_tower, towers.y_tower)}
    for tower in found:
        if compiled:
            tower.compile()
        found[tower] = _wrapped(tower, world)
    return found[towers.x_tower], found[towers.y_tower]


def _wrapped(tower: nn.Module, world: World) -> nn.Module:
    if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
        return tower
    devices = [world.device] if world.device.type == "cuda" else None
    parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
    # The step synchronises buffers itself. An attribute, as versions of torch disagree on the name of the argument.
    parallel.broadcast_buffers = False
    average_now([parallel])  # chooses the final gradient buckets
    tower.zero_grad()
    return parallel


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


def average_now(towers: Iterable[nn.Module]) -> None:
    """Average the gradients of wrapped towers over ranks, by a backward of zeros. Every rank must call it.

    DistributedDataParallel begins with one bucket and regroups the parameters after the first backward. The position in
    a bucket decides how the sum over three or more ranks is rounded; without such a call before any step, the first
    step of a resumed run would differ in the last bits from the same step of an uninterrupted run.
    """
    for tower in towers:
        if isinstance(tower, DistributedDataParallel):
            sync_in_next_backward([tower])
            trained = [p for p in tower.parameters() if p.requires_grad]
            torch.autograd.backward([p.view_as(p) for p in trained], [torch.zeros_like(p) for p in trained])

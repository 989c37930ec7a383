"""Data parallelism of the towers: gradients are averaged over ranks once per step, in or after the last backward pass.

Those of one loss are averaged in a tower's last backward pass, those of several losses after it. Towers are wrapped in
DistributedDataParallel (DDP) here, or were sharded before (FSDP2, sharding.py). With compile=true they also go through
torch.compile here; a sharded tower has compiled layers instead.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dyad.train.distributed.sharding import FINALIZED
from dyad.train.distributed.world import World
from dyad.train.towers.tower import TwoTower

Pair = tuple[nn.Module, nn.Module]  # an x tower and a y tower


def wrap_towers_of_terms(
    losses: Sequence[TwoTower], compiled: bool, world: World
) -> tuple[list[Pair], Sequence[nn.Module]]:
    """Return (x tower, y tower) of each loss, and the modules to give to `no_gradient_sync` and `average_now`.

    losses: the towers of each loss. With one loss, its towers are wrapped as by `wrap_towers`, and the wrapped towers
    are also the modules. Towers of several losses may share weights: they stay unwrapped, and the only module is an
    nn.ModuleList of all towers, wrapped if there are several ranks and trained weights. `average_now` averages its
    gradients after the backward of the last loss. compiled: whether to torch.compile the towers first, in place. Every
    rank must call it.
    """
    if len(losses) == 1:
        pair = wrap_towers(losses[0], compiled, world)
        return [pair], pair
    whole = _wrapped(nn.ModuleList(_compile_distinct(losses, compiled)), world)
    return [(towers.x_tower, towers.y_tower) for towers in losses], [whole]


def wrap_towers(towers: TwoTower, compiled: bool, world: World) -> Pair:
    """Wrap the x and the y tower each in a DistributedDataParallel, and return (x tower, y tower).

    A shared tower is wrapped once. Sharded towers, towers without trainable parameters, and all towers of a single
    process are returned unwrapped. compiled: whether to torch.compile the towers first, in place. Every rank must call
    it: a wrapped tower gets the weights of rank 0, and its gradients are reset.
    """
    found = {tower: _wrapped(tower, world) for tower in _compile_distinct([towers], compiled)}
    return found[towers.x_tower], found[towers.y_tower]


def _compile_distinct(losses: Sequence[TwoTower], compiled: bool) -> list[nn.Module]:
    """If `compiled`, torch.compile the towers of all losses in place; return the towers, each shared tower once.

    Compilation itself happens when a tower first runs. Sharded towers are not compiled here.
    """
    found = list(dict.fromkeys(tower for towers in losses for tower in (towers.x_tower, towers.y_tower)))
    for tower in found:
        if compiled and not isinstance(tower, FSDPModule):  # a sharded tower has compiled layers
            tower.compile()
    return found


def _wrapped(tower: nn.Module, world: World) -> nn.Module:
    """Return `tower` in a DistributedDataParallel, or itself if sharded, without trained weights, or with one rank."""
    trained = any(p.requires_grad for p in tower.parameters())
    if world.size == 1 or isinstance(tower, FSDPModule) or not trained:
        return tower
    # torch warns of 1×1 kernels in channels_last: their strides differ, but not their order in memory
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    devices = [world.device] if world.device.type == "cuda" else None
    parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
    # The step synchronises buffers itself. An attribute, as versions of torch disagree on the name of the argument.
    parallel.broadcast_buffers = False
    average_now([parallel])  # chooses the final gradient buckets
    tower.zero_grad()
    return parallel


@contextmanager
def no_gradient_sync(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which a backward pass does not average gradients over ranks, with two exceptions.

    `backward` with last=True averages those of towers that are wrapped or sharded one by one; `average_now` averages
    those of wrapped modules, which the towers of several losses need. towers: the modules that `wrap_towers_of_terms`
    returned second. A sharded tower does not average gradients after the block either, until the next `backward` with
    last=True.
    """
    with ExitStack() as stack:
        for tower in towers:
            if isinstance(tower, DistributedDataParallel):
                stack.enter_context(tower.no_sync())
            elif isinstance(tower, FSDPModule):
                tower.set_requires_gradient_sync(False)
        yield


def backward(
    towers: Sequence[nn.Module], embeddings: Sequence[Tensor], gradients: Sequence[Tensor], last: bool
) -> None:
    """Propagate the gradients of embeddings back to the weights of the towers that made them.

    towers: the x tower and the y tower, as `wrap_towers` or `wrap_towers_of_terms` returned them. embeddings: those of
    x and y that require gradients, (n, D). gradients: the gradient of each, (n, D). last: whether this is the last
    backward of the step: then it averages the gradients of wrapped and sharded towers over ranks, even inside
    `no_gradient_sync`. Every rank must call the last one and, with a sharded tower, each. Gradients of towers of
    several losses, which are not wrapped one by one, are left to `average_now`.

    DistributedDataParallel prepares the averaging in a forward, for the backward that follows. In a step with several
    chunks, forwards of other chunks may lie between the two, so the averaging is prepared explicitly here. A sharded
    tower averages each layer as soon as the gradient of the layer is complete. If x and y share the tower, that is
    after the whole backward or, in a torch without finalize_backward, once for each of the two embeddings.
    """
    distinct = list(dict.fromkeys(towers)) if last else []
    for tower in distinct:
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])
        elif isinstance(tower, FSDPModule):
            tower.set_requires_gradient_sync(len(distinct) == len(towers) or not FINALIZED)
    torch.autograd.backward(embeddings, gradients)
    for tower in distinct:
        if isinstance(tower, FSDPModule) and FINALIZED:
            tower.set_requires_gradient_sync(True)
            tower.finalize_backward()


def average_now(towers: Iterable[nn.Module]) -> None:
    """Average the gradients of wrapped towers over ranks, by a backward of zeros. Every rank must call it.

    towers: modules, of which those that are not wrapped in DistributedDataParallel are passed over. `_wrapped` calls it
    before any step too: DistributedDataParallel begins with one bucket and regroups the parameters after the first
    backward, and the position in a bucket decides how the sum over three or more ranks is rounded. Without that call
    the first step of a resumed run would differ in the last bits from the same step of an uninterrupted run.
    """
    for tower in towers:
        if isinstance(tower, DistributedDataParallel):
            tower.reducer.prepare_for_backward([])
            trained = [p for p in tower.parameters() if p.requires_grad]
            torch.autograd.backward([p.view_as(p) for p in trained], [torch.zeros_like(p) for p in trained])

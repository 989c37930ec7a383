"""Try the objective of a plugin on several ranks before the first step.

An objective that sums over a rank's own columns only, instead of those of all ranks, would train with another loss for
every number of ranks, and no error would show it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.distributed.world import World, gather_objects
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.options.common import ObjectiveOptions

ROWS, WIDTH = 8, 16  # random rows of a rank, and their width
TOLERANCE = 1e-5  # relative to the loss, and to the largest gradient; both are computed in float32


def compare_with_one_rank(options: ObjectiveOptions, build: Callable[[], Objective], world: World) -> None:
    """Compare loss, gradients and buffers of an objective on random rows with those that one rank gets from all rows.

    options: the options of the objective. build: returns a new objective with these options. Every rank must call it.
    Raises ConfigError, with both losses, on all ranks if they or the gradients differ by more than TOLERANCE, or with
    the name of a buffer, such as a running mean, that does. Does nothing for one rank, for objectives of Dyad, for
    options with exact=False, and for objectives whose inputs are not pairs.
    """
    of_plugin = not type(options).__module__.startswith("dyad.")
    if world.size == 1 or not of_plugin or not options.exact or options.inputs != "pairs":
        return
    shared = build().to(world.device)
    total, own = ROWS * world.size, slice(ROWS * world.rank, ROWS * (world.rank + 1))
    x_BD, y_BD = torch.randn(2, total, WIDTH, generator=torch.Generator().manual_seed(0)).to(world.device)
    keys_B = torch.arange(total, device=world.device)
    alone = copy.deepcopy(shared)
    loss, gradients_B2D = _value(shared, x_BD[own], y_BD[own], keys_B[own])
    dist.all_reduce(loss, group=world.group)
    with _alone(world):
        want, want_B2D = _value(alone, x_BD, y_BD, keys_B)
    got, difference = loss / world.size, (gradients_B2D / world.size - want_B2D[own]).abs().max()
    largest = torch.stack([difference, (got - want).abs()])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.group)
    limits = TOLERANCE * torch.stack([want_B2D.abs().max(), want.abs()]).clamp(min=1e-3)
    if not bool((largest <= limits).all()):
        raise ConfigError(
            f"objective={options.name}: on {total} random pairs {world.size} processes have the loss {got.item():.6g} "
            f"and one process {want.item():.6g}; gradients differ by up to {largest[0].item():.2g}. Its sums must go "
            "over the columns of all ranks, and its mean over all rows: CONTRIBUTING.md, An objective. If it is meant "
            "to differ, set exact: ClassVar[bool] = False in its options"
        )
    state = zip(shared.named_buffers(), alone.buffers(), strict=True)
    differing = [name for (name, got), want in state if not _equal(got, want)]
    if found := next((names[0] for names in gather_objects(differing, world) if names), None):
        raise ConfigError(
            f"objective={options.name}: on {total} random pairs its buffer '{found}' is another one on {world.size} "
            "processes than on one. Compute it from the rows of all ranks, such as batch.rows.sum_(of_own_rows) / "
            "batch.rows.total"
        )


def _equal(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got.double(), want.double(), TOLERANCE, TOLERANCE, True)


def _value(objective: Objective, x_bD: Tensor, y_bD: Tensor, ids_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, 0-d, and its gradients by x_bD and y_bD, stacked to (b, 2, D).

    ids_b: int64 (b,), used as sample ids and as content keys of the rows.
    """
    sides = [e.clone().requires_grad_() for e in (x_bD, y_bD)]
    loss = objective(*sides, sample_ids_b=ids_b, x_keys=ids_b, y_keys=ids_b).loss
    gradients = torch.autograd.grad(loss, sides, materialize_grads=True)
    return loss.detach().float(), torch.stack(gradients, 1)


@contextmanager
def _alone(world: World) -> Iterator[None]:
    """Context manager in which this process is the only rank, also for code that calls torch.distributed directly.

    Every rank must enter it, as process groups are made.
    """
    groups: list[Any] = [dist.new_group([rank]) for rank in range(world.size)]
    default: Any = dist.GroupMember  # where torch keeps the default group
    whole, default.WORLD = default.WORLD, groups[world.rank]
    try:
        yield
    finally:
        default.WORLD = whole
        dist.destroy_process_group(groups[world.rank])

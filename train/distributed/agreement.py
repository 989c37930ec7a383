"""What a user caused stops every process at the same place, and is told once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from data.errors import ExitCode, Preempted, UserError
from train.distributed.world import World, all_reduce_sum, broadcast_object
from train.signals import STARTUP

T = TypeVar("T")


def raise_on_all(world: World, work: Callable[[], T]) -> T:
    """work() of this rank. Call on every rank; what `work` does together must be the same everywhere.

    A UserError on any rank ends it on all, with that exit code; the first rank that has one brings the message. So does
    a request to stop any of them before there is anything to save.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as raised:
        error = raised
    if error is None and STARTUP.stop_requested():
        error = Preempted()
    codes_W = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    codes_W[world.rank] = 0 if error is None else int(error.exit_code)
    failed = all_reduce_sum(codes_W, world).nonzero()[:, 0].tolist()
    if failed:
        if error is None or world.rank != failed[0]:
            error = UserError()
            error.exit_code = ExitCode(int(codes_W[failed[0]]))
        error.everywhere = True
        raise error
    return result  # type: ignore[return-value]  # None only where T is


def from_rank_0(world: World, work: Callable[[], T]) -> T:
    """work() of rank 0, small and picklable, on every rank."""
    return broadcast_object(rank_0_only(world, work), world)  # type: ignore[return-value]  # rank 0 has it


def rank_0_only(world: World, work: Callable[[], T]) -> T | None:
    """work() on rank 0 while the others wait; None there."""
    return raise_on_all(world, work if world.rank == 0 else lambda: None)


def rank_0_first(world: World, work: Callable[[], T]) -> T:
    """work() of this rank; the others begin when rank 0 is through, and find the files that it made."""
    first = rank_0_only(world, work)
    rest = raise_on_all(world, work if world.rank > 0 else lambda: None)
    return first if world.rank == 0 else rest  # type: ignore[return-value]  # each rank has worked once

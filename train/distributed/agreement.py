"""Runs work that may fail on one rank only, so that all ranks stop at the same point and one rank prints the error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from dyad.data.base.errors import ExitCode, Preempted, UserError
from dyad.train.distributed.signals import STARTUP
from dyad.train.distributed.world import World, all_reduce_sum, broadcast_object

T = TypeVar("T")


def raise_on_all(world: World, work: Callable[[], T]) -> T:
    """Call work() and return its result on this rank; if it raised a UserError on any rank, raise on all ranks.

    Every rank must call it, and communication between ranks inside `work` must be the same on every rank. All ranks
    raise with the exit code of the lowest rank that failed; only the error of that rank has a message. A stop signal
    (SIGTERM, SIGUSR1, SIGHUP) that a rank received before training began counts as an error of that rank (Preempted).
    """
    result, error = None, None
    try:
        result = work()
    except UserError as raised:
        error = raised
    if error is None and STARTUP.stop_requested():
        error = Preempted()
    # One element per rank, summed over ranks: afterwards every rank has the exit codes of all.
    codes_W = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    codes_W[world.rank] = 0 if error is None else int(error.exit_code)
    failed = all_reduce_sum(codes_W, world).nonzero()[:, 0].tolist()
    if failed:
        if error is None or world.rank != failed[0]:
            error = UserError()  # without a message: the lowest failed rank prints its own
            error.exit_code = ExitCode(int(codes_W[failed[0]]))
        error.everywhere = True
        raise error
    return result  # type: ignore[return-value]  # None only where T is


def from_rank_0(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, which must be small and picklable, on every rank.

    Every rank must call it. An error of rank 0 is raised on all ranks, as in raise_on_all.
    """
    return broadcast_object(rank_0_only(world, work), world)  # type: ignore[return-value]  # rank 0 has it


def rank_0_only(world: World, work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the other ranks wait; rank 0 gets its result, the others None.

    Every rank must call it. An error of rank 0 is raised on all ranks, as in raise_on_all.
    """
    return raise_on_all(world, work if world.rank == 0 else lambda: None)


def rank_0_first(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0, then on all other ranks, and return each rank's own result.

    So the other ranks find the files that rank 0 has written. Every rank must call it. An error of any rank is raised
    on all ranks, as in raise_on_all.
    """
    return _in_two_turns(world, work, first=world.rank == 0)


def node_first(world: World, work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each machine, then on all other ranks, and return each rank's own result.

    So one process of a machine downloads, and the others read its files. Every rank must call it. An error of any rank
    is raised on all ranks, as in raise_on_all.
    """
    return _in_two_turns(world, work, first=os.environ.get("LOCAL_RANK", "0") == "0")


def _in_two_turns(world: World, work: Callable[[], T], first: bool) -> T:
    """Run `work` on the ranks that pass first=True, then on the others, and return each rank's own result."""
    of_first = raise_on_all(world, work if first else lambda: None)
    of_others = raise_on_all(world, work if not first else lambda: None)
    return of_first if first else of_others  # type: ignore[return-value]  # each rank has worked once

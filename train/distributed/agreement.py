"""Run work that may fail on one rank only, so that all ranks stop at the same point and one rank prints the error."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from threading import Event, Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from dyad.data.base.errors import ExitCode, Preempted, UserError
from dyad.train.distributed.signals import STARTUP
from dyad.train.distributed.world import World, all_reduce_sum, broadcast_object, gather_objects

T = TypeVar("T")
BUSY = -1  # in place of an exit code: this rank is still working
BEAT_SECONDS = 0.5  # between two exchanges of codes while some ranks work and others wait


def raise_on_all(world: World, work: Callable[[], T]) -> T:
    """Call work() and return its result on this rank; if it raised a UserError on any rank, raise on all ranks.

    Every rank must call it, and communication between ranks inside `work` must be the same on every rank. The lowest
    rank that failed raises its own error; every other rank raises a UserError with the same message and exit code, and
    with printed_elsewhere, as the rank that failed prints it.
    A stop signal (SIGTERM, SIGUSR1, SIGHUP) that a rank received before training began counts as an error of that rank
    (Preempted). Another type of error is raised on its rank alone; the other ranks then wait until `report_failures`
    (failures.py) ends them. Raises DistError, without calling work(), if `World.is_broken` says so.
    """
    return _agree(world, *_attempt(world, work))


def only_on(world: World, chosen: bool, work: Callable[[], T]) -> T | None:
    """Run `work` on the ranks that pass chosen=True while the others wait; return its result, on the others None.

    Every rank must call it. `work` may take any time, longer than the timeout of collectives too, as a thread of each
    working rank reports to the others every BEAT_SECONDS. So `work` must not communicate between ranks itself. An error
    of any rank is raised on all ranks, as in raise_on_all.
    """
    if world.size == 1 or not chosen:
        return _agree(world, *_attempt(world, work if chosen else lambda: None))
    with _heartbeat(world):
        outcome = _attempt(world, work)
    return _agree(world, *outcome)


def from_rank_0(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, which must be small and picklable, on every rank.

    Every rank must call it. `work` may take any time and must not communicate, as in only_on. An error of rank 0 is
    raised on all ranks, as in raise_on_all.
    """
    return broadcast_object(rank_0_only(world, work), world)  # type: ignore[return-value]  # rank 0 has it


def rank_0_only(world: World, work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the other ranks wait; rank 0 gets its result, the others None.

    Every rank must call it. `work` may take any time and must not communicate, as in only_on. An error of rank 0 is
    raised on all ranks, as in raise_on_all.
    """
    return only_on(world, world.rank == 0, work)


def rank_0_first(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0, then on the first rank of each other machine, then on all other ranks.

    Returns each rank's own result. So a rank finds the files that rank 0 has written or, if machines share no cache,
    those that the first rank of its machine has written. Every rank must call it. `work` must not communicate. An error
    of any rank is raised on all ranks, as in raise_on_all.
    """
    return _in_turns(world, work, 0 if world.rank == 0 else 1 if is_first_of_machine() else 2)


def node_first(world: World, work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each machine, then on all other ranks, and return each rank's own result.

    So one process of a machine downloads, and the others read its files. Every rank must call it. An error of any rank
    is raised on all ranks, as in raise_on_all. `work` must not communicate.
    """
    return _in_turns(world, work, 0 if is_first_of_machine() else 1)


def is_first_of_machine() -> bool:
    """Whether this process has the lowest rank on its machine: LOCAL_RANK is 0, or unset without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def machine_index_and_count(world: World) -> tuple[int, int]:
    """Return (the index of this machine, the number of machines of the job). Every rank must call it.

    Machines are counted from 0 in the order of their lowest ranks.
    """
    firsts = list(accumulate(gather_objects(is_first_of_machine(), world)))
    return firsts[world.rank] - 1, firsts[-1]


def _in_turns(world: World, work: Callable[[], T], turn: int) -> T:
    """Run `work` on the ranks of turn 0, then on those of turn 1, then of turn 2; return each rank's own result.

    turn: that of this rank. Every rank must call it.
    """
    results = [only_on(world, turn == now, work) for now in range(3)]
    return results[turn]  # type: ignore[return-value]  # each rank has worked once


def _attempt(world: World, work: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Call work() and return (its result, None), or (None, the UserError that it raised).

    If it raised none but a stop was requested before training, returns (None, Preempted()). Raises DistError, without
    calling work(), if `World.is_broken` says so.
    """
    if world.is_broken():  # what went before may be undefined memory of an aborted collective: write none of it
        raise dist.DistError("the process group was aborted")
    try:
        result = work()
    except UserError as error:
        return None, error
    return (None, Preempted()) if STARTUP.stop_requested() else (result, None)


def _agree(world: World, result: T | None, error: UserError | None) -> T:
    """Return `result` if no rank passes an error; otherwise raise a UserError on all ranks, as in raise_on_all.

    Waits while another rank is inside `_heartbeat`. Every rank must call it.
    """
    code = 0 if error is None else int(error.exit_code)
    while BUSY in (codes := _exchange_codes(world, code)):
        pass
    if failed := [rank for rank, code in enumerate(codes) if code]:
        reason = gather_objects(str(error or ""), world)[failed[0]]
        if error is None or world.rank != failed[0]:
            error = UserError(reason)
            error.exit_code, error.printed_elsewhere = ExitCode(codes[failed[0]]), True
        error.everywhere = True
        raise error
    return result  # type: ignore[return-value]  # None only where T is


def _exchange_codes(world: World, code: int) -> list[int]:
    """Return the `code` that each rank passes, in rank order. Every rank must call it."""
    codes_W = torch.zeros(world.size, dtype=torch.int64)
    codes_W[world.rank] = code
    return all_reduce_sum(codes_W, world).tolist()


@contextmanager
def _heartbeat(world: World) -> Iterator[None]:
    """Context manager: tell the other ranks every BEAT_SECONDS that this rank still works.

    The other ranks wait in `_agree`, which exchanges codes until no rank sends BUSY. A thread of this rank takes part
    in these exchanges, with BUSY in place of an exit code.
    """
    over = Event()

    def beat() -> None:
        with suppress(RuntimeError):  # a rank is gone: the next collective of this rank raises as well
            while not over.wait(BEAT_SECONDS):
                _exchange_codes(world, BUSY)

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

"""When processes lose each other: one of them says it, in one line, and names who did not come.

Whoever fails first breaks off and leaves word in the store through which all have met: torchrun's, or that of rank 0.
Who then finds a collective broken breaks off and signs there too, waits a moment for the others, and reads: a cause
that another one tells already, or who has not signed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from threading import Event, Thread, current_thread, main_thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from data.errors import ExitCode, HardwareError, UserError, first_line
from train.distributed.world import World, abort_group, init_world, shutdown
from train.signals import STARTUP_SIGNALS

MOMENT = 2.0  # seconds in which the others sign; a broken collective breaks for all of them at about the same time
STEP = 10.0  # seconds in which they do when there is a cause to hear: some may be in the middle of a step
LOST = ("gloo", "pair closure", "onnection closed", "onnection reset")  # in messages that have no type of their own


class PeerFailure(HardwareError):
    """Other processes did not come to a collective; told: one of them, or another that came, says why."""


@contextmanager
def process_group(timeout: float) -> Iterator[World]:
    """The processes of this job, from their meeting to their parting. timeout: seconds a collective may wait."""
    world = init_world(timeout)
    try:
        with report_failures(world):
            yield world
    except BaseException as error:
        shutdown(world, broken=not _is_of_all(error))
        raise
    shutdown(world)


@contextmanager
def report_failures(world: World, place: Callable[[], str] = lambda: "a collective") -> Iterator[None]:
    """Inside, a collective that fails or waits longer than the timeout raises PeerFailure.

    It names the ranks that did not come to `place()`. What else goes wrong on one rank alone ends the others, too, with
    the same exit code and without a word. Blocks may be nested: the innermost speaks.
    """
    try:
        yield
    except BaseException as error:
        if world.size == 1 or isinstance(error, PeerFailure | KeyboardInterrupt) or _is_of_all(error):
            raise
        _obey_no_more()
        if _is_loss(error):
            raise _loss(world, place(), first_line(error), _meeting(world)) from None
        meeting = _meeting(world, Cause(world.rank, _exit_code(error), _text(error)))
        if meeting.cause and meeting.cause.rank != world.rank:
            raise _told_by_another(meeting.cause) from None
        raise


@dataclass(frozen=True)
class Cause:
    """The first error that is of a rank's own: the rank, the exit code, one line."""

    rank: int
    code: int
    text: str


@dataclass
class Meeting:
    """What the store says. signed: ranks that are there."""

    signed: set[int] = field(default_factory=set)
    cause: Cause | None = None


def _meeting(world: World, cause: Cause | None = None) -> Meeting:
    """Tell the cause, an error of this rank's own; break off; sign, and wait until all have.

    In a thread, which is left behind when the store hangs. Rank 0, which may be its host, leaves last.
    """
    meeting, told, start = Meeting(), Event(), time.monotonic()

    def is_time(more: float = 0.0) -> bool:
        return time.monotonic() < start + (STEP if cause or meeting.cause else MOMENT) + more

    def meet() -> None:
        with suppress(RuntimeError, ValueError, OSError):  # the store is gone
            try:
                store = _store()
                if cause and not _tell(store, cause):
                    return
            finally:
                told.set()
            _sign(store, "signed", world.rank)
            while len(meeting.signed) < world.size and is_time():
                meeting.signed = _signed(store, "signed")
                if store.check(["cause"]):
                    meeting.cause = Cause(**json.loads(store.get("cause")))
                time.sleep(0.02)
            _sign(store, "read", world.rank)
            while world.rank == 0 and len(_signed(store, "read")) < len(meeting.signed) and is_time():
                time.sleep(0.02)

    thread = Thread(target=meet, daemon=True)
    thread.start()
    if cause:
        told.wait(MOMENT)  # before the others hear of it, and ask why
    abort_group(world)
    while thread.is_alive() and is_time(more=1):
        thread.join(0.1)
    return meeting


def _tell(store: Store, cause: Cause) -> bool:
    """Unless another cause stands there already. False: this one does, since a block inside this one was here."""
    text = json.dumps(asdict(cause))
    if store.check(["cause"]) and store.get("cause") == text.encode():
        return False
    store.compare_set("cause", "", text)
    return True


def _sign(store: Store, page: str, rank: int) -> None:
    store.append(page, f"{rank},")  # pyright: ignore[reportAttributeAccessIssue]


def _signed(store: Store, page: str) -> set[int]:
    return {int(rank) for rank in store.get(page).decode().split(",") if rank}


def _store() -> Store:
    """A connection of its own to where the processes met: the group's may be waiting for something."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=MOMENT)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=False, timeout=limit, wait_for_workers=False
    )
    return PrefixStore(f"dyad/contact/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _loss(world: World, place: str, reason: str, meeting: Meeting) -> PeerFailure:
    """What a rank says to a broken collective; all know it, the first of those that came tells it."""
    if meeting.cause:
        return _told_by_another(meeting.cause)
    absent = [rank for rank in range(world.size) if rank not in meeting.signed]
    if not meeting.signed:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        who = f"rank 0 of {world.size}, or its machine, is gone: rank {world.rank} is alone at {place}"
        return PeerFailure(f"{who}, and nobody answers at {where} ({reason})")
    if absent:
        error = PeerFailure(
            f"{ranks(absent)} of {world.size} did not come to {place}: stopped, killed, or busy for longer than "
            f"dist.timeout ({reason})"
        )
    else:
        error = PeerFailure(f"all {world.size} ranks are there, but cannot reach each other at {place} ({reason})")
    error.told = world.rank != min(meeting.signed)
    return error


def ranks(which: list[int]) -> str:
    """ "rank 2", "ranks 0, 1 and 3"; at most 8 of them."""
    shown = [str(rank) for rank in which[:8]] + ([f"{len(which) - 8} more"] if len(which) > 8 else [])
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _told_by_another(cause: Cause) -> PeerFailure:
    error = PeerFailure(f"rank {cause.rank}: {cause.text}")
    error.told = True
    error.exit_code = ExitCode(cause.code)
    error.everywhere = cause.code == ExitCode.REQUEUE
    return error


def _text(error: BaseException) -> str:
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def _exit_code(error: BaseException) -> int:
    """What an error of one rank alone makes of the job. SystemExit: asked to stop before there is anything to save."""
    if isinstance(error, UserError):
        return int(error.exit_code)
    return ExitCode.REQUEUE if isinstance(error, SystemExit) else ExitCode.BUG


def _is_of_all(error: BaseException) -> bool:
    return isinstance(error, UserError) and error.everywhere


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
    )


def _obey_no_more() -> None:
    """torchrun asks all to stop when one has failed: they are about to, and must not call it a preemption."""
    if current_thread() is main_thread():
        for number in STARTUP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

"""Failure reporting between ranks: one rank prints one line with the reason, or with the ranks that are gone.

The first rank that fails writes its error to the TCPStore (torch's key-value store, of torchrun or of rank 0), sets the
alarm there, and aborts its process group. The listeners of the other ranks abort theirs, so that no rank waits in a
collective. Each rank then registers in the store, waits until the others have registered, and reads the store. If the
store has the error of a rank, the others exit with the same code and print nothing. If not, the ranks that have not
registered are reported as gone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread, current_thread, main_thread

import torch.distributed as dist

from dyad.data.base.errors import ExitCode, HardwareError, UserError, first_line
from dyad.train.distributed.listener import CONNECT_SECONDS, STUCK_SECONDS, Cause, Listener, ReportStore, poll_interval
from dyad.train.distributed.signals import STARTUP_SIGNALS
from dyad.train.distributed.world import World, abort_group, init_world, shutdown

# Seconds to wait for other ranks to register. A broken collective fails on all ranks at about the same time.
CLOSING_SECONDS = 0.2  # a process that dies closes its connections one after the other, that of the store perhaps last
REGISTER_SECONDS = 2.0
ANSWERED_SECONDS = 5.0  # for a rank whose listener has answered: it is alive, and on a busy machine notices late
# Seconds in which a process leaves its groups after an error; NCCL may take longer, and the error is printed only then.
SHUTDOWN_SECONDS = 5.0
# Parts of the messages of a lost connection that gloo raises as plain RuntimeError
CONNECTION_LOST = ("gloo", "pair closure", "onnection closed", "onnection reset")


class PeerFailure(HardwareError):
    """The error of a rank whose communication failed because another rank failed or is gone.

    Only one rank of the job prints a message: the rank whose own error was the cause, else the lowest that is left. On
    the others `printed_elsewhere` is True. If the TCPStore is gone, each rank that is left prints one. ranks: those
    that failed, are gone, or did not come.
    """


@contextmanager
def process_group(timeout: float) -> Iterator[World]:
    """Context manager: join the process group of this job, yield its World, and leave the group at the end.

    timeout: seconds that processes may take to join, and that communication between ranks may wait until `set_timeout`
    changes it. Every process must enter it; one without torchrun joins no group. During the block a Listener
    (listener.py) ends this process after a failure of another rank. Raises the errors of `init_world`, and
    HardwareError if the TCPStore does not answer. Errors in the block are handled by `report_failures`.
    """
    world = init_world(timeout)
    try:
        listener = Listener(world, timeout)
    except RuntimeError as error:
        shutdown(world, broken=True)
        raise HardwareError(f"rank {world.rank}: no connection to the store: {first_line(error)}") from error
    try:
        with report_failures(world):
            yield world
    except BaseException as error:
        # An error that all ranks raise together leaves the group intact. After any other error it must be aborted.
        broken = world.is_broken() or not getattr(error, "everywhere", False)
        if not broken:
            listener.stop_together()
        leaving = Thread(target=shutdown, args=(world, broken), daemon=True)
        leaving.start()
        leaving.join(SHUTDOWN_SECONDS)
        if not leaving.is_alive():  # otherwise the listener ends the process
            listener.stop()
        raise
    listener.stop_together()
    shutdown(world)


@contextmanager
def report_failures(world: World, stage: Callable[[], str] = lambda: "a collective") -> Iterator[None]:
    """Context manager: on an error in the block, make sure that all ranks end and that one of them prints the reason.

    An error of communication becomes PeerFailure, which names the ranks that failed or did not reach this stage; so
    does an error after an abort, as it may follow from undefined results of collectives. Otherwise an error that all
    ranks raise together passes unchanged; an error of this rank alone is written to the TCPStore (torch's key-value
    store), so that the other ranks exit with the same code and print nothing, and is raised again, or becomes
    PeerFailure if another rank wrote its error first. KeyboardInterrupt and errors of a single process always pass
    unchanged. stage: returns what this rank is doing, for the message. Blocks may be nested: the innermost one reports.
    From a reported error on, the process ignores SIGTERM, SIGUSR1 and SIGHUP.
    """
    try:
        yield
    except BaseException as error:
        reported = isinstance(error, (PeerFailure, KeyboardInterrupt)) or getattr(error, "reported", False)
        if world.size == 1 or reported:
            raise
        broken = world.is_broken()
        lost = isinstance(error, dist.DistError)
        lost |= isinstance(error, RuntimeError) and any(word in str(error) for word in CONNECTION_LOST)
        if getattr(error, "everywhere", False) and not broken:
            raise
        # torchrun sends SIGTERM to the ranks that survive a failure. That is no preemption, so it is ignored from here.
        if current_thread() is main_thread():  # only the main thread may set handlers
            for number in STARTUP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        if broken or lost:
            after = "" if lost else f"the process group was aborted, then {type(error).__name__}: "
            raise _peer_failure(world, stage(), after + first_line(error), _exchange_reports(world)) from None
        reports = _exchange_reports(world, _cause_of(error, world.rank))
        # Another rank failed first, and the error of this rank may follow from that.
        if reports.cause and reports.cause.rank != world.rank:
            raise _printed_by_another(reports.cause) from None
        error.reported = True  # type: ignore[attr-defined]  # enclosing blocks let it pass
        raise


@dataclass
class RankReports:
    """What the ranks of a failing job have written to the TCPStore (torch's key-value store).

    registered: the ranks whose main thread has noticed the failure. answered: the ranks whose listener thread
    (listener.py) has noticed it. cause: the first error that a rank wrote, None if no rank wrote one.
    """

    registered: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    cause: Cause | None = None


def _cause_of(error: BaseException, rank: int) -> Cause:
    """Return the Cause that this rank writes for `error`: exit code BUG, except for UserError and SystemExit."""
    if isinstance(error, UserError):
        return Cause(rank, int(error.exit_code), first_line(error))
    # SystemExit: this rank was asked to stop before there was anything to save
    code = ExitCode.REQUEUE if isinstance(error, SystemExit) else ExitCode.BUG
    return Cause(rank, code, f"{type(error).__name__}: {first_line(error)}")


def _exchange_reports(world: World, cause: Cause | None = None) -> RankReports:
    """Write this rank's error to the TCPStore, abort the process group, and return the reports of all ranks.

    cause: the error; None if only the connection to other ranks failed. This rank also registers as alive in the store
    (torch's key-value store), and waits until all ranks have registered, for about REGISTER_SECONDS at most,
    ANSWERED_SECONDS if the listener of a missing one has answered, or STUCK_SECONDS if a rank wrote an error. A daemon
    thread uses the store, and is abandoned if the store does not answer: the reports are then what was read before.
    """
    reports, alarm_raised, start, interval = RankReports(), Event(), time.monotonic(), poll_interval(world)

    def has_time(more: float = 0.0) -> bool:
        # with a cause, other ranks may first have to finish the computation of a step
        limit = ANSWERED_SECONDS if reports.answered - reports.registered else REGISTER_SECONDS
        limit = STUCK_SECONDS if cause or reports.cause else limit
        return time.monotonic() < start + limit + more

    def read_lists(store: ReportStore) -> None:
        reports.answered = store.registered("answered")
        reports.registered = store.registered("registered")

    def exchange() -> None:
        with suppress(RuntimeError, ValueError, OSError):  # the store is gone: `registered` stays empty
            try:
                if cause is None:
                    time.sleep(CLOSING_SECONDS)
                store = ReportStore(CONNECT_SECONDS)
                store.raise_alarm(cause)
            finally:
                alarm_raised.set()
            store.register("registered", world.rank)
            reports.cause = store.cause()
            while store.count("registered") < world.size and has_time():
                time.sleep(interval)
                reports.cause = reports.cause or store.cause()
                read_lists(store)
            read_lists(store)
            store.register("read", world.rank)
            # Rank 0 may host the store, so it leaves after all registered ranks have read it.
            while world.rank == 0 and store.count("read") < len(reports.registered) and has_time():
                time.sleep(interval)

    thread = Thread(target=exchange, daemon=True)
    thread.start()
    if cause:
        # The cause must be in the store before abort_group makes the other ranks fail and read it.
        alarm_raised.wait(CONNECT_SECONDS)
    abort_group(world)
    while thread.is_alive() and has_time(more=1):
        thread.join(0.1)
    return reports


def _peer_failure(world: World, stage: str, reason: str, reports: RankReports) -> PeerFailure:
    """Make the PeerFailure (error) of a rank whose communication with other ranks failed.

    All surviving ranks raise one, and the lowest of them prints it; none of them, if a rank wrote its own error, which
    that rank prints; each of them, if the TCPStore is gone. stage: what this rank was doing. reason: the first line of
    the error of the failed communication. reports: what the ranks wrote to the TCPStore.
    """
    if reports.cause:
        return _printed_by_another(reports.cause)
    if not reports.registered:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        who = f"rank 0 of {world.size}, or its machine, is gone: rank {world.rank} is alone at {stage}"
        error = PeerFailure(f"{who}, and nobody answers at {address} ({reason})")
        error.ranks = [0]
        return error
    absent = [rank for rank in range(world.size) if rank not in reports.registered]
    # An absent rank whose listener answered is busy or hangs. If other absent ranks are gone, name only these.
    absent = [rank for rank in absent if rank not in reports.answered] or absent
    if absent:
        error = PeerFailure(
            f"{list_ranks(absent)} of {world.size} did not come to {stage}: stopped, killed, or busy for longer than "
            f"dist.timeout, or dist.start_timeout before the first step ({reason})"
        )
    else:
        error = PeerFailure(f"all {world.size} ranks are there, but cannot reach each other at {stage} ({reason})")
    error.printed_elsewhere, error.ranks = world.rank != min(reports.registered), absent
    return error


def _printed_by_another(cause: Cause) -> PeerFailure:
    """Make the PeerFailure of a rank that ends because of `cause`: it has that exit code, and prints nothing."""
    text = cause.text.removeprefix(f"rank {cause.rank}: ")  # some messages begin with it
    error = PeerFailure(f"rank {cause.rank}: {text}")
    error.printed_elsewhere, error.ranks = True, [cause.rank]
    error.exit_code = ExitCode(cause.code)
    error.everywhere = cause.code == ExitCode.REQUEUE  # a requested stop, like Preempted: no failure of this rank
    return error


def list_ranks(ranks: list[int]) -> str:
    """Return one or more ranks as text: "rank 2" or "ranks 0, 1 and 3"; of more than 8, the first 8 and "… more"."""
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"

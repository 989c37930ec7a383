"""Loader processes: they obey the process that started them and nobody else, and are missed when they stop.

A scheduler sends its signal to every process of a job, a terminal to the whole group. The run answers it with a
checkpoint, and needs its loader until then: a worker that died of it would take the run along.

A worker that is killed, or lets the process that started it wait too long, ends that process with a HardwareError that
names it. torch's own timeout would not do: one who has taken half a batch from a stopped worker waits for the other
half without any. Hence signals: they end every wait.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import RawArray, active_children, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from data.connections import open_connections
from data.errors import HardwareError, UserError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LOOK = 0.5  # seconds between two looks for the parent
LIKELY = {-signal.SIGKILL: "Did memory run out?", -signal.SIGBUS: "Is /dev/shm full?"}
NONE = -1


class Source(Protocol[T_co]):
    """Makes a value of each entry. place: how an error names the item it is at, told without asking any storage."""

    def __getitem__(self, entry: Any, /) -> T_co: ...
    def place(self, item: int) -> str: ...


class Entries(Protocol):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


def served(
    source: Source[T], entries: Entries, *, workers: int, timeout: float, rank: int = 0, pin: bool = False
) -> Iterator[T]:
    """source[entry] of all entries, in their order, made ahead by worker processes; 0: made here.

    A UserError of the source is raised here, without a worker's traceback. HardwareError, wherever the main thread is
    at that moment, for a worker that is gone, and for one that is waited for longer than `timeout` seconds (0: never).
    pin: values have a method pin_memory.
    """
    if workers:  # the tokenizers library would say at every fork that it stops using threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    crew = Crew(workers, rank, source.place)
    loader = DataLoader(
        _Outcomes(source),
        batch_size=None,
        sampler=entries,
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=partial(_begin, crew.notes),
        pin_memory=pin,
        generator=torch.Generator(),  # otherwise the start of workers draws from the global generator
    )
    with crew.on_duty(loader) as outcomes:
        for number in range(len(entries)):
            with crew.due(number, timeout):
                outcome = next(outcomes)
            if isinstance(outcome.value, UserError):
                raise outcome.value
            yield outcome.value


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """A value, or the error that took its place. torch pins what has a method `pin_memory`."""

    value: T | UserError

    def pin_memory(self) -> _Outcome[Any]:
        return self if isinstance(self.value, UserError) else _Outcome(self.value.pin_memory())  # type: ignore[attr-defined]


class _Outcomes(Dataset[_Outcome[T]]):
    """torch would turn an exception of a worker into text with a traceback; as a value it arrives as it was."""

    def __init__(self, source: Source[T]) -> None:
        self.source = source

    def __getitem__(self, entry: Any) -> _Outcome[T]:
        try:
            return _Outcome(self.source[entry])
        except UserError as error:
            return _Outcome(error)


def _unchanged(outcome: Any) -> Any:
    return outcome


# ---- in the process that started them ------------------------------------------------------------------------------

_on_duty: list[Crew] = []
_lost: list[Crew] = []  # kept, for to take leave of a worker that was killed may take for ever


class Crew:
    """The workers of one loader. notes: shared with them, for each the item that it is at."""

    def __init__(self, size: int, rank: int, place: Callable[[int], str]) -> None:
        self.size, self.rank, self.place = size, rank, place
        self.notes = RawArray("q", [NONE] * size)
        self.error: HardwareError | None = None

    @contextmanager
    def on_duty(self, loader: DataLoader[T]) -> Iterator[Iterator[T]]:
        """What the loader makes. Inside, a worker that dies is an error at once."""
        others = active_children()
        self.outcomes = started(loader)
        started_now = [child for child in active_children() if child not in others]
        self.processes = sorted(started_now, key=lambda child: child.pid or 0)
        _on_duty.append(self)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, _miss)
        try:
            self.miss()
            yield self.outcomes
        finally:
            if self in _on_duty:
                _on_duty.remove(self)
            for process in self.processes:
                if _is_stopped(process):  # it would never hear that there is nothing left to do
                    process.kill()

    @contextmanager
    def due(self, number: int, seconds: float) -> Iterator[None]:
        """Inside, value `number` must come in so many seconds. Workers take turns."""
        self._raise()
        try:
            with _alarm(seconds if self.size else 0, lambda: self._late(number % self.size, seconds)):
                yield
        except Exception as error:  # torch catches ours and raises one of its own
            self._raise()
            if isinstance(error, OSError | EOFError):  # the connections of a dying one close before it is gone
                dying = wait([process.sentinel for process in self.processes], LOOK)
                for process in self.processes:
                    if process.sentinel in dying:
                        process.join()
                self.miss()
            raise

    def _raise(self) -> None:
        """Say again what somebody else, who lets no error pass, has heard."""
        if self.error:
            raise self.error from None

    def miss(self) -> None:
        """Raise HardwareError when one of them is gone."""
        for worker, process in enumerate(self.processes):
            if code := process.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                _give_up(f"{self._named(worker)} {how}. {LIKELY.get(code, 'Its own words are above.')}")

    def _late(self, due: int, seconds: float) -> NoReturn:
        """One that is stopped may hold up the others, so it is named rather than the one whose turn it is."""
        self.miss()
        stopped = [worker for worker, process in enumerate(self.processes) if _is_stopped(process)]
        how = "is stopped by a signal" if stopped else "hangs (is its storage gone?)"
        _give_up(
            f"{self._named([*stopped, due][0])} {how}: nothing came for {seconds:g} s. Raise data.timeout if a batch "
            "may take that long"
        )

    def _named(self, worker: int) -> str:
        item = self.notes[worker]
        where = "" if item == NONE else f", at {self.place(item)}"
        return f"rank {self.rank}: loader worker {worker} (process {self.processes[worker].pid}{where})"


def _give_up(message: str) -> NoReturn:
    """End all workers, since a stopped one would keep this process from ending, and raise."""
    error = HardwareError(message)
    for crew in _on_duty:
        crew.error = error
        for process in crew.processes:
            process.kill()
    _lost.extend(_on_duty)
    _on_duty.clear()
    raise error


def _miss(number: int, frame: FrameType | None) -> None:
    """Instead of torch's handler, whose error names no worker."""
    for crew in list(_on_duty):
        crew.miss()


@contextmanager
def _alarm(seconds: float, ring: Callable[[], None]) -> Iterator[None]:
    """ring() in the main thread, should it still be inside after so many seconds; 0: never."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: ring())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_stopped(process: BaseProcess) -> bool:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def started(loader: DataLoader[T]) -> Iterator[T]:
    """Its iterator. What signals come while it starts its workers wait, for them too: none dies before it is set up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a worker ---------------------------------------------------------------------------------------------------

_note: Callable[[int], None] | None = None


def at(item: int) -> None:
    """Say which item this process begins now."""
    if _note is not None:
        _note(item)


def _begin(notes: Any, worker: int) -> None:
    global _note
    _on_duty.clear()
    for inherited in list(open_connections()):  # they would stay open when our parent closes them, or dies
        inherited.close_here()
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    threading.Thread(target=_wait_for_parent, daemon=True).start()
    _note = partial(notes.__setitem__, worker)


def _wait_for_parent() -> None:
    """Go when it says so, or is gone: torch's own watch looks every five seconds.

    In a thread of its own, since only a waiting one is told who sent a signal.
    """
    parent = parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        told = signal.sigtimedwait(FROM_OUTSIDE, LOOK)
        if told is not None and told.si_pid == parent.pid:
            break
    os._exit(0)

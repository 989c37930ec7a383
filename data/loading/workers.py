"""DataLoader workers that ignore stop signals from outside, exit with their parent, and never fail silently.

A scheduler sends its stop signal to every process of a job, and a terminal to the whole process group. The trainer
answers such a signal with a checkpoint and needs its loader until then. So the workers ignore the signal.

A worker that is killed, or that keeps its parent waiting for too long, stops the parent with a HardwareError that names
the worker. torch's own timeout does not cover this: it applies only before the first byte of a batch, so a worker that
is stopped halfway through sending a batch blocks the parent for ever. Here signal handlers (SIGCHLD, SIGALRM) end every
wait.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import RawArray, active_children, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dyad.data.base.errors import HardwareError, UserError
from dyad.data.base.plugins import import_plugins, imported_plugins
from dyad.data.base.sockets import open_connections

T = TypeVar("T")
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_SECONDS = 0.5  # between two checks that the parent is alive
LIKELY_CAUSE = {-signal.SIGKILL: "Did memory run out?", -signal.SIGBUS: "Is /dev/shm full?"}
NO_ITEM = -1


def prefetched(
    make: Callable[[Any], T],
    entries: Sequence[Any],
    *,
    where: Callable[[int], str],
    workers: int,
    timeout: float,
    rank: int = 0,
    pin: bool = False,
    ahead: int = 2,
) -> Iterator[T]:
    """Yield make(entry) for each of `entries`, in order. Worker processes compute the values ahead.

    workers: number of processes; with 0 this process computes each value on demand. where(item): returns a name for
    error messages; item: the integer that a worker passed to `begin_item` last, such as a sample id. `where` must not
    read any storage. timeout: seconds that a worker may take for one item while its value is awaited; 0: no limit.
    `make` must therefore call `begin_item` for each item. rank: rank of this process, for messages. pin: whether values
    are copied to pinned memory; `make` must then return tensors, or objects with a method pin_memory. ahead: how many
    values each worker computes ahead.

    Raises a UserError of `make` without the worker's traceback. Raises HardwareError when a worker takes longer than
    `timeout` for one item and, wherever the main thread is at that moment, when a worker has died. In another thread
    there is no time limit, and a death may raise torch's RuntimeError. The workers end when the iterator is exhausted,
    closed or deleted. In the main thread a handler of SIGCHLD stays set.
    """
    if workers:  # otherwise the tokenizers library prints at every fork that it stops using threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    group = WorkerGroup(workers, rank, where)
    loader = DataLoader(
        _ErrorsAsValues(make),
        batch_size=None,
        sampler=entries,
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
        worker_init_fn=partial(_start_worker, group.current_items, group.begun, imported_plugins()),
        pin_memory=pin,
        generator=torch.Generator(),  # otherwise the start of workers draws from the global generator
    )
    with group.running(loader) as outcomes:
        for number in range(len(entries)):
            with group.waiting_for(number, timeout):
                value = next(outcomes)
            if isinstance(value, UserError):
                del outcomes  # ends the workers, although the error's traceback keeps this frame
                raise value
            yield value
            del value  # frees its shared memory before the next value comes


class _ErrorsAsValues(Dataset[T | UserError]):
    """Data set whose item is make(entry), or the UserError that it raises. An error is returned as a value because
    torch would turn a worker's exception into a text with its traceback."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make

    def __getitem__(self, entry: Any) -> T | UserError:
        try:
            return self.make(entry)
        except UserError as error:
            return error


# ---- in the parent process -----------------------------------------------------------------------------------------

_running: list["WorkerGroup"] = []
_failed: list["WorkerGroup"] = []  # kept alive: torch's `__del__` joins its workers, and a killed one can block forever


class WorkerGroup:
    """The worker processes of one loader, and the checks that they are alive and go on.

    size: number of workers. rank, where: for error messages, as in `prefetched`. Two attributes are arrays in shared
    memory with one entry for each worker, which the worker writes: current_items, the item that it is loading, and
    begun, the number of items that it has begun so far. processes: the workers, once `running` has started them. error:
    the HardwareError that stopped them, or None.
    """

    def __init__(self, size: int, rank: int, where: Callable[[int], str]) -> None:
        self.size, self.rank, self.where = size, rank, where
        self.current_items, self.begun = RawArray("q", [NO_ITEM] * size), RawArray("q", size)
        self.error: HardwareError | None = None

    @contextmanager
    def running(self, loader: DataLoader[T]) -> Iterator[Iterator[T]]:
        """Context manager that starts the worker processes of a torch DataLoader and yields the DataLoader's iterator.

        In the main thread, the death of a worker inside the block raises HardwareError, by a handler of SIGCHLD. It
        replaces torch's and stays set after the block; other threads set none. The end of the block does not end the
        workers, except those that a signal such as SIGSTOP has stopped: the others end when the iterator is deleted.
        """
        others = active_children()
        # Workers inherit the blocked signals, so that no signal ends a worker before it is set up.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            outcomes = iter(loader)  # starts the workers
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        started_now = [child for child in active_children() if child not in others]
        self.processes = sorted(started_now, key=lambda child: child.pid or 0)
        _running.append(self)
        if threading.current_thread() is threading.main_thread():  # only the main thread may set a handler
            signal.signal(signal.SIGCHLD, _on_child_exit)
        try:
            self.check_alive()
            yield outcomes
        finally:
            if self in _running:
                _running.remove(self)
            for process in self.processes:
                if _is_stopped(process):  # a stopped worker would never read torch's request to exit
                    process.kill()

    @contextmanager
    def waiting_for(self, number: int, seconds: float) -> Iterator[None]:
        """Context manager for a block that takes the value with index `number` from the loader.

        HardwareError is raised when the worker that makes this value begins no item for `seconds` (0: no limit; main
        thread only), or a worker dies. The workers make values in turn, so `number` tells which worker makes this
        value.
        """
        self._raise_earlier_error()
        self._seen = self.begun[:]
        try:
            with _alarm(seconds if self.size else 0, lambda: self._check_progress(number % self.size, seconds)):
                yield
        except Exception as error:  # torch catches ours and raises one of its own
            self._raise_earlier_error()
            if isinstance(error, OSError | EOFError):  # a dying worker closes its connections before it has exited
                dying = wait([process.sentinel for process in self.processes], POLL_SECONDS)
                for process in self.processes:
                    if process.sentinel in dying:
                        process.join()
                self.check_alive()
            raise

    def _raise_earlier_error(self) -> None:
        """Raise again the HardwareError that a signal handler raised for a dead or late loader worker, if any.

        Other code may have caught it.
        """
        if self.error:
            raise self.error from None

    def check_alive(self) -> None:
        """Raise HardwareError, naming the worker, when one of the loader's worker processes has died.

        That is: by a signal, or with an exit code other than 0. The workers of all running loaders of this process are
        then killed.
        """
        for worker, process in enumerate(self.processes):
            if code := process.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                _fail(f"{self._describe(worker)} {how}. {LIKELY_CAUSE.get(code, 'Its own words are above.')}")

    def _check_progress(self, expected: int, seconds: float) -> None:
        """Raise HardwareError if the worker with index `expected` has begun no item since the previous call.

        In the first call for a value: since the wait for it began. The workers of all running loaders are then killed.
        Called every `seconds` seconds while a value of this worker is awaited. If a signal such as SIGSTOP has stopped
        a worker, the message names the stopped worker instead, because it may hold up the others.
        """
        seen, self._seen = self._seen, self.begun[:]
        if seen[expected] != self._seen[expected]:
            return
        self.check_alive()
        stopped = [worker for worker, process in enumerate(self.processes) if _is_stopped(process)]
        how = "is stopped by a signal" if stopped else "hangs (is its storage gone?)"
        name = self._describe([*stopped, expected][0])
        _fail(f"{name} {how}: nothing came for {seconds:g} s. Raise data.timeout if a sample may take that long")

    def _describe(self, worker: int) -> str:
        """Return the name of a worker for a message: rank, index, process id and the item that it is loading."""
        item = self.current_items[worker]
        where = "" if item == NO_ITEM else f", at {self.where(item)}"
        return f"rank {self.rank}: loader worker {worker} (process {self.processes[worker].pid}{where})"


def _fail(message: str) -> NoReturn:
    """Kill the workers of all running loaders and raise HardwareError, also as `error` of each of these groups.

    A worker that a signal has stopped would otherwise keep this process from exiting.
    """
    error = HardwareError(message)
    for group in _running:
        group.error = error
        for process in group.processes:
            process.kill()
    _failed.extend(_running)
    _running.clear()
    raise error


def _on_child_exit(number: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD: raise HardwareError if a worker of a running loader has died.

    Replaces torch's handler, whose error does not name the worker.
    """
    for group in list(_running):
        group.check_alive()


@contextmanager
def _alarm(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls on_timeout() every `seconds` seconds until the block ends; 0: never.

    It uses SIGALRM. Outside the main thread on_timeout is never called.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: on_timeout())
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_stopped(process: BaseProcess) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process; False where there is no /proc."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


# ---- in a worker ---------------------------------------------------------------------------------------------------

_record_item: Callable[[int], None] | None = None  # None in a process that is no worker


def begin_item(item: int) -> None:
    """Record the item (such as a sample id) that this worker begins to load. Does nothing outside a worker process.

    An error about the worker can then name it, and the parent sees that the worker goes on.
    """
    if _record_item is not None:
        _record_item(item)


def _start_worker(current_items: Any, begun: Any, plugins: list[str], worker: int) -> None:
    """Set up a new loader worker process: close inherited sockets, block stop signals, exit with the parent.

    It also imports the parent's plugins. current_items, begun: the shared arrays of WorkerGroup, which `begin_item`
    writes. plugins: names of the plugins that the parent process has imported. worker: index of this worker.
    """
    global _record_item
    import_plugins(plugins)  # needed if the worker was not forked
    _running.clear()
    for inherited in list(open_connections()):  # otherwise sockets stay open when the parent closes them or dies
        inherited.close_here()
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.excepthook = partial(_print_unless_alone, sys.excepthook)

    def record(item: int) -> None:
        current_items[worker] = item
        begun[worker] += 1

    _record_item = record


def _print_unless_alone(printed: Callable[..., object], kind: type[BaseException], *error: Any) -> None:
    """Print the error of a worker by printed(kind, *error), unless it is a broken connection to the parent process.

    The parent was then killed, which another rank or the launcher reports.
    """
    if not issubclass(kind, ConnectionError | EOFError):
        printed(kind, *error)


def _exit_with_parent() -> None:
    """Wait, in a thread of a loader worker, until the parent process sends a stop signal or is gone; then exit.

    torch's own check for the parent runs only every five seconds. A thread is needed because only sigtimedwait, which
    waits, tells which process sent a signal.
    """
    parent = parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        received = signal.sigtimedwait(IGNORED_SIGNALS, POLL_SECONDS)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)

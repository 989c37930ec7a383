"""What the ranks of a failing job write to the TCPStore, and the thread of each rank that waits for it.

torch's TCPStore is a key-value store, in torchrun or in rank 0. Its keys here: "alarm" is set by every rank that fails;
"cause" is the first error of a rank; "answered" and "registered" list and count the ranks whose listener, and whose
main thread, has noticed the failure; "read" counts the ranks that have read the reports; "left/<n>" counts the ranks
that have left the n-th process group of the job without a failure.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from threading import Event, Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dyad.data.base.errors import ExitCode
from dyad.train.distributed.signals import leave_now
from dyad.train.distributed.world import World, abort_group

CONNECT_SECONDS = 2.0  # how long a connection to the TCPStore may take after a failure: its process may be gone
POLL_SECONDS = 1.0  # between two reads of the alarm by a listener: 1,000 ranks read 1,000 times a second
STUCK_SECONDS = 8.0  # after an alarm, a process ends whose main thread has not noticed it for so long
LEAVE_SECONDS = 20.0  # so much later a process ends whose main thread has noticed it: it may be writing a checkpoint


@dataclass(frozen=True)
class Cause:
    """The first error that a rank of the job raised for a reason of its own, not because another rank was gone.

    rank: the rank that raised it. code: the exit code of the error. text: the first line of its message.
    """

    rank: int
    code: int
    text: str


class ReportStore(PrefixStore):
    """A second connection to the job's TCPStore: that of the process group may be blocked by a waiting call.

    It connects to MASTER_ADDR:MASTER_PORT. seconds: how long connecting may take. Raises RuntimeError if nothing
    answers within that time; so do all methods when the store is gone later.
    """

    def __init__(self, seconds: float) -> None:
        host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=seconds)
        try:  # first by a socket of our own: for a store that is gone, torch prints 20 lines of C++
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError as error:
            raise RuntimeError(f"no store at {host}:{port}: {error}") from error
        store = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        # torchrun keeps one store over its restarts: keys of an earlier attempt must not be read
        super().__init__(f"dyad/contact/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def raise_alarm(self, cause: Cause | None) -> None:
        """Set the alarm, which the listeners of all ranks read, after writing `cause` unless a rank already wrote one.

        cause: the error of this rank; None if only its communication with another rank failed.
        """
        if cause:
            self.compare_set("cause", "", json.dumps(asdict(cause)))
        self.set("alarm", "1")

    def cause(self) -> Cause | None:
        """Return the first error that a rank of the job wrote, or None."""
        return Cause(**json.loads(self.get("cause"))) if self.check(["cause"]) else None

    def register(self, key: str, rank: int) -> None:
        """Append `rank` to the list stored under `key`, and add 1 to the count of its ranks."""
        self.append(key, f"{rank},")  # pyright: ignore[reportAttributeAccessIssue]
        self.add(f"{key}/count", 1)

    def registered(self, key: str) -> set[int]:
        """Return the ranks that `register` has appended under `key`."""
        return {int(rank) for rank in self.get(key).decode().split(",") if rank} if self.check([key]) else set()

    def count(self, key: str) -> int:
        """Return how often `register` was called with `key`, by all ranks, without reading the list."""
        return self.add(f"{key}/count", 0)


class Listener:
    """A thread that ends this process after a failure of any rank, even if the main thread waits in a collective.

    The thread polls the alarm in the TCPStore over a connection of its own. After an alarm it aborts the process groups
    of this rank, so that the main thread gets an error. Unless `stop` is called within STUCK_SECONDS (LEAVE_SECONDS
    more if the main thread has registered its failure), the thread ends the process, with the exit code of the first
    error that a rank wrote, or HARDWARE if none wrote one. If the store is gone, the thread only aborts the process
    groups. Does nothing with one rank. timeout: seconds that connecting to the store may take. The constructor starts
    the thread, and raises RuntimeError if the store does not answer.
    """

    _groups = count()  # numbers the process groups: a sweep makes several, and a rank may leave an old one late

    def __init__(self, world: World, timeout: float) -> None:
        self._world, self._over, self._left = world, Event(), f"left/{next(self._groups)}"
        self._thread = Thread(target=self._listen, daemon=True)
        if world.size > 1:
            self._store = ReportStore(timeout)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for other ranks: it will not end this process any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(CONNECT_SECONDS)

    def stop_together(self) -> None:
        """Stop the thread at the end of a run, or after an error that all ranks raise. Every rank must call it.

        Rank 0 waits until all have stopped, at most STUCK_SECONDS: the TCPStore may end with its process, and a rank
        that still listens would take that for a failure.
        """
        self.stop()
        end = time.monotonic() + STUCK_SECONDS
        if self._world.size > 1:
            with suppress(RuntimeError):
                left = self._store.add(self._left, 1)
                while self._world.rank == 0 and left < self._world.size and time.monotonic() < end:
                    time.sleep(poll_interval(self._world))
                    left = self._store.add(self._left, 0)

    def _listen(self) -> None:
        try:
            while not self._over.wait(POLL_SECONDS):
                if self._store.check(["alarm"]):
                    return self._end_soon()
        except RuntimeError:  # the store is gone, and with it rank 0 or torchrun
            abort_group(self._world)

    def _end_soon(self) -> None:
        """Abort the process groups, and end this process unless `stop` is called in time, as the class says.

        If the first error is that of this rank, it is printed before the end.
        """
        Thread(target=abort_group, args=(self._world,), daemon=True).start()  # NCCL's may take long
        code, rank, cause = ExitCode.HARDWARE, self._world.rank, None
        with suppress(RuntimeError):
            self._store.register("answered", rank)
            if cause := self._store.cause():
                code = ExitCode(cause.code)
        if self._over.wait(STUCK_SECONDS):
            return
        with suppress(RuntimeError):
            if rank in self._store.registered("registered") and self._over.wait(LEAVE_SECONDS):
                return
            if cause and cause.rank == rank:  # the other ranks leave it to this one to print
                print(f"error: {cause.text}", file=sys.stderr)
        leave_now(code)


def poll_interval(world: World) -> float:
    """Return the seconds between two rounds of reads of the TCPStore by a rank: all ranks make at most 400 a second."""
    return 0.02 * max(1.0, world.size / 8)

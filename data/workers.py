"""Loader processes obey the process that started them and nobody else.

A scheduler sends its signal to every process of a job, a terminal to the whole group. The run answers it with a
checkpoint, and needs its loader until then: a worker that died of it would take the run along.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def started(loader: Iterable[T]) -> Iterator[T]:
    """Its iterator. What signals come while it starts its workers wait, for them too: none dies before it is set up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_alone(worker: int) -> None:
    """For torch's `worker_init_fn`. A worker whose parent is gone ends by torch's own watch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """In a thread of its own, since only a waiting one is told who sent a signal."""
    while signal.sigwaitinfo(FROM_OUTSIDE).si_pid != os.getppid():
        pass
    os._exit(0)

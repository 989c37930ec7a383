"""Count the CPU cores that this process may use, and run a `map` on several of them."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from dyad.data.base.child_processes import end_with_parent
from dyad.data.base.plugins import import_plugins, imported_plugins


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, by its affinity; `core_quota` may be less."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota() -> float:
    """Return the number of CPU cores, maybe a fraction, to which the container's cgroup (v2) limits this process.

    It is infinity if there is no limit or no such cgroup.
    """
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # not in a control group, or "max"
        return math.inf


class _Process(SpawnProcess):
    """A new process that does not run the main module of this one again: a user's script may have no main guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def parallel_map(workers: int | None, useful: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Context manager that yields a function like `map`, which runs its calls in several processes.

    Results come in the order of the items. If one process is enough, the function is `map` itself, in this process.
    Else it takes all items at once, and functions and items must be picklable; the new processes import this process's
    plugins. An exception of a call is raised where its result is taken. workers: the largest number of processes; None:
    one per CPU core. useful: the largest number of processes that the work can keep busy.
    """
    processes = min(workers if workers is not None else available_cores(), useful)
    if processes < 2:
        yield map
        return
    # spawn: the caller may have threads (torch, fsspec), and a fork would copy their locks
    context, plugins = _Context(), imported_plugins()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(plugins,)) as pool:
        yield pool.map


def _start(plugins: list[str]) -> None:
    """Set up a new process. plugins: names of the plugins that the parent process has imported."""
    end_with_parent()
    import_plugins(plugins)

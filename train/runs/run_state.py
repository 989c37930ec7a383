"""run_state.json: how a run stands, for launch scripts and schedulers; and the lock that keeps a second run out.

{"status": "running" | "preempted" | "finished" | "failed", "step": …, "total_steps": …, "time": …, "error": …}
At the end also "checkpoint_seconds": writing them since the start, most of it behind the training. A run that
was killed still says "running". torchrun turns every exit code into 1, so requeue by this file.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from data.errors import ConfigError, HardwareError
from data.files import writable, write_json
from data.secrets import without_secrets

LOCK = ".lock"


class RunState:
    """Writes `run_state.json`. Rank 0 only; elsewhere a RunState of None writes nothing."""

    def __init__(self, run_dir: Path | None, step: int, total_steps: int) -> None:
        self._path = run_dir and run_dir / "run_state.json"
        self._step, self._total_steps = step, total_steps

    def write(self, status: str, step: int | None = None, **facts: str | float) -> None:
        """`step` finished optimiser steps; None: as last written. Raises HardwareError when it cannot be written."""
        self._step = self._step if step is None else step
        if self._path:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            state = {"status": status, "step": self._step, "total_steps": self._total_steps, "time": now}
            with writable(self._path):
                write_json(self._path, {**state, **without_secrets(facts)})


@contextmanager
def recorded(run_dir: Path | None, step: int, total_steps: int) -> Iterator[RunState]:
    """Says "running" now, and "failed" with the reason when the block raises. The block writes how it ended."""
    state = RunState(run_dir, step, total_steps)
    state.write("running", pid=os.getpid(), host=socket.gethostname())
    try:
        yield state
    except BaseException as error:
        with suppress(HardwareError):  # what went wrong first is what people are told
            state.write("failed", error=f"{type(error).__name__}: {error}")
        raise


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """`locked`, of a folder that is made if need be. After a refused start it goes again, when nothing is in it."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir.parent}: cannot make {run_dir}: {error.strerror}") from error
    with locked(run_dir):
        try:
            yield
        finally:
            if os.listdir(run_dir) == [LOCK]:
                (run_dir / LOCK).unlink()
                with suppress(OSError):  # another run is beside it by now
                    for folder in made:
                        folder.rmdir()


@contextmanager
def locked(run_dir: Path, other: str = "run.name") -> Iterator[None]:
    """Hold the run folder; the lock dies with this process, however that ends, and forked workers do not inherit it.

    other: what a second process would choose anew.

    Raises ConfigError when another live process, on this machine or on another that sees the folder, holds it.
    """
    with (run_dir / LOCK).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink == 0:
                raise BlockingIOError  # `claimed` by somebody else has removed it since it was opened
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise ConfigError(
                f"{run_dir} is in use by {owner}: wait for it, stop it, or choose another {other}"
            ) from error
        except OSError:
            pass  # a file system without locks: nothing to hold
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

"""run_state.json, the status of a run for launch scripts and schedulers; log.txt; and the lock of a run folder.

{"format": 1, "status": "running" | "preempted" | "finished" | "failed", "step": …, "total_steps": …, "first_step": …,
"time": …, "error": …, "hosts": […]}

step: that of the newest checkpoint; before the first one of a start, first_step. first_step: the step at which this
start began. hosts: after an error, the machines of the ranks that failed, if it was a hardware failure. While the run
goes on also "pid" and "host": the process that writes the file, and its machine. At the end of a run also
"checkpoint_seconds": seconds spent writing checkpoints since the start, most of them in the background; and "best": the
best checkpoint (best_record.py), or null. Of a run that checkpoint.patience has ended before total_steps also
"evaluations_since_best": how many evaluations in a row were not better. Of a run that began at a checkpoint named by
resume=, also "resumed_from": that name; a start that names it again goes on with the run. In a job of SLURM also "job":
its number, by which launch/slurm.sbatch knows that the job has begun the run. A run that was killed still says
"running". torchrun turns every exit code into 1, so decide by this file whether to requeue a job. The lock keeps a
second run out of a folder that is in use.
"""

import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import yaml
from yaml import YAMLError

from dyad.data.base.errors import ConfigError, HardwareError, printable
from dyad.data.base.files import write_errors, write_json
from dyad.data.base.secrets import without_secrets
from dyad.train.config import TrainConfig
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.folder import (
    CONFIG,
    FIRST_STEP,
    FORMAT,
    LENGTH,
    REPORT,
    RESUMED_FROM,
    SINCE_BEST,
    STATE,
    config_text,
    folder_of,
    recorded_state,
    resume_mode,
    resumed_keys,
    run_folder,
    steps,
)

LOCK, LOG = ".lock", "log.txt"


class RunState:
    """Writes run_state.json, the status of a run, on rank 0; if rank 0 is lost, on the rank that prints the error.

    As a context manager it writes "running" on entry, and "failed" with the error when the block raises; the error is
    appended to log.txt too, and is not suppressed. The block itself must write any other end ("finished" or
    "preempted") with `write`. Every rank may use it. run_dir: the run folder; None: nothing is written. step: finished
    optimiser steps at the start. total_steps: those of the whole run. rank: that of this process. hosts: the machine of
    each rank. resumed_from: the checkpoint that resume= named when the run began there, which is written with every
    status; None: the entry is left out.
    """

    def __init__(
        self,
        run_dir: Path | None,
        step: int,
        total_steps: int,
        rank: int = 0,
        hosts: Sequence[str] = (),
        resumed_from: str | None = None,
    ) -> None:
        self._path = run_dir and run_dir / STATE
        self._step, self._length = step, {"total_steps": total_steps, FIRST_STEP: step}
        self._rank, self._hosts, self._writes = rank, hosts, rank == 0
        kept = {RESUMED_FROM: resumed_from, "job": os.environ.get("SLURM_JOB_ID")}
        self._kept = {name: value for name, value in kept.items() if value is not None}

    def __enter__(self) -> "RunState":
        self.write_running()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        failed: Sequence[int] = ()
        if isinstance(error, HardwareError):
            failed = [self._rank] if error.ranks is None else error.ranks
            self._writes |= 0 in failed and not error.printed_elsewhere
        hosts = sorted({self._hosts[rank] for rank in failed if rank < len(self._hosts)})
        reason = f"{type(error).__name__}: {error}"
        with suppress(HardwareError):  # the first error is the one to report
            saved = steps(self._path.parent)[:1] if self._path else []  # rank 0, which knows the step, may be lost
            self.write("failed", *saved, error=reason, hosts=hosts)
        if self._path and self._writes:
            append_to_log(self._path.parent, f"failed: {reason}")

    def write_running(self, step: int | None = None) -> None:
        """Write the status "running" with this process. step and errors: as in `write`."""
        self.write("running", step, pid=os.getpid(), host=socket.gethostname())

    def write(self, status: str, step: int | None = None, **entries: str | float | list[str] | Best | None) -> None:
        """Replace run_state.json by one with this status ("running", "preempted", "finished" or "failed").

        step: finished optimiser steps; None keeps the last value. entries: further entries, whose texts lose
        credentials; entries of earlier calls are not kept. On ranks other than 0 nothing is written (unless rank 0 is
        lost), only `step` is kept. Raises HardwareError if writing fails.
        """
        self._step = self._step if step is None else step
        if self._path and self._writes:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            state = {"status": status, "step": self._step, **self._length, "time": now}
            with write_errors(self._path):
                write_json(self._path, {"format": FORMAT, **state, **self._kept, **without_secrets(entries)})


def is_finished(config: TrainConfig) -> bool:
    """Whether the run of this configuration is finished: run_state.json says so, and its last checkpoint exists.

    With tracking.report, report.html must exist too. False if resume_mode is not auto, or with allow_batch_change or
    allow_more_data of resume, which may lengthen the run. The run must have had the steps and epochs of `config`. If
    checkpoint.patience ended it early, `config` may ask for more steps, but must have the same checkpoint.best, and a
    patience of at most as many evaluations as were not better at the end.
    """
    folder, resume = run_folder(config), config.resume
    if resume_mode(config) != "auto" or resume.allow_batch_change or resume.allow_more_data:
        return False
    state = recorded_state(folder)
    whole = state.get("status") == "finished" and (not config.tracking.report or (folder / REPORT).exists())
    if not whole or type(step := state.get("step")) is not int or not folder_of(folder, step).exists():
        return False
    old, patience = resumed_keys(config) or {}, config.checkpoint.patience
    if type(since := state.get(SINCE_BEST)) is int and (config.steps or step) >= step:
        return patience is not None and patience <= since and config.checkpoint.best == old.get("checkpoint.best")
    return all(old.get(key) == getattr(config, key) for key in LENGTH)


def shorter_run(config: TrainConfig) -> Path | None:
    """Return the folder of a finished run with the training of `config`, but fewer steps; None if there is none.

    Only runs without run.name are considered: the hash in their folder names shows whether all other keys that change
    the weights are equal. Returns None too if `config` has a run.name, or if its run has a checkpoint already.
    """
    new = run_folder(config)
    for folder in [] if config.run.name or steps(new) else sorted(new.parent.glob(f"{new.name[:-8]}*")):
        with suppress(OSError, ValueError, TypeError, YAMLError):  # two lines of each YAML are parsed, not all of it
            found = dict(re.findall(r"^(steps|epochs): (\S+)$", config_text(folder / CONFIG), re.MULTILINE))
            length = {key: yaml.safe_load(found[key]) or 0 for key in found}
            other = replace(config, **{key: value or None for key, value in length.items()})
            shorter = all(length[key] <= (getattr(config, key) or 0) for key in LENGTH)
            whole = is_finished(other) and SINCE_BEST not in recorded_state(folder)  # a longer one would end there too
            if whole and shorter and other != config and run_folder(other) == folder:
                return folder
    return None


def append_to_log(run_dir: Path, text: str) -> None:
    """Append the lines of `text` to log.txt of a run folder, in the form that the run writes; ignore an OSError."""
    with suppress(OSError), (run_dir / LOG).open("a", encoding="utf-8") as file:
        file.writelines(f"{stamped(line)}\n" for line in printable(text).splitlines())


def stamped(line: str) -> str:
    """Return a line of log.txt: `line` with the time in front, in open_clip's format."""
    return f"{datetime.now():%Y-%m-%d,%H:%M:%S} | INFO | {line}"


@contextmanager
def locked_folder(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run folder (see `locked`) during the block; make the folder first if it does not exist.

    A folder that was made here and is still empty at the end is removed, with the parent folders that were made for
    it. Raises ConfigError if the folder cannot be made or is in use, HardwareError if its lock file cannot be opened.
    """
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
                with suppress(OSError):  # another run has made a folder beside it
                    for folder in made:
                        folder.rmdir()


@contextmanager
def locked(run_dir: Path, other: str = "run.name") -> Iterator[None]:
    """Hold an exclusive lock on an existing folder during the block. On a file system without locks, it locks nothing.

    The operating system releases the lock when this process dies, however that happens; forked workers do not inherit
    the lock. Raises ConfigError when another live process, on this machine or on another one that shares the folder,
    holds the lock; HardwareError when the lock file cannot be opened. This process itself is not kept out: it must not
    lock a folder twice. The lock file, LOCK, stays in the folder. other: the configuration key that the message of the
    ConfigError advises to change.
    """
    with write_errors(run_dir):  # O_NOFOLLOW: through a link, another file would be emptied
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        opened = os.fdopen(descriptor, "a+")  # raises OSError for a pipe
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink == 0:
                raise BlockingIOError  # the other process's locked_folder has removed the file since it was opened
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise ConfigError(f"{run_dir} is in use by {owner}: wait, stop it, or choose another {other}") from error
        except OSError:
            pass  # the file system has no locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

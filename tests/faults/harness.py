"""Real jobs, and what can be done to them from outside.

    def test_a_rank_is_killed(jobs: Jobs) -> None:
        job = jobs.start(2, {"steps": 1000, "checkpoint.every": 5})   # two processes; jobs.launch: by torchrun.sh
        job.reaches(7)                                                # its line is in metrics.jsonl
        job.signal(SIGKILL, rank=1)                                   # rank=None: every process of the job
        outcome = job.ends(within=30)                                 # fails when it does not; nothing stays behind
        assert outcome.codes == [4, -9] and not outcome.orphans
        assert newest_whole(job.run) >= 5                             # step of the newest checkpoint that verifies

`jobs.run(W, keys)` starts, waits for the end with code 0 and gives the run folder. keys override those of
helpers.tiny_runs: a model and shards for which a step takes milliseconds. job.run is tmp_path/runs/<run.name, or "a">:
start again with the same keys and it goes on. What its folder says: losses, records, state, without_timings of
helpers.tiny_runs; here newest_whole and digest. With observed=True it notes the samples of every step, for
`ids_of_steps(job.run)`. Further keywords of start and launch are environment variables; STOP is of faults.observed.
No run makes report.html (tiny_runs); only those of launch and module="train" count FLOPs (faults.lean). Files are
damaged with flip and cut; small_disk(folder, bytes) is a disk of that size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.cli import ROOT, Commands, Ended, Running
from helpers.tiny_runs import logged, wait_for

from dyad.data.base.errors import DataError
from dyad.train.run_folder.checkpoint import Checkpoint

EPOCH = 13  # steps of 32 in the shard of helpers.tiny_runs
# What a launched job trains: without imports for texts its processes start in two thirds of the time
IMAGES = {"task": "views", "model": "cnn", "model.text.name": "null", "model.text.kind": "open_clip"}
IMAGES |= {"data": "simclr", "objective": "simclr"}
GRACE = 12.0  # seconds in which loader processes see that their parent is gone: torch looks every five


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    codes: of each rank, or of the launch script alone (minus the signal); out: what all said; seconds: from `ends` to
    the end of all of these; orphans: command lines of processes of the job that were still there GRACE seconds later.
    """

    codes: list[int]
    out: str
    seconds: float
    orphans: list[str]

    @property
    def ended(self) -> Ended:
        """Of the one rank, or of the launch script."""
        (code,) = self.codes
        return Ended(code, self.out)


class Job(ABC):
    """A run in flight. run: its folder."""

    def __init__(self, run: Path) -> None:
        self.run = run

    @abstractmethod
    def ranks(self) -> list[int]:
        """Process ids of the trainers, by rank."""

    @abstractmethod
    def codes(self) -> list[int] | None:
        """None while it runs."""

    @abstractmethod
    def said(self) -> str: ...

    @abstractmethod
    def owns(self, pid: int) -> bool:
        """Whether a process is of this job, whoever its parent is now."""

    def processes(self) -> list[int]:
        return [pid for path in Path("/proc").glob("[0-9]*") if self._owns_living(pid := int(path.name))]

    def reaches(self, step: int) -> None:
        """Wait until that many lines are in metrics.jsonl."""
        self.until(lambda: logged(self.run, step), f"step {step}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that a living job does. It may be undone at once: seen is seen."""
        seen = False

        def seen_or_ended() -> bool:
            nonlocal seen
            ended = self.codes() is not None
            seen = condition()
            return seen or ended

        wait_for(seen_or_ended, what, 300)
        assert seen, f"ended with {self.codes()} before {what}:\n{self.said()}"

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """To one rank, or to every process."""
        for pid in self.processes() if rank is None else [self.ranks()[rank]]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def ends(self, within: float = 120) -> Outcome:
        """Wait for the end. Fails when it takes longer; then, too, no process is left."""
        start = time.monotonic()
        try:
            wait_for(lambda: self.codes() is not None, f"no end after {within} s", within)
            seconds = time.monotonic() - start
            while self.processes() and time.monotonic() < start + seconds + GRACE:
                time.sleep(0.05)
            orphans = [_read(Path(f"/proc/{pid}/cmdline")) for pid in self.processes()]
        finally:
            self.kill()
        print(f"{self.codes()} after {seconds:.1f} s\n{self.said()}")  # an assertion shows it shortened
        return Outcome(self.codes() or [], self.said(), seconds, orphans)

    def kill(self) -> None:
        """Kill -9 of the whole tree, as when the machine loses its power."""
        while self.processes():
            self.signal(signal.SIGKILL)
            time.sleep(0.01)
        wait_for(lambda: self.codes() is not None, "cannot be killed", 60)

    def _owns_living(self, pid: int) -> bool:
        with suppress(OSError):  # gone meanwhile
            return is_running(pid) and self.owns(pid)
        return False


class Forks(Job):
    """One process per rank, started by helpers.cli; each has a session, which its loader processes share."""

    def __init__(self, run: Path, running: list[Running]) -> None:
        super().__init__(run)
        self._running, self._codes = running, None

    def ranks(self) -> list[int]:
        return [r.pid for r in self._running]

    def codes(self) -> list[int] | None:
        if self._codes is None and not any(map(is_running, self.ranks())):
            self._codes = [r.wait().code for r in self._running]
        return self._codes

    def said(self) -> str:
        return "".join(r.out for r in self._running)

    def owns(self, pid: int) -> bool:
        return os.getsid(pid) in self.ranks()


class Launched(Job):
    """The launch script with all it starts; these have a token in their environment."""

    def __init__(self, run: Path, command: list[str], environment: Mapping[str, str], out: Path) -> None:
        super().__init__(run)
        self._token, self._out = f"DYAD_JOB={uuid.uuid4()}", out
        name, _, value = self._token.partition("=")
        settings = {"DYAD_EXTRAS": "demo", "OMP_NUM_THREADS": "1", name: value, **environment}
        with out.open("w") as file:
            self.script = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **settings}, stdout=file, stderr=subprocess.STDOUT
            )

    def ranks(self) -> list[int]:
        found = {}
        for pid in self.processes():
            rank = re.search(r"(?:^|\0)RANK=(\d+)", _read(Path(f"/proc/{pid}/environ")))
            if rank and os.getsid(pid) == pid:  # torchrun gives each trainer a session
                found[int(rank[1])] = pid
        return [found[rank] for rank in sorted(found)]

    def agent(self) -> int:
        """The process id of torchrun's agent."""
        return int(_read(Path(f"/proc/{self.ranks()[0]}/stat")).rpartition(")")[2].split()[1])

    def codes(self) -> list[int] | None:
        code = self.script.poll()
        return None if code is None else [code]

    def said(self) -> str:
        return self._out.read_text()

    def owns(self, pid: int) -> bool:
        return self._token in _read(Path(f"/proc/{pid}/environ"))


class Jobs:
    """Starts jobs, and kills those that a failing test leaves. arguments: as helpers.tiny_runs makes them of keys."""

    def __init__(self, commands: Commands, arguments: Callable[[dict[str, Any]], list[str]], folder: Path) -> None:
        self.folder, self._commands, self._arguments = folder, commands, arguments
        self._started: list[Job] = []

    def start(
        self,
        world: int,
        keys: Mapping[str, Any],
        *,
        observed: bool = False,
        module: str = "faults.observed",
        coming: Sequence[int] | None = None,
        **environment: str,
    ) -> Job:
        """One process per rank, without the seconds of imports.

        module: what runs `train`. coming: the ranks that do start; None: all.
        """
        _, *arguments = self._arguments({"run.name": "a", **keys})
        run = self._run(keys)
        if observed:
            environment = {"IDS": str(_notes(run)), **environment}
        job = Forks(run, self._commands.started(world, module, *arguments, coming=coming, **environment))
        self._started.append(job)
        return job

    def on_machine(self, rank: int, keys: Mapping[str, Any], on: Sequence[str], **environment: str) -> Launched:
        """A rank alone, without torchrun. on: words that run it on another machine, of which it is the only one."""
        _, *arguments = self._arguments({"run.name": "a", **keys})
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT), **environment}
        return self._launched([*on, sys.executable, "-m", "train", *arguments], keys, place)

    def launch(self, world: int, keys: Mapping[str, Any], on: Sequence[str] = (), **environment: str) -> Launched:
        """By launch/torchrun.sh, as a user does. on: words that run it on another machine."""
        _, *arguments = self._arguments({"run.name": "a", **keys})
        command = [*on, "bash", str(ROOT / "launch/torchrun.sh"), *arguments]
        return self._launched(command, keys, {"NPROC": str(world), **environment})

    def _launched(self, command: list[str], keys: Mapping[str, Any], environment: Mapping[str, str]) -> Launched:
        out = self.folder / f"launched-{len(self._started)}.txt"
        job = Launched(self._run(keys), command, environment, out)
        self._started.append(job)
        return job

    def run(self, world: int, keys: Mapping[str, Any], **more: Any) -> Path:
        """The run folder of a job that ran to its end undisturbed. more: as of `start`."""
        job = self.start(world, keys, **more)
        outcome = job.ends(within=900)
        assert outcome.codes == [0] * world and not outcome.orphans, outcome.out
        return job.run

    def run_killed(self, keys: Mapping[str, Any], after: int) -> Path:
        """The run folder of a job that was killed after `after` steps, and gone on with by the same command.

        Its second checkpoint is begun by then, so the first is whole.
        """
        job = self.start(1, {**keys, "run.name": "killed"}, STOP=f"SIGKILL@{after + 1}")
        wait_for(lambda: job.codes() is not None, "the kill", 300)
        job.kill()  # its loader processes, too
        assert job.codes() == [-signal.SIGKILL] and newest_whole(job.run), job.said()
        return self.run(1, {**keys, "run.name": "killed"})

    def close(self) -> None:
        for job in self._started:
            job.kill()

    def _run(self, keys: Mapping[str, Any]) -> Path:
        return Path(keys.get("run.dir", self.folder / "runs")) / keys.get("run.name", "a")


def ids_of_steps(run: Path) -> dict[int, list[int]]:
    """The sample ids of each step, in order, over all ranks: step → ids. Whoever took a step again took the same.

    A step counts where every rank of a start has begun it.
    """
    found: dict[int, list[int]] = {}
    for first in _notes(run).glob("*-0.jsonl"):
        ranks = [path.read_text().splitlines() for path in sorted(first.parent.glob(f"{first.name[:-8]}-*.jsonl"))]
        for lines in zip(*ranks, strict=False):
            notes = [json.loads(line) for line in lines]
            step, world = notes[0]["step"], notes[0]["world"]
            assert {(note["step"], note["world"]) for note in notes} == {(step, world)}
            if world == len(notes):
                ids = sorted(sample for note in notes for sample in note["ids"])
                assert found.setdefault(step, ids) == ids, f"step {step} had other samples than before"
    return dict(sorted(found.items()))


def every_sample_once_an_epoch(run: Path, steps: int, epoch: int = EPOCH) -> None:
    """epoch: steps of a pass; what a batch cannot fill stays out of it."""
    ids = ids_of_steps(run)
    assert list(ids) == list(range(steps))
    for begin in range(0, steps, epoch):
        seen = [sample for step in range(begin, min(begin + epoch, steps)) for sample in ids[step]]
        assert len(set(seen)) == len(seen) > 0


def checkpoints(run: Path) -> list[int]:
    """Steps of those that verify, in order."""
    return [
        int(folder.name.removeprefix("step_"))
        for folder in sorted((run / "checkpoints").glob("step_*"))
        if _whole(folder)
    ]


def newest_whole(run: Path) -> int:
    """The step of the newest checkpoint that verifies; 0 without any."""
    return max(checkpoints(run), default=0)


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.partial"))


def digest(run: Path, step: int | None = None) -> str:
    """Of the weights, the optimiser and the state of samples in a checkpoint, the newest by default."""
    folder = run / "checkpoints" / f"step_{newest_whole(run) if step is None else step:08d}"
    Checkpoint(folder).verify()
    contents = b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(contents).hexdigest()


def flip(path: Path, offset: int) -> None:
    """Change one byte, counted from the end when negative, and leave size and time as they are."""
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def cut(path: Path, size: int) -> None:
    """Leave the first `size` bytes."""
    os.truncate(path, size)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of `size` bytes, mounted without rights in a name space of its own: any process sees it by this path.

    Mark such a test with pytest.mark.mounts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && read -r'
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", mount, "bash", str(size), str(folder)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout
        assert holder.stdout.readline() == "mounted\n"
        yield Path(f"/proc/{holder.pid}/root{folder.resolve()}")
        holder.stdin.close()


def _notes(run: Path) -> Path:
    folder = run.with_name(f"{run.name}.ids")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _whole(folder: Path) -> bool:
    with suppress(DataError):
        Checkpoint(folder).verify()
        return True
    return False


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    state = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def open_files(pid: int) -> list[str]:
    """What a process has open: paths, and sockets as `socket:[number]`."""
    found = []
    with suppress(OSError):  # the process ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since it was listed
                found.append(os.readlink(link))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # gone meanwhile, or somebody else's
        return ""

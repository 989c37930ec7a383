"""Jobs of several GPUs (NCCL): the numbers of one process, and how they end; on two CPUs (gloo) the numbers alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.cli import Commands
from helpers.tiny_runs import logged, losses, wait_for

from gpu.needs import KERNELS, ON_GPU, TRAINER, gpus

ROOT = Path(__file__).parents[2]
LONG = {"steps": 100_000, "checkpoint.every": 50, "dist.timeout": 20}
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
GONE_WITHIN = 15.0
WORLDS = [2, pytest.param(4, marks=gpus(4)), pytest.param(8, marks=gpus(8))]


class Job:
    """`torchrun PROGRAM ARGUMENTS` on `world` processes; what it says goes to a file."""

    def __init__(self, out: Path, world: int, *program: str, **environment: str) -> None:
        self.out = out
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *program]
        variables = {**os.environ, **PATHS, **environment}
        with out.open("w") as file:
            self.agent = psutil.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=variables)

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        """The living trainers by rank; not their loaders."""
        with suppress(psutil.NoSuchProcess):
            living = [p for p in self.agent.children() if p.status() != psutil.STATUS_ZOMBIE]
            return {int(p.environ()["RANK"]): p for p in living}
        return {}

    def signal(self, number: signal.Signals, rank: int) -> None:
        self.ranks[rank].send_signal(number)

    def all_gone(self, within: float) -> str:
        """What the job said, once it has ended; fails if it goes on."""
        self.agent.wait(within)
        return self.out.read_text()

    def close(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [*self.agent.children(recursive=True), self.agent]:
                process.kill()
        self.agent.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(world: int, *program: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path / f"{len(jobs)}.out", world, *program, **environment))
        return jobs[-1]

    yield started
    for job in jobs:
        job.close()


def holds(job: Job, world: int, within: float = 300) -> None:
    said = job.all_gone(within)
    assert said.count("all checks hold") == world, said[-4000:]


# The numbers ---------------------------------------------------------------------------------------------------------


def test_ranks_of_cpus_agree_with_one_process(commands: Commands) -> None:
    ranks = commands.world(2, "gpu.nccl_job", "20", CUDA_VISIBLE_DEVICES="")
    assert [rank.out.count("all checks hold") for rank in ranks] == [1, 1], ranks


@KERNELS
@ON_GPU
@gpus(2)
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_of_gpus_agree_with_one_process_and_each_other(start: Callable[..., Job], world: int) -> None:
    holds(start(world, "tests/gpu/nccl_job.py", "2000"), world)


@KERNELS
@ON_GPU
@gpus(2)
def test_compiled_towers_in_chunks(start: Callable[..., Job]) -> None:
    holds(start(2, "tests/gpu/nccl_job.py", "20", "compiled"), 2, within=500)


# How a job ends ------------------------------------------------------------------------------------------------------


def trained(start: Callable[..., Job], tiny: Any, keys: dict[str, Any], tmp_path: Path, **environment: str) -> Job:
    """A job of two GPUs that has finished ten steps."""
    program = ["-m", "faults.one_rank"] if "FAULT" in environment else ["-m", "train"]
    job = start(2, *program, *tiny({**LONG, **keys, "run.name": "a"})[1:], **environment)
    wait_for(lambda: logged(tmp_path / "runs/a", 10) or job.agent.poll() is not None, "ten steps", 200)
    return job


@KERNELS
@ON_GPU
@TRAINER
@gpus(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(start: Callable[..., Job], tiny: Any, tmp_path: Path, rank: int) -> None:
    job = trained(start, tiny, {}, tmp_path)
    job.signal(signal.SIGKILL, rank)
    begun = time.monotonic()
    wait_for(lambda: not job.ranks, "the other rank goes on", GONE_WITHIN)
    assert time.monotonic() - begun < GONE_WITHIN
    assert re.search(rf"rank {rank} of 2.* is gone|rank {rank} of 2 did not come", job.all_gone(40))


@KERNELS
@ON_GPU
@TRAINER
@gpus(2)
def test_a_rank_is_stopped(start: Callable[..., Job], tiny: Any, tmp_path: Path) -> None:
    """Named within dist.timeout and 10 seconds."""
    job = trained(start, tiny, {}, tmp_path)
    job.signal(signal.SIGSTOP, 1)
    wait_for(lambda: "rank 1 of 2 did not come to" in job.out.read_text(), "rank 1 is not named", 30)


@KERNELS
@ON_GPU
@TRAINER
@gpus(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_raises(start: Callable[..., Job], tiny: Any, tmp_path: Path, rank: int) -> None:
    job = trained(start, tiny, {}, tmp_path, FAULT="crash@20", ON=str(rank))
    said = job.all_gone(GONE_WITHIN + 30)
    assert "a bug of one rank" in said and not job.ranks


@KERNELS
@ON_GPU
@TRAINER
@gpus(2)
def test_sigterm_during_a_collective_saves(start: Callable[..., Job], tiny: Any, tmp_path: Path) -> None:
    job = trained(start, tiny, {"checkpoint.every": 100_000}, tmp_path)
    for rank in (0, 1):
        job.signal(signal.SIGTERM, rank)
    wait_for(lambda: not job.ranks, "the job goes on", 25)
    assert list((tmp_path / "runs/a/checkpoints").iterdir())


# On one GPU ----------------------------------------------------------------------------------------------------------


@KERNELS
@ON_GPU
@TRAINER
def test_out_of_memory_is_one_line(start: Callable[..., Job], tiny: Any, tmp_path: Path) -> None:
    """With little of the device to have: exit 4, and what to set."""
    little = (
        "import runpy, sys, torch; torch.cuda.set_per_process_memory_fraction(0.002);"
        "runpy.run_module('train', run_name='__main__', alter_sys=True)"
    )
    arguments = tiny({"global_batch_size": 416, "model.image.widths": [1024, 2048], "model.image.image_size": 128})[1:]
    command = [sys.executable, "-c", little, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **PATHS})
    assert ended.returncode == 4 and "Traceback" not in ended.stderr
    assert re.search("error:.*memory.*chunk_size", ended.stderr), ended.stderr[-2000:]


@KERNELS
@ON_GPU
@TRAINER
def test_a_killed_run_goes_on_with_the_same_bits(start: Callable[..., Job], tiny: Any, tmp_path: Path) -> None:
    keys = {"steps": 60, "checkpoint.every": 5, "deterministic": "true"}
    whole = start(1, "-m", "train", *tiny({**keys, "run.name": "whole"})[1:])
    whole.agent.wait(200)
    job = start(1, "-m", "train", *tiny({**keys, "run.name": "a"})[1:])
    wait_for(lambda: logged(tmp_path / "runs/a", 17) or job.agent.poll() is not None, "17 steps", 200)
    job.close()
    start(1, "-m", "train", *tiny({**keys, "run.name": "a"})[1:]).agent.wait(200)
    assert losses(tmp_path / "runs/a") == losses(tmp_path / "runs/whole")

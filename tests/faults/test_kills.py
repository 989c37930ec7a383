"""kill -9: of one rank, or of everything at once, at any moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from harness import IMAGES, Forks, Job, Jobs, digest, every_sample_once_an_epoch, is_saving, newest_whole, open_files
from helpers.cli import ROOT, Commands
from helpers.tiny_runs import QUIET, VAL, logged, losses, state, without_timings
from safetensors.torch import load_file


def test_a_rank_is_killed(jobs: Jobs) -> None:
    job = jobs.start(2, {"steps": 1000, "checkpoint.every": 5, "data.workers": 1})
    job.until(lambda: newest_whole(job.run) >= 5, "its first checkpoint")
    job.signal(SIGKILL, rank=1)
    outcome = job.ends(within=60)
    assert outcome.codes == [4, -SIGKILL] and not outcome.orphans, outcome
    assert "rank 1" in outcome.out and newest_whole(job.run) >= 5


@pytest.mark.soak
def test_a_rank_of_a_launched_job_is_killed(jobs: Jobs) -> None:
    job = jobs.launch(2, {"steps": 5000, "checkpoint.every": 5, "data.workers": 1, "dist.restarts": 0})
    job.until(lambda: newest_whole(job.run) >= 5, "its first checkpoint")
    job.signal(SIGKILL, rank=1)
    outcome = job.ends(within=60)
    assert outcome.codes == [4] and not outcome.orphans and outcome.seconds < 15, outcome
    assert newest_whole(job.run) >= 5


def test_the_script_of_torchrun_is_killed(jobs: Jobs) -> None:
    """Of its agent: test_restarts.py."""
    job = jobs.launch(1, {**IMAGES, "steps": 5000, "checkpoint.every": 5, "data.workers": 1})
    job.until(lambda: newest_whole(job.run) >= 5, "its first checkpoint")
    os.kill(job.script.pid, SIGKILL)
    outcome = job.ends(within=30)
    assert outcome.codes == [-SIGKILL] and not outcome.orphans, outcome
    assert newest_whole(job.run) >= 5


def test_the_indexing_of_shards_is_killed(commands: Commands, tmp_path: Path) -> None:
    """The processes that it spreads the work over end, too."""
    for name in "ab":
        with (tmp_path / f"{name}.tar").open("wb") as shard:
            shard.truncate(8 << 30)  # sparse: zeros to read for many seconds
    indexing = commands.start("data", "index", str(tmp_path / "a.tar"), str(tmp_path / "b.tar"))
    job = Forks(tmp_path, [indexing])
    job.until(lambda: any(str(tmp_path / "a.tar") in open_files(pid) for pid in job.processes()), "its processes")
    job.signal(SIGKILL, rank=0)
    outcome = job.ends(within=30)
    assert outcome.codes == [-SIGKILL] and not outcome.orphans, outcome


@pytest.mark.linux
def test_a_trainer_that_starts_after_torchrun_was_killed_leaves() -> None:
    script = "from dyad.process import run; run(lambda: print('here'))"
    for agent, output in ((os.getpid(), "here\n"), (1, "")):
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "DYAD_AGENT": str(agent)}
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (int(not output), output)


def kill_again_and_again(jobs: Jobs, worlds: Sequence[int], keys: Mapping[str, Any], kills: int) -> Path:
    """The folder of a run that was killed at random steps, each second time while it saved, and then ran to its end.

    A save may be over before it is seen: then the kill comes with the next save's step.
    """
    dice, steps, every = random.Random(), keys["steps"], keys["checkpoint.every"]
    moments = sorted(dice.sample(range(2, steps - 2 * every), kills))
    print("killed after", moments)
    for number, moment in enumerate(moments):
        job = jobs.start(worlds[number % len(worlds)], keys, observed=True)
        job.until(lambda: has_begun(job), "its start")  # noqa: B023
        before = newest_whole(job.run)
        job.reaches(moment)
        if number % 2:
            job.until(lambda: is_saving(job.run) or logged(job.run, moment + every), "a save")  # noqa: B023
        time.sleep(dice.uniform(0, 0.03))
        job.kill()
        assert newest_whole(job.run) >= before
    run = jobs.run(worlds[kills % len(worlds)], keys, observed=True)
    assert not list((run / "checkpoints").glob(".*"))
    return run


def has_begun(job: Job) -> bool:
    """Whether run_state.json is of this start: what was logged past its checkpoint is taken back by then."""
    return (job.run / "run_state.json").exists() and state(job.run).get("pid") == job.ranks()[0]


def frozen_texts(models: Path) -> dict[str, Any]:
    bert = {"kind": "transformers", "name": models / "bert", "context_length": 32, "frozen": "true"}
    return {f"model.text.{name}": value for name, value in bert.items()}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world", "objective", "kills", "more"),
    [
        (2, "clip", 2, {"steps": 20, "checkpoint.every": 4, "eval.every": 10, "data.val": VAL}),
        (4, "fastclip_v3", 1, {"steps": 12, "checkpoint.every": 3, "dist.name": "hsdp", "dist.shard_size": 2}),
    ],
)
def test_everything_is_killed(
    world: int, objective: str, kills: int, more: dict[str, Any], jobs: Jobs, models: Path
) -> None:
    keys = {**more, **frozen_texts(models), "objective": objective, "data.workers": 1}
    undisturbed = jobs.run(world, {**keys, "run.name": "undisturbed"})
    killed = kill_again_and_again(jobs, (world,), keys, kills)
    assert digest(killed) == digest(undisturbed)
    assert without_timings(killed) == without_timings(undisturbed)
    assert len(losses(killed)) == keys["steps"]


def test_everything_of_a_run_with_a_target_is_killed_and_it_goes_on_on_any_number_of_processes(
    jobs: Jobs, models: Path
) -> None:
    """With texts that do not change, evaluations, and a loader process."""
    keys = {**QUIET, "objective": "spectral_alternating", "objective.similarity": "cosine", "optim.lr": 1e-4}
    keys |= {"target.kind": "ema", "target.momentum": 0.8, "steps": 12, "checkpoint.every": 2, "data.workers": 1}
    keys |= {**frozen_texts(models), "eval.every": 6, "data.val": VAL}
    undisturbed = jobs.run(1, {**keys, "checkpoint.keep": 9, "run.name": "undisturbed"})
    killed = kill_again_and_again(jobs, (1,), keys, 2)
    assert digest(killed) == digest(undisturbed) and without_timings(killed) == without_timings(undisturbed)
    assert len(losses(killed)) == keys["steps"]
    middle = undisturbed / "checkpoints" / "step_00000006"
    on_two = jobs.run(2, {**keys, "run.name": "two", "resume": middle})
    ended = [load_file(run / "checkpoints/step_00000012/target.safetensors") for run in (undisturbed, on_two)]
    assert ended[0].keys() == ended[1].keys()
    for name, tensor in ended[0].items():
        torch.testing.assert_close(ended[1][name], tensor, rtol=1e-4, atol=1e-6)
    refused = jobs.start(1, {**keys, "target.momentum": 0.9}).ends()
    assert refused.codes == [2] and "target.momentum: 0.8 there, 0.9 now" in refused.out


@pytest.mark.soak
@pytest.mark.parametrize("dist", ["ddp", "fsdp2"])
@pytest.mark.parametrize("objective", ["clip", "fastclip_v3"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_everything_is_killed_25_times(world: int, objective: str, dist: str, jobs: Jobs) -> None:
    keys = {"steps": 150, "checkpoint.every": 4, "data.workers": 1, "objective": objective, "dist": dist}
    undisturbed = jobs.run(world, {**keys, "run.name": "undisturbed"}, observed=True)
    killed = kill_again_and_again(jobs, (world,), keys, 25)
    assert digest(killed) == digest(undisturbed)
    assert without_timings(killed) == without_timings(undisturbed)
    every_sample_once_an_epoch(killed, 150)


@pytest.mark.soak
def test_everything_is_killed_25_times_on_one_two_and_four_processes(jobs: Jobs) -> None:
    """Sums of other processes round otherwise. At this rate of learning that stays as small as it is; at five times as
    much training itself makes it larger, to 1e-3 after 100 steps, with or without kills."""
    keys = {**QUIET, "steps": 150, "checkpoint.every": 4, "optim.lr": 1e-4}
    undisturbed = jobs.run(1, {**keys, "run.name": "undisturbed"})
    killed = kill_again_and_again(jobs, (1, 2, 4), keys, 25)
    every_sample_once_an_epoch(killed, 150)
    assert losses(killed) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.soak
def test_killed_every_few_seconds_nothing_piles_up(jobs: Jobs) -> None:
    """Memory and open files of the last start over its steps, shared memory of all; weights as those of no kill."""
    keys = {"steps": 1500, "checkpoint.every": 10, "data.workers": 1}
    undisturbed = jobs.run(2, {**keys, "run.name": "undisturbed"})
    dice, processes, kills = random.Random(), set[int](), 0
    while True:
        job = jobs.start(2, keys)
        job.until(lambda: has_begun(job), "its start")  # noqa: B023
        begun = newest_whole(job.run)
        job.reaches(begun + 15)
        processes |= set(job.processes())
        if begun >= 1000:
            break
        end = time.monotonic() + dice.uniform(5, 15)
        job.until(lambda: time.monotonic() > end or logged(job.run, 1000), "its time")  # noqa: B023
        job.kill()
        kills += 1
    early = held(job.ranks()[0])
    job.reaches(1400)
    late = held(job.ranks()[0])
    print(kills, "kills; bytes and open files", early, late)
    assert late[0] < 1.05 * early[0] and late[1] <= early[1]
    assert job.ends(within=600).codes == [0, 0]
    assert digest(job.run) == digest(undisturbed)
    left = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in processes)]
    assert len(left) <= 1, left  # torch makes a file for each tensor and unlinks it: a kill may come between the two


def held(pid: int) -> tuple[int, int]:
    """Bytes of memory and number of open files of a process, the least of a second: a save has some for a moment."""
    readings = []
    for _ in range(20):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        readings.append((pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))))
        time.sleep(0.05)
    return min(memory for memory, _ in readings), min(files for _, files in readings)

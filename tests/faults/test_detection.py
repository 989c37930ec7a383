"""What a rank does wrong is seen by all, told once, and named."""

import json
import re
import shutil
import signal
import time
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
from harness import Forks, Job, Jobs, Outcome, digest, is_running, newest_whole
from helpers.cli import ROOT, Commands, free_port
from helpers.tiny_runs import SHARD, VAL, records, state, wait_for

TIMEOUT = 10  # of the group, in seconds: a living rank of a busy machine may be late by some
WAITED = 5  # of the group, where a test waits until it is over
LONG = {"steps": 100_000, "dist.timeout": TIMEOUT, "checkpoint.every": 5}
SAMPLE_STATE = {"objective": "sogclr", "data.workers": 0}


def with_fault(jobs: Jobs, world: int, keys: dict[str, Any], fault: str, **environment: Any) -> Job:
    return jobs.start(world, keys, module="faults.one_rank", FAULT=fault, **environment)


def told_once(outcome: Outcome, *words: str) -> None:
    assert outcome.out.count("error:") == 1 and "Traceback" not in outcome.out, outcome.out
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("error:")]
    assert all(word in line for word in words), line


def survivors_end(job: Job, stopped: int) -> None:
    """Wait until all ranks but the stopped one are gone."""
    others = [pid for rank, pid in enumerate(job.ranks()) if rank != stopped]
    wait_for(lambda: not any(map(is_running, others)), "the others go on waiting", TIMEOUT + 50)


# Ranks that do not come ----------------------------------------------------------------------------------------------


def test_a_rank_is_stopped(jobs: Jobs) -> None:
    keys = {**LONG, "dist.timeout": WAITED, "dist.start_timeout": 300}  # that is over when the first step has ended
    job = jobs.start(3, keys)
    job.reaches(7)
    job.signal(SIGSTOP, rank=1)
    survivors_end(job, stopped=1)
    job.signal(SIGKILL, rank=1)
    outcome = job.ends()
    assert outcome.codes == [4, -SIGKILL, 4] and not outcome.orphans
    told_once(outcome, "rank 1 of 3 did not come to ", "step ")
    assert "rank 1 of 3 did not come to" in state(job.run)["error"]
    assert "failed: PeerFailure: rank 1 of 3 did not come to" in (job.run / "log.txt").read_text().splitlines()[-1]
    assert newest_whole(job.run) >= 5


@pytest.mark.soak
def test_the_rank_where_all_met_is_stopped(jobs: Jobs) -> None:
    """Without torchrun that is rank 0."""
    job = jobs.start(2, LONG)
    job.reaches(7)
    job.signal(SIGSTOP, rank=0)
    survivors_end(job, stopped=0)
    job.signal(SIGKILL, rank=0)
    outcome = job.ends()
    assert outcome.codes == [-SIGKILL, 4]
    told_once(outcome, "rank 0 of 2", "is gone", "step ")


@pytest.mark.soak
def test_a_rank_of_a_launched_job_is_stopped(jobs: Jobs) -> None:
    """torchrun asks the stopped rank to stop, and kills it 30 seconds later."""
    job = jobs.launch(4, {**LONG, "dist.timeout": 2 * TIMEOUT, "dist.restarts": 0})
    job.reaches(7)
    job.signal(SIGSTOP, rank=0)
    outcome = job.ends(within=2 * TIMEOUT + 30 + 5 + 30)  # 30: a busy machine
    assert outcome.codes == [4] and not outcome.orphans
    assert outcome.out.count("error: rank 0 of 4 did not come to") == 1


def test_an_error_of_rank_0_alone(jobs: Jobs) -> None:
    """Of the one where all met, whose loader processes have inherited its connections."""
    job = with_fault(jobs, 2, {**LONG, "data.workers": 1}, "crash@7", ON="0")
    job.reaches(6)
    an_error_of_one_rank_ends_all(job, "ValueError: a bug of one rank")


def test_an_error_of_one_rank_while_another_is_busy_and_a_third_hangs(jobs: Jobs) -> None:
    """Rank 0, with it the place where all met, stays until the last has heard why. The one that hangs is ended by its
    listener, with the code of the cause."""
    fault = "crash_while_others_are_busy_and_hang@7"
    job = with_fault(jobs, 4, {**LONG, "data.workers": 1, "dist.timeout": 90}, fault)
    job.reaches(6)
    an_error_of_one_rank_ends_all(job, "rank 1: ValueError: a bug of one rank")


def an_error_of_one_rank_ends_all(job: Job, error: str) -> None:
    """Before any timeout."""
    outcome = job.ends(within=60)
    assert outcome.codes == [1] * len(job.ranks()) and not outcome.orphans, outcome
    assert outcome.out.count("Traceback") == outcome.out.count("ValueError: a bug of one rank") == 1
    assert "error:" not in outcome.out
    assert state(job.run)["error"].endswith(error)
    assert (job.run / "log.txt").read_text().endswith(f"{error}\n")
    assert newest_whole(job.run) == 5


@pytest.mark.soak
def test_an_error_of_all_ranks_is_told_once(jobs: Jobs) -> None:
    outcome = with_fault(jobs, 3, LONG, "crash@2").ends()
    assert outcome.codes == [1, 1, 1] and outcome.out.count("Traceback") == 1


def test_a_rank_of_an_evaluation_is_stopped(jobs: Jobs, commands: Commands) -> None:
    run = jobs.run(1, {"steps": 1, "dist.start_timeout": WAITED, "data.val": VAL})
    fault = {"FAULT": "stop_at_the_evaluators@start", "ON": "1", "MODULE": "eval"}
    job = Forks(run, commands.started(2, "faults.one_rank", f"checkpoint={run}", coming=None, **fault))
    survivors_end(job, stopped=1)
    job.kill()
    outcome = job.ends()
    assert outcome.codes == [4, -SIGKILL]
    told_once(outcome, "rank 1 of 2 did not come to a collective")


def test_a_first_step_may_take_longer_than_a_later_one(jobs: Jobs) -> None:
    """As that of a rank that compiles, of every start; the others wait. Later it is a hang."""
    keys = {**LONG, "dist.timeout": WAITED}
    pause = {"SECONDS": str(1.2 * WAITED), "ON": "1"}
    job = with_fault(jobs, 2, keys, "pause@1,hang@8", **pause)
    job.reaches(7)
    job.until(lambda: newest_whole(job.run) == 5, "its checkpoint")
    here = {"run.name": "b", "resume": job.run / "checkpoints/step_00000005", "steps": 7}
    again = with_fault(jobs, 2, {**keys, **here}, "pause@6", **pause)
    outcome = job.ends(within=WAITED + 30)
    assert outcome.codes == [4, 4] and not outcome.orphans
    told_once(outcome, "rank 1 of 2 did not come to step 8")
    outcome = again.ends()
    assert outcome.codes == [0, 0] and "going on at step 5" in outcome.out


# Work of one rank -----------------------------------------------------------------------------------------------------


def busy(jobs: Jobs, mark: Path, world: int, timeout: float, seconds: float) -> Job:
    """Rank 0 is busy, and the others wait for it."""
    keys = {"steps": 3, "dist.start_timeout": timeout}
    job = with_fault(jobs, world, keys, "busy_at_the_evaluators@start", BUSY=str(seconds), MARK=str(mark))
    job.until(mark.exists, "the work of rank 0")
    return job


def test_rank_0_is_busy_for_two_timeouts(jobs: Jobs, tmp_path: Path) -> None:
    outcome = busy(jobs, tmp_path / "mark", 2, WAITED, 2 * WAITED + 1).ends()
    assert outcome.codes == [0, 0] and not outcome.orphans, outcome
    assert outcome.seconds > 2 * WAITED


def test_rank_0_is_killed_while_the_others_wait_for_it(jobs: Jobs, tmp_path: Path) -> None:
    job = busy(jobs, tmp_path / "mark", 2, 120, 120)
    time.sleep(1)
    job.signal(SIGKILL, rank=0)
    survivors_end(job, stopped=0)
    outcome = job.ends()
    assert outcome.codes == [-SIGKILL, 4] and not outcome.orphans, outcome
    told_once(outcome, "rank 0 of 2, or its machine, is gone")


def test_another_rank_is_killed_while_rank_0_is_busy(jobs: Jobs, tmp_path: Path) -> None:
    """The rank that is gone is named, not the one that is busy; that one ends, too."""
    job = busy(jobs, tmp_path / "mark", 3, 120, 120)
    job.signal(SIGKILL, rank=1)
    outcome = job.ends(within=60)
    assert outcome.codes == [4, -SIGKILL, 4] and not outcome.orphans, outcome
    told_once(outcome, "rank 1 of 3 did not come to a collective")


# A slow rank ---------------------------------------------------------------------------------------------------------


def test_a_rank_is_slow(jobs: Jobs) -> None:
    """It is stopped nine tenths of the time, as if it had a tenth of a processor."""
    large = {"global_batch_size": 192}  # most of a step is this rank's own work, whose seconds are compared
    job = jobs.start(2, {**large, "steps": 100_000, "dist.timeout": 60})
    job.reaches(3)
    end = time.monotonic() + 180
    while "warning" not in job.said():
        assert time.monotonic() < end, "no warning"
        for number, pause in ((SIGSTOP, 0.18), (signal.SIGCONT, 0.02)):
            job.signal(number, rank=1)
            time.sleep(pause)
    job.signal(signal.SIGTERM)
    outcome = job.ends()
    assert outcome.codes == [75, 75]
    (line, *_) = [line for line in outcome.out.splitlines() if line.startswith("warning")]
    assert line.startswith("warning: rank 1 of 2 has 0.") and "most of it" in line, line


# Steps that are not taken --------------------------------------------------------------------------------------------


def changed(bits: Path, rank: int) -> dict[int, bool]:
    """Step → whether it changed any bit of weights, optimiser or state of samples."""
    notes = [json.loads(line) for line in (bits / f"{rank}.jsonl").read_text().splitlines()]
    return {note["step"]: note["before"] != note["after"] for note in notes}


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_what_is_not_finite_on_one_rank(jobs: Jobs, tmp_path: Path) -> None:
    fault = "loss_is_nan@2,gradient_is_infinite@4,embedding_is_nan@5"
    job = with_fault(jobs, 2, {**SAMPLE_STATE, "steps": 6}, fault, ON="1", BITS=str(tmp_path))
    outcome = job.ends()
    assert outcome.codes == [0, 0], outcome.out
    for rank in range(2):
        assert changed(tmp_path, rank) == {step: step not in (2, 4, 5) for step in range(1, 7)}
    assert [r["train/skipped"] for r in records(job.run)] == [0, 1, 1, 2, 3, 3]
    assert [(line["step"], line["kind"]) for line in ledger(job.run)] == [(s, "nonfinite") for s in (2, 4, 5)]
    told = re.findall(r"Step (\d) is skipped \(nonfinite\): loss .*, grad_norm .*; (\d) in a row", outcome.out)
    assert told == [("2", "1"), ("4", "1"), ("5", "2")]


@pytest.mark.soak
def test_not_finite_again_and_again(jobs: Jobs, tmp_path: Path) -> None:
    fault = ",".join(f"loss_is_nan@{step}" for step in range(4, 10))
    job = with_fault(jobs, 2, {**SAMPLE_STATE, "optim.max_skipped": 4, "steps": 20}, fault, ON="0", BITS=str(tmp_path))
    outcome = job.ends()
    assert outcome.codes == [2, 2]
    told_once(outcome, "step 7: ", "4 steps in a row", "optim.max_skipped")
    assert changed(tmp_path, 1) == {step: step < 4 for step in range(1, 8)}
    assert len(ledger(job.run)) == 4


@pytest.mark.soak
def test_the_loss_spikes(jobs: Jobs, tmp_path: Path) -> None:
    """A step that is left out is left out again, by the same losses before it, when the run was killed in between."""
    keys = {**SAMPLE_STATE, "objective": "isogclr", "steps": 20, "optim.spike": 2, "checkpoint.every": 13}

    def spiking(name: str) -> Job:
        return with_fault(jobs, 2, {**keys, "run.name": name}, "loss_is_tripled@16", BITS=str(tmp_path / name))

    for name in "ab":
        (tmp_path / name).mkdir()
    quiet, killed = spiking("a"), spiking("b")
    killed.reaches(14)
    killed.kill()
    again = spiking("b")
    assert again.ends().codes == quiet.ends().codes == [0, 0]
    assert changed(tmp_path / "a", 0) == changed(tmp_path / "a", 1) == {step: step != 16 for step in range(1, 21)}
    (line,) = ledger(quiet.run)
    assert (line["step"], line["kind"]) == (16, "spike") and 0 <= line["first_id"] < line["last_id"]
    assert [r["train/skipped"] for r in records(quiet.run)] == [0] * 15 + [1] * 5
    assert ledger(again.run) == [line] and digest(again.run) == digest(quiet.run)


# Ranks that differ ---------------------------------------------------------------------------------------------------


def test_a_rank_has_another_configuration_and_one_has_other_code(commands: Commands, tiny: Any, tmp_path: Path) -> None:
    for package in ("data", "eval", "train"):
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=lambda folder, names: {"samples"})
    with (tmp_path / "code/train/losses/base.py").open("a") as file:
        file.write("# one more line\n")
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    common |= {"FAULT": "other_code@start", "ON": "1", "CODE": str(tmp_path / "code")}
    ranks = [
        commands.start("faults.one_rank", *tiny({"seed": seed})[1:], RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank, seed in enumerate([0, 0, 7])
    ]
    outcome = Forks(tmp_path, ranks).ends()
    assert outcome.codes == [2, 2, 2] and not (tmp_path / "runs").exists()
    told_once(outcome, "rank 2 of 3 started with seed=7, rank 0 with 0, and 1 more")


def test_a_rank_has_other_data(jobs: Jobs, tmp_path: Path) -> None:
    for rank, shard in enumerate((SHARD, VAL)):
        (tmp_path / f"{rank}").mkdir()
        shutil.copy(shard, tmp_path / f"{rank}" / "shard.tar")
    keys = {"data.train": "shard.tar", "global_batch_size": 8}
    outcome = with_fault(jobs, 2, keys, "other_data@start", DATA=str(tmp_path)).ends()
    assert outcome.codes == [2, 2]
    told_once(outcome, "ranks 0 and 1 of 2", "data=")


@pytest.mark.parametrize(
    ("world", "named"),
    # of two, with these words: tests/jobs/dist_control.py
    [(3, "rank 1 of 3 ("), pytest.param(2, "ranks 0 and 1 of 2 (", marks=pytest.mark.soak)],
)
def test_a_weight_is_perturbed(jobs: Jobs, world: int, named: str) -> None:
    keys = {"steps": 20, "dist.digest_every": 4, "checkpoint.every": 3}
    job = with_fault(jobs, world, keys, "weight_is_perturbed@2", ON="1")
    outcome = job.ends()
    assert outcome.codes == [4] * world
    told_once(outcome, "after step 3", named, "first in towers.")  # before the checkpoint of step 3 is written
    assert newest_whole(job.run) == 0

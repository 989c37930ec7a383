"""checkpoint.patience in real runs: the step at which they end, stops before it, and starts after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from harness import Jobs, checkpoints, digest
from helpers.cli import Commands
from helpers.tiny_runs import QUIET, VAL, records, state, tiny_arguments, wait_for, without_timings

RANK = "val/image_to_text_mean_rank"  # lower is better
STEPS, EVERY, PATIENCE = 24, 2, 3
KEYS: dict[str, Any] = {
    **QUIET,
    "data.val": VAL,
    "steps": STEPS,
    "optim.lr": 1e-2,
    "eval.every": EVERY,
    "checkpoint.every": 5,
    "checkpoint.keep": 1,
    "checkpoint.best": RANK,
}
ENDING = {**KEYS, "checkpoint.patience": PATIENCE}


@pytest.fixture(scope="module")
def whole(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that does not end early, for reading."""
    folder = tmp_path_factory.mktemp("whole")
    return Jobs(commands, partial(tiny_arguments, models, folder / "runs"), folder).run(1, KEYS)


def ends_at(run: Path, patience: int) -> tuple[int, int]:
    """By metrics.jsonl of a run: the step at which it ends with this patience, and that of its best."""
    best, best_step = float("inf"), 0
    for record in (record for record in records(run) if RANK in record):
        if record[RANK] < best:
            best, best_step = record[RANK], int(record["step"])
        elif record["step"] >= best_step + patience * EVERY:
            return int(record["step"]), best_step
    return STEPS, best_step


def check_end(run: Path, step: int, best_step: int, patience: int = PATIENCE) -> None:
    found = state(run)
    assert found["status"] == "finished" and (found["step"], found["total_steps"]) == (step, STEPS)
    assert found["best"]["step"] == best_step and found["evaluations_since_best"] == patience
    assert checkpoints(run) == [best_step, step] and max(record["step"] for record in records(run)) == step
    text = (run / "log.txt").read_text()
    assert f"stopped early at step {step}: {RANK} was best at step {best_step} (" in text
    assert f", {patience} evaluations ago (checkpoint.patience={patience})" in text


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_ends_at_the_same_step_on_any_number_of_ranks(
    world: int, jobs: Jobs, whole: Path, commands: Commands
) -> None:
    step, best_step = ends_at(whole, PATIENCE)
    assert best_step < step < STEPS
    run = jobs.run(world, ENDING)
    check_end(run, step, best_step)
    results = json.loads((run / "eval/val.json").read_text())
    assert results["step"] == step and results["gallery"], "cases of the last evaluation, for the report"
    if world == 1:
        assert commands.run("eval.report", f"run={run}").code == 0
        page = (run / "report.html").read_text()
        assert f"{step} of {STEPS}, stopped early, {PATIENCE} evaluations after the best" in page
        assert without_timings(run) == [record for record in without_timings(whole) if record["step"] <= step]


@pytest.mark.parametrize("stops", [("SIGKILL@5", "SIGTERM@6"), ("SIGTERM@7",), ("SIGKILL@8",)])
def test_a_stop_in_between_keeps_the_count(stops: Sequence[str], jobs: Jobs, whole: Path) -> None:
    quiet = jobs.run(1, {**ENDING, "run.name": "quiet"})
    for stop in stops:
        job = jobs.start(1, ENDING, STOP=stop)
        wait_for(lambda: job.codes() is not None, "the signal", 300)  # noqa: B023
        job.kill()
        assert job.codes() == [-SIGKILL if stop.startswith("SIGKILL") else 75], job.said()
    run = jobs.run(1, ENDING)
    check_end(run, *ends_at(whole, PATIENCE))
    assert digest(run) == digest(quiet) and without_timings(run) == without_timings(quiet)


def test_what_a_later_start_does(jobs: Jobs, whole: Path) -> None:
    """Nothing, with as much patience or less, and also with more steps; with more patience it goes on."""
    run, (step, best_step) = jobs.run(1, ENDING), ends_at(whole, PATIENCE)
    for more in ({}, {"checkpoint.patience": PATIENCE - 1}, {"steps": STEPS + 8}):
        before = (run / "metrics.jsonl").read_bytes()
        again = jobs.start(1, {**ENDING, **more}).ends()
        assert again.codes == [0] and (run / "metrics.jsonl").read_bytes() == before
        assert f"already finished: {run}, stopped early: checkpoint.patience=" in again.out
    shorter = jobs.start(1, {**ENDING, "steps": step - EVERY}).ends()
    assert shorter.codes != [0] and "already finished" not in shorter.out
    (run / "run_state.json").unlink()  # as after a kill before it was written
    check_end(jobs.run(1, ENDING), step, best_step)
    longer = ends_at(whole, PATIENCE + 1)
    assert longer[0] > step
    check_end(jobs.run(1, {**ENDING, "checkpoint.patience": PATIENCE + 1}), *longer, PATIENCE + 1)
    ended = jobs.run(1, {**ENDING, "checkpoint.patience": "null"})
    assert state(ended)["step"] == STEPS and "evaluations_since_best" not in state(ended)
    assert without_timings(ended) == without_timings(whole) and digest(ended) == digest(whole)

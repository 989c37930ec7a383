"""fit, as a whole run: intervals, stopping, resuming, and kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loop import BATCH, STEPS, Toy, quiet_monitor, run
from helpers.messages import raises
from torch import Tensor

from dyad.data.batch import Batch
from dyad.train.distributed.signals import Stopped
from dyad.train.run_folder.checkpoint import Checkpoint, find_undamaged
from dyad.train.run_schedule import RunSchedule
from dyad.train.step.loop import fit
from dyad.train.tracking.logger import Logger

ROOT = Path(__file__).parents[3]
TIMES = {
    *("time", "train/data_time", "train/batch_time", "train/checkpoint_seconds"),
    *("train/samples_per_second", "train/samples_per_second_per_device"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder) == ("finished", STEPS)
    torch.set_num_threads(threads)
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def weights(folder: Path) -> Mapping[str, Tensor]:
    found = find_undamaged(folder, print)
    assert found is not None
    assert found.name == f"step_{STEPS:08d}"
    return Checkpoint(found).weights()


def run_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run_state.json").read_text())


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    assert metrics(folder) == metrics(undisturbed)
    ours, theirs = weights(folder), weights(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert run_state(folder)["status"] == "finished"
    assert not list((folder / "checkpoints").glob(".*"))


def test_what_is_logged_evaluated_and_saved_when(undisturbed: Path) -> None:
    records = metrics(undisturbed)
    assert [r["step"] for r in records if "train/loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if "val/error" in r] == [5, 10, 15, 20]
    assert all(r["samples_seen"] == r["step"] * BATCH for r in records)
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir()) == ["step_00000018", "step_00000020"]
    assert {k: run_state(undisturbed)[k] for k in ("status", "step", "total_steps")} == {
        "status": "finished",
        "step": STEPS,
        "total_steps": STEPS,
    }
    full = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[0])
    assert full.keys() >= TIMES | {"step", "samples_seen", "train/loss", "train/lr", "train/grad_norm"}


class Starter:
    """Starts the run of helpers.loop in one process after the other."""

    def __init__(self, folder: Path) -> None:
        self.lines = folder / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "tests/helpers/loop.py"), str(folder), "0.02"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def start(self) -> int:
        assert self.process.stdin
        self.process.stdin.write("again\n")
        return self.read()

    def read(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while not (self.lines.exists() and f'"step": {step}, ' in self.lines.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.process.communicate()


def test_kill_9_at_random_steps_three_times_changes_nothing(undisturbed: Path, tmp_path: Path) -> None:
    starter, dice = Starter(tmp_path), random.Random()
    targets = sorted(dice.sample(range(2, STEPS), 3))
    print("killed at steps", targets)
    for target in targets:
        process = starter.start()
        starter.wait_for(target)
        time.sleep(dice.uniform(0, 0.03))  # anywhere in a step, its evaluation or its save
        os.kill(process, signal.SIGKILL)
        assert os.WTERMSIG(starter.read()) == signal.SIGKILL
        assert run_state(tmp_path)["status"] == "running"
    starter.start()
    assert starter.read() == 0
    starter.close()
    assert_same_run(tmp_path, undisturbed)


class Interrupted(Toy):
    """Signals itself during step number `at`."""

    def __init__(self, at: int, *numbers: signal.Signals) -> None:
        super().__init__()
        self.at, self.numbers = at, numbers

    def step(self, batch: Batch, index: int) -> dict[str, float]:
        if index + 1 == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)
        return super().step(batch, index)


@pytest.mark.parametrize("at", [1, 7, 9, 10, STEPS], ids=lambda at: f"step{at}")
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(undisturbed: Path, tmp_path: Path, at: int) -> None:
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path, toy=Interrupted(at, signal.SIGTERM, signal.SIGTERM)) == ("preempted", at)
    assert signal.getsignal(signal.SIGTERM) is before
    assert run_state(tmp_path)["status"] == "preempted"
    assert run_state(tmp_path)["step"] == at
    assert not any("val/error" in r for r in metrics(tmp_path) if r["step"] == at)  # no time for that now
    assert run(tmp_path) == ("finished", STEPS)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals_ask_too(tmp_path: Path, number: signal.Signals) -> None:
    assert run(tmp_path, toy=Interrupted(2, number)) == ("preempted", 2)


def test_a_finished_run_does_nothing_more(undisturbed: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (undisturbed / "checkpoints").rglob("*")}
    lines = metrics(undisturbed)
    assert run(undisturbed, toy=Interrupted(1, signal.SIGKILL)) == ("finished", STEPS)
    assert {p: p.stat().st_mtime_ns for p in (undisturbed / "checkpoints").rglob("*")} == before
    assert metrics(undisturbed) == lines


class Recorder:
    """The parts of fit, as a diary."""

    batches: Iterator[Batch] | None = None

    def __init__(self, results: Mapping[str, float]) -> None:
        self.diary: list[tuple[str, int]] = []
        self.results = results

    def evaluate(self, step: int) -> Mapping[str, float]:
        self.diary.append(("evaluate", step))
        return self.results

    def fit(self, schedule: RunSchedule, batches: int) -> tuple[str, int]:
        return fit(
            schedule,
            self.batches or Toy().batches(schedule.first_step, schedule.first_step + batches),
            step=lambda batch, index: {"loss": 1.0},
            monitor=quiet_monitor(),
            diagnose=lambda: {},
            evaluate=self.evaluate,
            save=lambda step, owed, last: self.diary.append(("owed" if owed else "last" if last else "save", step)),
            should_stop=lambda: False,
            logger=Logger(),
        )


def test_an_interval_of_zero_or_longer_than_the_run_means_the_end() -> None:
    recorder = Recorder({})
    schedule = RunSchedule(2, 6, 8, 1, log_every=10, evaluate_every=0, save_every=9)
    assert recorder.fit(schedule, 4) == ("finished", 6)
    # the first of the two checkpoints is for an evaluation that fails
    assert recorder.diary == [("owed", 6), ("evaluate", 6), ("last", 6)]


def test_a_run_without_evaluations_saves_once_at_the_end() -> None:
    recorder = Recorder({})
    assert recorder.fit(RunSchedule(2, 6, 8, 1, log_every=10, evaluate_every=None, save_every=9), 4) == ("finished", 6)
    assert recorder.diary == [("last", 6)]


def test_an_owed_evaluation_comes_first() -> None:
    recorder = Recorder({"val/error": 1.0})
    schedule = RunSchedule(6, 6, 8, 1, log_every=1, evaluate_every=3, save_every=3, evaluation_owed=True)
    assert recorder.fit(schedule, 0) == ("finished", 6)
    assert recorder.diary == [("evaluate", 6), ("last", 6)]


class GivesUp(Recorder):
    """Its evaluation is told to stop while it encodes."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        super().evaluate(step)
        raise Stopped


@pytest.mark.parametrize("owed", [False, True], ids=["now", "owed from before"])
def test_an_evaluation_that_is_given_up_stays_owed(owed: bool) -> None:
    recorder = GivesUp({"val/error": 1.0})
    schedule = RunSchedule(2, 6, 8, 1, log_every=1, evaluate_every=3, save_every=9, evaluation_owed=owed)
    step = 2 if owed else 3
    assert recorder.fit(schedule, 4) == ("preempted", step)
    assert recorder.diary == [("evaluate", step), ("owed", step)]


def test_batches_that_are_given_up_leave_the_steps_before_them() -> None:
    def batches() -> Iterator[Batch]:
        yield from Toy().batches(0, 2)
        raise Stopped  # negatives were being mined

    recorder = Recorder({})
    recorder.batches = batches()
    assert recorder.fit(RunSchedule(0, 4, 8, 1, log_every=1, evaluate_every=0, save_every=9), 4) == ("preempted", 2)
    assert recorder.diary == [("last", 2)]


@pytest.mark.parametrize("batches", [3, 5], ids=["too few", "too many"])
def test_a_loader_of_another_length_is_an_error(batches: int) -> None:
    with raises(ValueError, "of 4"):
        Recorder({}).fit(RunSchedule(0, 4, 8, 1, log_every=1, evaluate_every=0, save_every=9), batches)


@pytest.mark.parametrize(("first", "owed"), [(0, False), (4, True), (6, False)])
def test_a_run_may_end_before_its_last_step(first: int, owed: bool, tmp_path: Path) -> None:
    """`ends` is asked after the evaluation; a start at the end saves nothing again, and takes no step."""
    schedule = RunSchedule(first, STEPS, BATCH, 1, log_every=1, evaluate_every=2, save_every=100, evaluation_owed=owed)
    toy, evaluated, saved = Toy(), list[int](), list[tuple[int, bool, bool]]()

    def evaluate(step: int) -> dict[str, float]:
        evaluated.append(step)
        return {}

    ended = fit(
        schedule,
        toy.batches(first, STEPS),
        step=toy.step,
        monitor=quiet_monitor(),
        diagnose=dict,
        evaluate=evaluate,
        save=lambda *state: saved.append(state),
        should_stop=lambda: False,
        logger=Logger(),
        ends=lambda step: step == 6 and (first == 6 or 6 in evaluated),
    )
    assert ended == ("finished", 6)
    assert evaluated == [step for step in (2, 4, 6) if step > first or (step == first and owed)]
    assert saved == [(4, False, False)] * owed + [(6, False, True)] * (first < 6)

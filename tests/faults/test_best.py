"""checkpoint.best in real runs: kills, damage, several processes, and the best by its name in every command."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from signal import SIGKILL
from typing import Any

import pytest
from harness import Jobs, checkpoints, digest, flip, is_saving, newest_whole, small_disk
from helpers.cli import Commands, Ended
from helpers.messages import check
from helpers.tiny_runs import (
    QUIET,
    SHARD,
    VAL,
    logged,
    records,
    refused,
    state,
    tiny_arguments,
    wait_for,
    without_timings,
)

import dyad
from dyad import process
from dyad.evaluation.main import main
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.folder import folder_of
from dyad.train.run_folder.locate import locate

RANK = "val/image_to_text_mean_rank"  # it changes with every bit; lower is better
KEYS: dict[str, Any] = {
    **QUIET,
    "data.val": VAL,
    "steps": 24,
    "optim.lr": 1e-2,  # the best are steps 2, 10 and 14
    "eval.every": 2,
    "checkpoint.every": 9,
    "checkpoint.keep": 1,
    "checkpoint.best": RANK,
}


@pytest.fixture(scope="module")
def whole(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with KEYS, for reading."""
    folder = tmp_path_factory.mktemp("whole")
    return Jobs(commands, partial(tiny_arguments, models, folder / "runs"), folder).run(1, KEYS)


def best_of(run: Path, step: int = 24) -> dict[str, Any]:
    """As the checkpoint of a step knows it."""
    return json.loads((folder_of(run, step) / "state.json").read_text())["best"]


def lowest(run: Path, metric: str = RANK) -> tuple[float, int]:
    """By metrics.jsonl; of equal values the earliest."""
    return min((record[metric], int(record["step"])) for record in records(run) if metric in record)


def stopped_at(jobs: Jobs, world: int, keys: dict[str, Any], *stops: str) -> Path:
    """The folder of a run that got each of these signals, SIGNAL@STEP, and then ran to its end."""
    for stop in stops:
        job = jobs.start(world, keys, STOP=stop)
        wait_for(lambda: job.codes() is not None, "the signal", 300)  # noqa: B023
        job.kill()
        assert set(job.codes() or ()) == {-SIGKILL if stop.startswith("SIGKILL") else 75}, job.said()
    return jobs.run(world, keys)


@pytest.mark.parametrize(
    ("world", "more", "stops"),
    [
        # an evaluation that is owed, and a kill between the last new best and the end
        (2, {"optim.ema": 0.5}, ("SIGTERM@16", "SIGKILL@24")),
        # … and one when the newest checkpoint is the best, as in the next test
        pytest.param(2, {"optim.ema": 0.5}, ("SIGKILL@6", "SIGTERM@16", "SIGKILL@24"), marks=pytest.mark.soak),
        pytest.param(2, {"dist.name": "fsdp2"}, ("SIGKILL@16",), marks=pytest.mark.soak),
    ],
    ids=["ddp", "ddp, often", "fsdp2"],
)
def test_kills_do_not_change_the_best(world: int, more: dict[str, Any], stops: tuple[str, ...], jobs: Jobs) -> None:
    keys = {**KEYS, **more}
    quiet = jobs.run(world, {**keys, "run.name": "quiet"})
    value, step = lowest(quiet)
    assert step < 24 and best_of(quiet) == {"metric": RANK, "value": value, "step": step} == state(quiet)["best"]
    assert checkpoints(quiet) == [step, 24]
    killed = stopped_at(jobs, world, keys, *stops)
    assert best_of(killed) == best_of(quiet) == state(killed)["best"] and checkpoints(killed) == [step, 24]
    assert digest(killed, step) == digest(quiet, step) and digest(killed) == digest(quiet)
    assert without_timings(killed) == without_timings(quiet)
    on_one = dyad.load(f"{killed}@best")  # also of parts
    assert dyad.evaluate(on_one, val=str(VAL))["val"]["image_to_text_mean_rank"] == value


def test_a_kill_while_the_best_is_written_leaves_the_one_before(jobs: Jobs, whole: Path) -> None:
    """Every checkpoint but the last is of a best here, unlike those of the whole run, which has the same best."""
    keys = {**KEYS, "checkpoint.every": 1000}
    job = jobs.start(1, keys)
    job.until(lambda: newest_whole(job.run) > 0 and (is_saving(job.run) or logged(job.run, 24)), "its second save")
    job.kill()
    named, known = locate(Path(f"{job.run}@best"), print), checkpoints(job.run)
    Checkpoint(named).verify()
    assert named == folder_of(job.run, max(known)) and best_of(job.run, max(known))["step"] == max(known)
    run = jobs.run(1, keys)
    assert best_of(run) == best_of(whole) and digest(run, best_of(run)["step"]) == digest(whole, best_of(run)["step"])


@pytest.mark.mounts
def test_the_disk_is_full_when_a_new_best_is_written(jobs: Jobs, tmp_path: Path) -> None:
    """There is room for the best and the newest, not for a third one: the best before stays, and is what it says."""
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        keys = {**KEYS, "checkpoint.every": 2, "run.dir": disk}
        filler = disk / "filler"
        filler.write_bytes(bytes(20 << 20))
        ended = jobs.start(1, keys).ends()
        run = disk / "a"
        assert ended.codes == [4] and "The run goes on" in ended.out, ended.out
        named = locate(Path(f"{run}@best"), print)
        Checkpoint(named).verify()
        assert named == folder_of(run, best_of(run, newest_whole(run))["step"])
        filler.unlink()
        run = jobs.run(1, keys)
        assert (best_of(run)["value"], best_of(run)["step"]) == lowest(run)


def test_every_command_takes_the_best_by_its_name(
    jobs: Jobs, commands: Commands, whole: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole
    step = best_of(run)["step"]
    name, folder = f"{run}@best", folder_of(run, step)
    assert step < 24 and f"best: step {step}, {RANK} {lowest(run)[0]:.4f}: {name}" in (run / "log.txt").read_text()
    evaluated = commands.run("eval", f"checkpoint={name}", f"out={tmp_path / 'out'}", "examples=0")
    found = json.loads((tmp_path / "out/val.json").read_text())
    assert (
        evaluated.code == 0 and found["step"] == step and found["metrics"]["image_to_text_mean_rank"] == lowest(run)[0]
    )
    exported = commands.run("train.export", f"run={name}", f"out={tmp_path / 'exported'}")
    assert exported.code == 0 and f"exported: step {step}." in exported.out, exported.out
    assert commands.run("eval.report", f"run={run}").code == 0 and f"step {step}, {RANK}" in page(run)
    short = {**QUIET, "steps": 2}
    began = jobs.run(1, {**short, "run.name": "b", "init_from": name})
    assert f"beginning with the weights of {folder}" in (began / "log.txt").read_text()
    went_on = jobs.run(1, {**KEYS, "run.name": "c", "steps": 26, "resume": name})
    assert f"going on at step {step} from {folder}" in (went_on / "log.txt").read_text()
    no_best = f"{began}@best", "checkpoint.best=METRIC"
    refused(evaluating(capfd, monkeypatch, f"run={began}@best", f"val={VAL}"), 2, *no_best)
    refused(jobs.start(1, {**short, "init_from": f"{began}@best", "run.name": "d"}).ends().ended, 2, *no_best)
    assert not (began.parent / "d").exists()


def test_the_best_is_damaged_and_then_gone(
    jobs: Jobs, whole: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that ask for it are refused; nothing else takes its place. The run goes on from its newest."""
    run = Path(copytree(whole, job_folder(jobs)))
    step = best_of(run)["step"]
    folder = folder_of(run, step)
    flip(folder / "model.safetensors", -5)
    refused(evaluating(capfd, monkeypatch, f"run={run}@best"), 3, folder / "model.safetensors")
    begins = jobs.start(1, {**KEYS, "run.name": "b", "init_from": f"{run}@best"}).ends()
    refused(begins.ended, 3, folder / "model.safetensors")
    rmtree(folder)
    refused(evaluating(capfd, monkeypatch, f"run={run}@best"), 3, f"{run}@best", folder, RANK)
    longer = jobs.start(1, {**KEYS, "steps": 28}).ends()
    assert longer.codes == [0] and "going on at step 24 " in longer.out and f"step {step}, is no" in longer.out
    assert best_of(run, 28)["step"] in (26, 28)


def test_a_name_that_cannot_be_used_leaves_no_run_folder(jobs: Jobs) -> None:
    """Under several processes each says nothing but one line."""
    wrong = (2, "image_to_text_mean_rank", f"'{RANK}'"), (1, "eval/other/acc1", "val/text_to_image_R@10")
    for world, best, named in wrong:
        job = jobs.start(world, {**KEYS, "checkpoint.best": best}).ends()
        assert job.codes == [2] * world, job.out
        check(job.out.partition("error: ")[2].rstrip("\n"), f"checkpoint.best={best}", named)
        assert not job_folder(jobs).exists()
    nothing = jobs.start(1, {**KEYS, "data.val": "null"}).ends()
    refused(nothing.ended, 2, f"checkpoint.best={RANK}", "data.val")
    assert not job_folder(jobs).exists()


def test_evaluations_of_several_losses_and_suites_may_choose(jobs: Jobs) -> None:
    views = f"task=views data=simclr data.train={SHARD} data.val={VAL} objective=simclr"
    keys = {**KEYS, "steps": 4, "eval.suite": f"[retrieval:{VAL}]", "global_batch_size": 16}
    metric = "eval/views_val/view_R@1"
    run = jobs.run(1, {**keys, "also.views": f"'{views}'", "checkpoint.best": metric})
    assert best_of(run, 4)["metric"] == metric
    other = jobs.run(1, {**keys, "run.name": "b", "checkpoint.best": "eval/twemoji-undrawn/text_to_image_median_rank"})
    assert best_of(other, 4)["step"] == lowest(other, "eval/twemoji-undrawn/text_to_image_median_rank")[1]


def evaluating(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> Ended:
    """How `python -m eval` with these words ends, without a process of its own."""
    monkeypatch.setattr(sys, "argv", ["eval", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        process.run(main)
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, "".join(capfd.readouterr()))


def page(run: Path) -> str:
    return (run / "report.html").read_text()


def job_folder(jobs: Jobs) -> Path:
    return jobs.folder / "runs" / "a"

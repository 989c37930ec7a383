"""Runs of several losses (also.NAME) by the command line: many processes, kills, evaluation, clear refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs, digest
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, VAL, losses, records, refused, tiny_arguments

VIEWS = "task=views objective=simclr model.head=simclr model.head_width=16 model.embed_dim=8 data.augment.flip=0.5"
CLASSES = "task=labelled objective=cross_entropy data.label=group global_batch_size=12"
BOTH = {"also.views": f"'{VIEWS} weight=0.5'", "also.groups": f"'{CLASSES}'", "data": "emoji", "data.workers": 1}


KEYS: dict[str, Any] = {**BOTH, "global_batch_size": 16, "steps": 4, "checkpoint.every": 2, "data.val": VAL}
KEYS |= {"model.batch_norm": "global"}


@pytest.fixture(scope="module")
def whole(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process to its end, with its report."""
    folder = tmp_path_factory.mktemp("whole")
    jobs = Jobs(commands, partial(tiny_arguments, models, folder / "runs"), folder)
    return jobs.run(1, {**KEYS, "tracking.report": "true"}, module="train")


def test_the_same_losses_on_any_number_of_processes(jobs: Jobs, whole: Path) -> None:
    assert losses(jobs.run(2, {**KEYS, "data.val": "null"})) == pytest.approx(losses(whole), abs=1e-5, rel=1e-5)
    first = records(whole)[0]
    parts = [first[f"train/{name}/loss"] for name in ("image_text", "views", "groups")]
    assert first["train/loss"] == pytest.approx(parts[0] + 0.5 * parts[1] + parts[2], rel=1e-6)
    assert (
        "also.views: task=views objective=simclr, 16 a step, its loss counts 0.5 times"
        in (whole / "log.txt").read_text()
    )


def test_a_killed_run_goes_on_to_the_same_bits(jobs: Jobs, whole: Path) -> None:
    killed = jobs.run_killed({**KEYS, "data.val": "null", "checkpoint.every": 1}, after=3)
    assert digest(killed) == digest(whole) and losses(killed) == losses(whole)


def test_each_loss_is_evaluated_and_the_run_is_used_as_any_other(whole: Path, commands: Commands) -> None:
    last = records(whole)[-1]
    assert last["eval/views_val/view_R@10"] > 0 and last["eval/groups_val/acc5"] > 0 and "val/image_to_text_R@1" in last
    assert json.loads((whole / "eval/views_val.json").read_text())["metrics"]["num_images"] > 0
    again = commands.run("eval", f"checkpoint={whole}", f"suite=[retrieval:{VAL}]")
    assert again.code == 0 and "left out" not in again.out, again.out
    own = commands.run("eval", f"run={whole}")
    assert own.code == 0 and "left out: also.views, also.groups, evaluated while training alone" in own.out, own.out
    assert "views_val" in (whole / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("task=view", ["task=view", "'views'"]),
        ("task=views objective=simclr steps=3", ["steps"]),
        ("task=views objective=sogclr", []),
        ("task=views objective=simclr data.train=nowhere.tar", ["nowhere.tar"]),
        ("task=views objective=simclr model.image.widths=[8,8]", []),
    ],
)
def test_refusals(text: str, named: list[str], jobs: Jobs) -> None:
    outcome = jobs.start(1, {"also.more": f"'{text}'", "data": "emoji", "data.train": SHARD}).ends()
    refused(outcome.ended, 2, "also.more", *named)


def test_a_weight_of_one_loss_alone_is_refused(jobs: Jobs) -> None:
    refused(jobs.start(1, {"weight": 2, "data.train": SHARD}).ends().ended, 2, "weight=2.0", "also.NAME")


@pytest.mark.soak
def test_slip_beats_what_is_untrained(commands: Commands, tmp_path: Path) -> None:
    arguments = ["experiment=slip_emoji", f"run.dir={tmp_path}", "run.name=a", "tracking=local"]
    ended = commands.run("train", *arguments)
    assert ended.code == 0, ended.out
    last: dict[str, Any] = records(tmp_path / "a")[-1]
    assert last["eval/views_val/view_R@1"] > 0.1 and last["val/image_to_text_R@1"] > 0.1

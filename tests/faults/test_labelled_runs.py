"""Runs of task=labelled by the command line: any number of processes, kills, prompts, texts, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs, digest
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, VAL, losses, records, refused
from ways import Way, in_ways, run_in_ways

CLASSES = {
    "task": "labelled",
    "model": "small_cnn",
    "model.text.name": "null",
    "model.text.kind": "open_clip",
    "model.text.frozen": "false",
    "data.label": "group",
    "objective": "cross_entropy",
    "objective.partition": "sum",
}
OF_RARE = {
    "objective": "partial_auc",
    "objective.alpha": 0.2,
    "model.embed_dim": "null",  # a score is one number
}
RARE = {
    **{key: value for key, value in CLASSES.items() if key != "objective.partition"},
    **OF_RARE,
    "data.rare": "activities",
    "data.rare_per_batch": 5,
}
PROMPTED = CLASSES | {"model.classes": "prompted"}


@pytest.mark.parametrize(("keys", "ways"), in_ways({"classes": CLASSES, "rare": RARE, "prompted": PROMPTED}))
def test_the_same_losses_on_any_number_of_processes(
    keys: dict[str, Any], ways: list[Way], jobs: Jobs, models: Path
) -> None:
    more = {"model.text.name": models / "open_clip.json"} if "model.classes" in keys else {}
    more |= {"steps": 5, "data": "emoji", "data.workers": 1}
    run_in_ways(jobs, {**keys, **more}, ways, tolerance=1e-6)


@pytest.mark.parametrize(
    "keys", [pytest.param(CLASSES, id="classes", marks=pytest.mark.soak), pytest.param(RARE, id="rare")]
)
def test_a_killed_run_goes_on_to_the_same_bits(keys: dict[str, Any], jobs: Jobs) -> None:
    keys = {**keys, "steps": 8, "checkpoint.every": 2, "data": "emoji", "data.workers": 1}
    killed, whole = jobs.run_killed(keys, after=5), jobs.run(1, {**keys, "run.name": "whole"})
    assert digest(killed) == digest(whole) and losses(killed) == losses(whole)


def test_classes_are_found_and_kept_with_the_run(jobs: Jobs, commands: Commands) -> None:
    keys = {**CLASSES, "data.val": VAL, "steps": 3, "objective.partition": "mean"}
    run = jobs.run(1, keys)
    log = (run / "log.txt").read_text()
    assert "less log 9, 0 by chance; objective=cross_entropy_sum has the same gradient" in log
    result = json.loads((run / "eval/val.json").read_text())
    assert result["task"] == "classification" and set(result["metrics"]) >= {"acc1", "acc5", "mean_per_class_recall"}
    assert "confusion" in result and "data.label=group: 9 classes, the first is activities" in log
    again = commands.run("eval", f"checkpoint={run}", f"suite=[classes:{VAL}]")
    assert again.code == 0, again.out
    assert records(run)[-1]["val/acc1"] == pytest.approx(result["metrics"]["acc1"])


def test_texts_with_a_class(jobs: Jobs, models: Path, tmp_path: Path) -> None:
    """The class is a field of a row; classes learnt, prompted, and one that is rare."""
    rows = [{"text": f"{'good' if i % 4 else 'bad'} day {i}", "mood": "happy" if i % 4 else "sad"} for i in range(200)]
    path = tmp_path / "moods.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bert = {"model": "encoder", "model.text.kind": "transformers", "model.text.name": models / "bert"}
    keys = {**CLASSES, **bert, "model.image.image_size": "null", "model.image.widths": [32, 64, 128, 192]}
    keys |= {"data": "image_text", "data.items": "texts", "data.train": path, "data.val": path, "data.label": "mood"}
    keys |= {"optim.lr": 1e-2, "steps": 20, "model.text.context_length": "null"}
    learnt = jobs.run(1, {**keys, "run.name": "learnt"})
    prompted = jobs.run(2, {**keys, "run.name": "prompted", "model.classes": "prompted", "data.template": "'a {} day'"})
    alone = {key: value for key, value in keys.items() if key != "objective.partition"}
    rare = jobs.run(1, {**alone, **OF_RARE, "data.rare": "sad", "run.name": "r"})
    assert records(learnt)[-1]["val/acc1"] > 0.9
    assert records(prompted)[-1]["val/acc1"] > 0.5
    assert records(rare)[-1]["val/auc"] > 0.9


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data.rare": "activity"}, ["data.rare=activity", "'activities'"]),
        ({"data.rare_per_batch": 30}, ["activities", "data.rare_per_batch"]),
        ({"data.rare_per_batch": 32}, ["data.rare_per_batch=32", "global_batch_size=32"]),
        ({"objective": "clip", "objective.alpha": None}, ["objective=clip"]),
        ({"data.rare": "null", "data.rare_per_batch": None}, ["objective=partial_auc", "data.rare=CLASS"]),
        (
            {"data.rare": "null", "data.rare_per_batch": None, "objective": "simclr", "objective.alpha": None},
            ["classes"],
        ),
        ({"data.label": "grupo"}, ["data.rare=activities", "data.label=grupo"]),
        (
            {"data.rare": "null", "data.rare_per_batch": None, "objective": "cross_entropy", "objective.alpha": None}
            | {"data.classes": "no.json"},
            ["data.classes=no.json"],
        ),
    ],
)
def test_refusals(change: dict[str, Any], named: list[str], jobs: Jobs) -> None:
    keys = {key: value for key, value in {**RARE, "data.train": SHARD, **change}.items() if value is not None}
    refused(jobs.start(1, keys).ends().ended, 2, *named)


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "metric"), [("classes_emoji", "acc1"), ("rare_class", "partial_auc@0.05")])
def test_recipes_beat_chance_and_what_is_untrained(
    recipe: str, metric: str, commands: Commands, tmp_path: Path
) -> None:
    arguments = [f"experiment={recipe}", f"run.dir={tmp_path}", "run.name=a", "tracking=local"]
    ended = commands.run("train", *arguments)
    assert ended.code == 0, ended.out
    ended = commands.run("eval", f"checkpoint={tmp_path / 'a'}", "baselines=[untrained]")
    assert ended.code == 0, ended.out
    result = json.loads((tmp_path / "a/eval/val.json").read_text())
    low, _ = result["intervals"][metric]
    ahead, _ = result["baselines"]["untrained"]["difference"][metric]["interval"]
    majority = result["chance"].get("majority_class_share", 0)
    assert ahead > 0 and low > max(result["chance"][metric], majority)

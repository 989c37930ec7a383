"""Every objective trains by command on images and on questions, with hard negatives and without, or says why not.

A sweep trains the objectives of a case, one after the other, in one job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli import Commands
from helpers.messages import raises
from helpers.tiny_runs import losses, refused
from test_negatives_of_images import IMAGES, with_negatives

from dyad.data.base.errors import ConfigError
from dyad.run.checks import check_arguments
from dyad.train.losses import OBJECTIVES

Tiny = Callable[[dict[str, Any]], list[str]]
Keys = Callable[[str, int], dict[str, Any]]
ELSEWHERE = {
    "partial_auc": "objective=partial_auc",
    "cpc": "task=sequence",
    "nll": "task=language_model",
    **dict.fromkeys(("distill_kl", "margin_mse", "cosent", "cosine_mse"), "data.teacher=FIELD"),
}  # what other tasks train, or none
TASKS = ("image_text", "question_passage")
PAIRS = sorted(name for name in OBJECTIVES if name not in (*ELSEWHERE, "epr"))
TAKERS = sorted(name for name in OBJECTIVES if "negatives" in OBJECTIVES[name].takes and name not in ELSEWHERE)
BOTH_SIDES = sorted(name for name in PAIRS if not OBJECTIVES[name]().no_x_negatives_because)  # take wrong images
FORMULAS = sorted({OBJECTIVES[name].formula: name for name in TAKERS}.values())  # one of each; others differ in options
# task, hard negatives a row, processes, objectives
EVERY = [(task, hard, world, TAKERS if hard else PAIRS) for task, hard, world in product(TASKS, (0, 1), (1, 2))]
QUICK = [("image_text", 1, 1, TAKERS), ("question_passage", 1, 2, FORMULAS)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.soak) for case in EVERY if case not in QUICK)]


@pytest.fixture
def keys(models: Path, tmp_path: Path) -> Keys:
    """The keys of a task with so many hard negatives a row."""

    def of(task: str, hard: int) -> dict[str, Any]:
        size = {"steps": 2, "global_batch_size": 10, "data.negatives.per_row": hard}
        if task == "image_text":
            shard = with_negatives(tmp_path / "images.tar", count=24)
            return {"data": task, "data.captions": "[caption]", "data.train": shard, **size} | {
                "data.negatives.fields": "[wrong]"
            }
        rows = [
            {
                "question": f"question {n}",
                "positive_ctxs": [{"title": "", "text": f"answer {n % 17}"}],
                "hard_negative_ctxs": [{"title": "", "text": f"no {n}"}] if n % 3 else [],
            }
            for n in range(24)
        ]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        text = {"model.text.kind": "transformers", "model.text.name": models / "bert", "model.text.pooling": "mean"}
        return {"data": task, "task": task, "model": "encoder", "data.train": tmp_path / "rows.json", **text, **size}

    return of


@pytest.mark.parametrize(("task", "hard", "world", "names"), CASES)
def test_every_objective_trains(
    task: str,
    hard: int,
    world: int,
    names: list[str],
    commands: Commands,
    keys: Callable[[str, int], dict[str, Any]],
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    of_task = keys(task, hard)
    both = BOTH_SIDES if hard and task == "image_text" else []
    sweeps = [(of_task, sorted({*names} - {*both})), ({**of_task, **IMAGES}, both)]
    for own, of_sweep in sweeps if both else [(of_task, names)]:
        words = arguments(tiny, own)[1:]
        done = commands.world(world, "faults.observed", *words, "-m", f"objective={','.join(of_sweep)}")
        assert [ended.code for ended in done] == [0] * world, done[0].out[-3000:]
        named = [ended.out.count("-m: ") for ended in done]
        assert named == [len(of_sweep), *[0] * (world - 1)]  # rank 0 names each run
    runs = list((tmp_path / "runs").iterdir())
    found = {yaml.safe_load((run / "config.yaml").read_text())["objective"]["name"]: losses(run) for run in runs}
    assert found.keys() == {*names} and all(len(of) == 2 and all(map(isfinite, of)) for of in found.values())


def test_the_others_leave_no_run_folder(commands: Commands, keys: Keys, tiny: Tiny, tmp_path: Path) -> None:
    words = arguments(tiny, keys("question_passage", 1))
    for name in sorted({*PAIRS} - {*TAKERS}):
        refused(commands.run(*words, f"objective={name}"), 2, f"objective={name}", "data.negatives.per_row=0")
    for name, named in ELSEWHERE.items():
        with raises(ConfigError, named):
            check_arguments([*words[1:], f"objective={name}"])
    assert not (tmp_path / "runs").exists()


def arguments(tiny: Tiny, keys: dict[str, Any]) -> list[str]:
    """Without the keys of a model of images where the task has none."""
    of_images = "model.image.", "model.embed_dim", "model.text.context", "data.captions"
    words = tiny(keys)
    return words if keys["data"] == "image_text" else [w for w in words if not w.startswith(of_images)]

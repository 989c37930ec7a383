"""Runs of task=sequence by the command line: any number of processes, kills, sharded, every objective, evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Jobs, digest
from helpers.cli import Commands
from helpers.slow_imports import recommends_without_slow_imports
from helpers.tiny_runs import losses, records, refused
from ways import Way, in_ways, run_in_ways

from dyad.train.losses import OBJECTIVES

Tiny = Callable[[dict[str, Any]], list[str]]
USERS, ITEMS = 40, 9
MODEL = {
    "task": "sequence",
    "data": "log",
    "model": "next_item",
    "model.embed_dim": 8,
    "model.image.image_size": "null",
    "model.image.widths": [32, 64, 128, 192],
    "model.text.name": "null",
    "global_batch_size": 10,
    "data.sequence.length": 6,
}
NEXT = {"objective": "nce", "objective.noise": "unigram", "objective.k": 32}
CPC = {"objective": "cpc", "objective.horizons": 2, "model.context.embed_dim": 5, "model.context.kind": "transformer"}
FRAMES = {**CPC, "data.items": "frames"}
NAMES = sorted(name for name, of in OBJECTIVES.items() if of.inputs in ("pairs", "sequences") and name != "epr")
FORMULAS = [*{OBJECTIVES[name].formula: name for name in NAMES}.values()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with logs, train.csv and val.jsonl, of users who go round in a circle, and frames/ of some of them."""
    folder, generator = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
    train, val = ["user,item,time,last"], []
    (folder / "frames").mkdir()
    for user in range(USERS):
        items = (generator.integers(ITEMS) + np.cumsum(generator.choice([1, 1, 1, 3], 2 + user % 11))) % ITEMS
        train += [f"u{user},i{item},{time},i{items[-2]}" for time, item in enumerate(items[:-1])]
        val.append({"user": f"u{user}", "item": f"i{items[-1]}", "time": 99})
        np.save(folder / f"frames/{user}.npy", generator.normal(size=(1 + user % 5, 3)).astype(np.float32))
    (folder / "train.csv").write_text("\n".join(train))
    (folder / "val.jsonl").write_text("\n".join(map(json.dumps, val)))
    later = [{**event, "item": f"i{int(event['item'][1:]) * 2 % ITEMS}", "time": 100} for event in val]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, later)))
    return folder


def keys(data: Path, **own: Any) -> dict[str, Any]:
    return {**MODEL, "data.train": data / "train.csv", **own}


@pytest.mark.parametrize(("own", "ways"), in_ways({"nce": NEXT, "cpc": CPC, "frames": FRAMES}))
def test_the_same_losses_on_any_number_of_processes(
    own: dict[str, Any], ways: list[Way], data: Path, jobs: Jobs
) -> None:
    more = {"data.train": data / "frames"} if own is FRAMES else {}
    given = keys(data, **{**own, **more, "model.context.dropout": 0, "steps": 4})
    run_in_ways(jobs, given, ways)


@pytest.mark.parametrize("own", [pytest.param(NEXT, id="nce"), pytest.param(CPC, id="cpc", marks=pytest.mark.soak)])
def test_a_killed_run_goes_on_to_the_same_bits(own: dict[str, Any], data: Path, jobs: Jobs) -> None:
    given = keys(data, **{**own, "steps": 8, "checkpoint.every": 2, "data.workers": 1})
    killed, whole = jobs.run_killed(given, after=5), jobs.run(1, {**given, "run.name": "whole"})
    assert digest(killed) == digest(whole) and losses(killed) == losses(whole)


def test_next_items_are_evaluated_beside_baselines(data: Path, jobs: Jobs, commands: Commands) -> None:
    given = keys(data, **{**NEXT, "data.val": data / "val.jsonl", "steps": 120, "optim.lr": 0.02, "tracking.every": 40})
    run = jobs.run(1, given)
    ended = commands.run("eval", f"run={run}")
    assert ended.code == 0, ended.out
    result = json.loads((run / "eval/val.json").read_text())
    metrics, baselines = result["metrics"], result["baselines"]
    assert {*metrics} >= {"HR@1", "HR@10", "nDCG@10", "MRR"} and metrics["num_items"] == ITEMS
    assert {*baselines} == {"popularity", "successors", "item_knn", "untrained"}
    assert metrics["MRR"] > baselines["popularity"]["metrics"]["MRR"] + 0.2  # three of four steps go to the next item
    assert records(run)[-1]["val/MRR"] == pytest.approx(metrics["MRR"])
    assert result["gallery"]["history → next item"] and result["intervals"]["MRR"]

    later, task = f"next_item:{data}/test.jsonl", data / "task.json"
    words = ["eval", f"run={run}", f"suite=[{later}]", f"val={data}/val.jsonl", "seen=drop", "baselines=[]"]
    two = commands.world(2, *words, f"out={run}/two")
    assert [each.code for each in two] == [0, 0], two[0].out
    dropped, test = (json.loads((run / f"two/{name}.json").read_text())["metrics"] for name in ("val", "test"))
    assert dropped["MRR"] > metrics["MRR"]  # what was seen is no rival any more
    task.write_text(json.dumps({"train": "train.csv", "test": "train.csv", "label": "last"}))
    words = [f"run={run}", f"suite=[{later},context_probe:{task}]", "seen=drop", "baselines=[untrained]"]
    ended = commands.run("eval", *words, f"out={run}/probe")
    assert ended.code == 0, ended.out
    without_val = json.loads((run / "probe/test.json").read_text())["metrics"]
    assert without_val == test  # the run's data.val is history of what comes after it
    result = json.loads((run / "probe/task.json").read_text())
    assert result["task"] == "sequence_linear_probe" and result["gallery"]["sequence → classes"]
    assert result["metrics"]["linear_acc1"] > 0.9  # a context knows the item that it ends with
    recommends_without_slow_imports(run, "i1")


def test_what_an_epoch_leaves_out_is_said(data: Path, commands: Commands, tiny: Tiny) -> None:
    for size, rest in ((29, True), (1, False)):
        ended = commands.run(*tiny(keys(data, steps=1, objective="info_nce", global_batch_size=size)))
        assert ended.code == 0 and ("an epoch leaves out" in ended.out) is rest, ended.out


@pytest.mark.parametrize(
    "names", [pytest.param(FORMULAS, id="one of each formula"), pytest.param(NAMES, id="all", marks=pytest.mark.soak)]
)
def test_every_objective_trains_on_sequences(
    names: list[str], data: Path, commands: Commands, tiny: Tiny, tmp_path: Path
) -> None:
    ended = commands.run(*tiny(keys(data, steps=2)), "-m", f"objective={','.join(names)}")
    assert ended.code == 0, ended.out[-3000:]
    assert len([*(tmp_path / "runs").iterdir()]) == len(names)


def test_contexts_are_weighed_the_same_on_any_number_of_processes(
    data: Path, commands: Commands, jobs: Jobs, tmp_path: Path
) -> None:
    out = tmp_path / "parts"
    assert commands.run("data", "sequences", str(data / "train.csv"), f"out={out}").code == 0
    weighed = {"objective": "one_sided_dpm", "objective.importance": "log_q", "model.context.dropout": 0, "steps": 3}
    weighed |= {"objective.importance_file": out / "log_q.safetensors", "data.train": out / "train.jsonl"}
    one, two = (jobs.run(world, keys(data, **weighed, **{"run.name": f"on-{world}"})) for world in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    data: Path, commands: Commands, tiny: Tiny, tmp_path: Path
) -> None:
    for own, words in [
        ({"data.sequence.item": "thing"}, ["data.sequence.item=thing", "COLUMN"]),
        ({"data.items": "pictures"}, ["data.sequence.items is missing", "data=log", "data.items=texts"]),
        ({"model.context.embed_dim": 3, "objective": "clip"}, ["model.context.embed_dim", "objective=cpc"]),
        ({"objective": "cpc", "objective.horizons": 6}, ["objective.horizons=6", "data.sequence.length=6"]),
        ({"data.batches": "by_source"}, ["data.batches=by_source"]),
        ({"data.mode": "stream"}, ["data.mode=stream"]),
        ({"objective": "partial_auc"}, ["objective=partial_auc"]),
        ({"plan.gpus": 8}, ["plan"]),
    ]:
        refused(commands.run(*tiny(keys(data, **own))), 2, *words)
    assert not (tmp_path / "runs").exists()

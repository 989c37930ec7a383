"""Runs whose embeddings can be cut, and evaluations of cut ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import Commands
from helpers.tiny_runs import VAL, records

import dyad


def test_a_run_trains_and_evaluates_cut_embeddings(
    commands: Commands, tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    keys = {"steps": 2, "objective.matryoshka": [4, 8], "eval.width": 8, "data.val": VAL, "run.name": "a"}
    assert (done := commands.run(*tiny(keys))).code == 0, done.out
    run = tmp_path / "runs" / "a"
    first = next(r for r in records(run) if "train/loss" in r)
    assert first["train/loss"] > first["train/loss_4"] + first["train/loss_8"]
    at_the_end = [r for r in records(run) if any(key.startswith("val/") for key in r)][-1]
    scores = {}
    for width in (8, "null"):
        out = tmp_path / f"width-{width}"
        words = [f"run={run}", f"val={VAL}", f"width={width}", f"out={out}", "baselines=[]"]
        assert (done := commands.run("eval", *words)).code == 0, done.out
        (result,) = out.glob("*.json")
        scores[width] = json.loads(result.read_text())["metrics"]
    shared = {name: value for name, value in scores[8].items() if f"val/{name}" in at_the_end}
    assert shared == {name: pytest.approx(at_the_end[f"val/{name}"], abs=1e-6) for name in shared} and shared
    assert scores[8] != scores["null"]
    wide = commands.run("eval", f"run={run}", f"val={VAL}", "width=33", f"out={tmp_path}/wide", "baselines=[]")
    assert wide.code == 2 and "eval.width=33: embeddings have 32 numbers" in wide.out
    model = dyad.load(run)
    assert model.encode_text("a frog").shape == (1, 32)  # eval.width is of evaluations alone
    (found,) = dyad.evaluate(model, val=str(VAL)).values()
    assert found.items() <= scores[8].items()

"""Evaluation that goes wrong is an error, never a score; on any number of processes it is the same score."""

import json
import math
from pathlib import Path

import torch
from helpers.cli import Commands
from helpers.tiny_runs import QUIET, VAL

from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import MANIFEST, MODEL
from dyad.train.run_folder.saving import write_checkpoint


def test_data_that_the_processes_cannot_share_evenly(commands: Commands, tiny, tmp_path: Path) -> None:
    keys = {**QUIET, "steps": 2, "run.name": "a", "data.val": VAL}
    assert commands.run(*tiny(keys)).code == 0
    run = tmp_path / "runs" / "a"
    result = json.loads((run / "eval" / "val.json").read_text())
    assert result["metrics"]["num_images"] % 3 and result["metrics"]["num_texts"] % 3
    ended = commands.world(3, "eval", f"checkpoint={run}", f"out={tmp_path / 'three'}", "block=16")
    assert [e.code for e in ended] == [0, 0, 0], ended[0].out
    again = commands.run("eval", f"checkpoint={run}", f"out={tmp_path / 'one'}", "block=16")
    assert again.code == 0, again.out
    one, three = (json.loads((tmp_path / name / "val.json").read_text()) for name in ("one", "three"))
    assert one == three and all(math.isfinite(value) for value in one["metrics"].values())


def test_embeddings_that_are_not_numbers(commands: Commands, tiny, tmp_path: Path) -> None:
    assert commands.run(*tiny({**QUIET, "steps": 1, "run.name": "a"})).code == 0
    run = tmp_path / "runs" / "a"
    (folder,) = (run / "checkpoints").glob("step_*")
    state = Checkpoint(folder).read()
    state.step = 2
    next(value for name, value in state.model.items() if name.startswith("towers.x_tower")).fill_(torch.nan)
    assert {MANIFEST, MODEL} <= {path.name for path in write_checkpoint(run, state, keep=1).iterdir()}
    ended = commands.world(2, "eval", f"checkpoint={run}", f"val={VAL}")
    assert [e.code for e in ended] == [3, 3]
    assert "".join(e.out for e in ended).count("of the x tower are not finite") == 1, ended
    assert not list((run / "eval").glob("*.json"))

"""Runs that are loaded: while they train, by a name that is none, and their exports as the same model."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.export import near
from helpers.messages import raises
from helpers.passages import make_run as make_text_run
from helpers.runs import make_run, save_checkpoint

import dyad
from dyad.data.base.errors import ConfigError
from dyad.evaluation.load_run import load_found, load_on_all, read_config
from dyad.export.main import main as export
from dyad.train.distributed.world import World
from dyad.train.run_folder.checkpoint import Checkpoint


@pytest.mark.parametrize("load", [load_found, lambda path: load_on_all(path, World())], ids=["alone", "on all ranks"])
@pytest.mark.parametrize("read", ["verify", "weights"])
def test_the_newest_is_taken_again_if_the_run_deletes_it(read: str, load: Any, tmp_path: Path, monkeypatch) -> None:
    """While it is chosen, and while it is read."""
    folder = make_run(tmp_path)
    reader = getattr(Checkpoint, read)

    def later(checkpoint: Checkpoint, *names: str) -> Any:
        if checkpoint.folder.name == "step_00000007" and checkpoint.folder.exists():
            save_checkpoint(folder, read_config(folder), seed=5, step=9)
            shutil.rmtree(checkpoint.folder)
        return reader(checkpoint, *names)

    monkeypatch.setattr(Checkpoint, read, later)
    assert load(str(folder)).step == 9


def test_a_file_is_no_run_and_is_not_meant(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with raises(ConfigError, f"'{tmp_path}/README.md' is no folder. Give a run folder"):
        dyad.load(tmp_path / "README.md")


@pytest.mark.parametrize("shared", ["true", "false"])
def test_an_export_searches_the_index_of_its_run(shared: str, tmp_path: Path, monkeypatch) -> None:
    near(monkeypatch)
    run = make_text_run(tmp_path / "run", f"model.shared={shared}")
    monkeypatch.setattr(sys, "argv", ["train.export", f"run={run}", "format=dpr", f"out={tmp_path / 'dpr'}"])
    export()
    model, exported = dyad.load(run, "cpu"), dyad.load(tmp_path / "dpr", "cpu")
    assert not any(module.training for each in (model, exported) for module in each.loaded.model.towers.modules())
    index = model.index(["anchor", "bridge"])
    (ours,), (theirs,) = (each.search(index, "anchor", k=1) for each in (model, exported))
    assert theirs.item == ours.item and theirs.score == pytest.approx(ours.score, abs=1e-5)

"""RUN@best: what it names, what stays on the disk for it, and what is said where it names nothing."""

from pathlib import Path
from shutil import rmtree

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.folder import folder_of, run_of, steps, without_best
from dyad.train.run_folder.locate import locate
from dyad.train.run_folder.saving import write_checkpoint
from tests.train.run_folder.test_checkpoint import Run


def write(run_dir: Path, step: int, best: int | None, keep: int = 1) -> None:
    named = best and Best(metric="val/R@1", value=0.5, step=best)
    run = Run(0)
    write_checkpoint(run_dir, capture(run.modules, run.optimizer, step, {"best": named}), keep)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "x"
    for step, best in ((2, 2), (4, 2), (6, 2)):
        write(folder, step, best)
    return folder


def test_the_best_stays_until_another_one_is_better(run: Path) -> None:
    assert steps(run) == [6, 2]
    write(run, 8, 8)
    assert steps(run) == [8]
    write(run, 10, 8)
    write(run, 12, None)  # a program that knows no best
    assert steps(run) == [12]


def test_the_name_is_that_of_the_best_and_the_run_is_its_newest(run: Path) -> None:
    name = Path(f"{run}@best")
    assert locate(name, print) == folder_of(run, 2) and locate(run, print) == folder_of(run, 6)
    assert without_best(name) == run and without_best(run) == run
    (run / "config.yaml").touch()
    assert run_of(name) == run
    name.mkdir()  # a folder of that name is what it is
    assert without_best(name) == name


def test_what_has_no_best(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "plain", 2, None)  # without checkpoint.best, or with it and before the first evaluation
    for named in (tmp_path / "plain", tmp_path / "nowhere", folder_of(run, 2)):
        with raises(ConfigError, f"{named}@best"):
            locate(Path(f"{named}@best"), print)


def test_damage_is_named(run: Path) -> None:
    """The newest that is whole knows the best. Another checkpoint never takes the place of the best."""
    name, said = Path(f"{run}@best"), list[str]()
    write(run, 8, 2, keep=2)
    state = folder_of(run, 8) / "state.json"
    state.write_text(state.read_text().replace('"step": 2', '"step": 6'))
    assert locate(name, said.append) == folder_of(run, 2) and str(state) in said[0]
    rmtree(folder_of(run, 2))
    with raises(DataError, name, folder_of(run, 2), "val/R@1"):
        locate(name, said.append)
    for step in (6, 8):
        (folder_of(run, step) / "manifest.json").write_text("{}")
    with raises(DataError, run):
        locate(name, said.append)


@pytest.mark.parametrize("best", [{"metric": "a", "value": 1.0, "step": "../../b"}, {"step": 2}, {"step": -1}])
def test_an_entry_of_somebody_else_names_no_other_folder(best: dict[str, object], tmp_path: Path) -> None:
    run, said = Run(0), list[str]()
    write_checkpoint(tmp_path, capture(run.modules, run.optimizer, 2, {"best": best}), 1)
    with raises(DataError, tmp_path):
        locate(Path(f"{tmp_path}@best"), said.append)
    assert "no checkpoint of ours" in said[0]

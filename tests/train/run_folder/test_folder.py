"""What a start moves aside in its run folder, and where a run goes on that began at a checkpoint named by resume=."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from dyad.train.run_folder.folder import (
    CONFIG,
    REPORT,
    STATE,
    by_section,
    check_run,
    open_run,
    resume_mode,
    run_folder,
    steps,
)
from dyad.train.run_folder.run_state import RunState, is_finished


def configured(folder: Path, *words: str, name: str = "a") -> TrainConfig:
    return compose_config(["experiment=emoji_scratch", f"run.dir={folder}", f"run.name={name}", "steps=40", *words])


def begun(config: TrainConfig, *saved: int) -> Path:
    """A run folder with checkpoints of these steps, and a line of metrics."""
    run = open_run(config)
    for step in saved:
        (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def test_from_an_earlier_checkpoint_of_its_own_those_after_it_are_put_aside(tmp_path: Path) -> None:
    run = begun(configured(tmp_path), 10, 20, 30)
    middle = run / "checkpoints" / "step_00000020"
    open_run(configured(tmp_path, f"resume={middle}"), middle)
    (aside,) = run.glob("before-*")
    assert steps(run) == [20, 10] and steps(aside) == [30] and (run / "metrics.jsonl").exists()


def test_damaged_checkpoints_that_were_passed_over_are_put_aside(tmp_path: Path) -> None:
    """They would count in checkpoint.keep, and the whole one would be deleted."""
    said: list[str] = []
    run = begun(configured(tmp_path), 10, 20, 30)
    open_run(configured(tmp_path), run / "checkpoints" / "step_00000010", said.append)
    (aside,) = run.glob("before-*")
    assert steps(run) == [10] and steps(aside) == [30, 20] and (run / "metrics.jsonl").exists()
    assert said == [f"put aside in {aside}: checkpoints/step_00000020, checkpoints/step_00000030"]


def test_records_without_a_checkpoint_are_put_aside(tmp_path: Path) -> None:
    said: list[str] = []
    run = begun(configured(tmp_path))
    (run / "restarts.jsonl").touch()
    open_run(configured(tmp_path), log=said.append)
    (aside,) = run.glob("before-*")
    assert said[0].startswith(f"{run} was at step 1 and has no checkpoint") and str(aside) in said[1]
    assert os.listdir(aside) == ["metrics.jsonl"] and (run / "restarts.jsonl").exists()
    (run / "metrics.jsonl").write_text('{"step": 0}\n')  # an evaluation before the first step
    open_run(configured(tmp_path), log=pytest.fail)


def test_a_missing_configuration_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    run = begun(configured(tmp_path), 10)
    newest = run / "checkpoints" / "step_00000010"
    open_run(configured(tmp_path), newest, pytest.fail)
    (run / CONFIG).unlink()
    open_run(configured(tmp_path, "optim.lr=9e-3"), newest, said.append)
    assert len(said) == 1 and said[0].startswith(f"{run / CONFIG} was missing") and (run / CONFIG).exists()


def test_from_a_checkpoint_of_another_run_the_whole_run_there_is_put_aside(tmp_path: Path) -> None:
    other = begun(configured(tmp_path, name="b"), 20) / "checkpoints" / "step_00000020"
    run = begun(configured(tmp_path), 10, 30)
    open_run(configured(tmp_path, f"resume={other}"), other)
    (aside,) = run.glob("before-*")
    assert steps(run) == [] and steps(aside) == [30, 10] and (aside / "metrics.jsonl").exists()


@pytest.mark.parametrize("killed_after", range(1, 4))
def test_a_kill_while_a_run_is_put_aside_loses_and_mixes_nothing(
    tmp_path: Path, killed_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(configured(tmp_path), 10)
    files, moves, real = {*os.listdir(run)}, iter(range(1, killed_after)), os.rename

    def rename(old: Path, new: Path) -> None:
        real(old, new)
        if next(moves, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", rename)
        open_run(configured(tmp_path, "resume=never", "seed=1"))
    (aside,) = run.glob("before-*")
    assert {*os.listdir(run), *os.listdir(aside)} - {aside.name} == files
    assert not (run / "checkpoints").exists() or (run / CONFIG).exists()
    assert (run / "checkpoints").exists() or not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(("norm", "may"), [("global", True), ("frozen", True), ("per_chunk", False)])
def test_what_changes_memory_alone_may_change(norm: str, may: bool, tmp_path: Path) -> None:
    """tests/dyad/run/test_views.py trains with per_chunk and model.grad_checkpointing."""
    own = f"model.batch_norm={norm}"
    begun(configured(tmp_path, own), 10)
    check_run(configured(tmp_path, own, "model.grad_checkpointing=true"))
    with nullcontext() if may else raises(ConfigError, "chunk_size: null there, 8 now"):
        check_run(configured(tmp_path, own, "chunk_size=8"))


def test_the_chunks_of_an_auxiliary_loss_may_not_change(tmp_path: Path) -> None:
    """Its head has the only batch norms."""
    of_chunks = "task=views objective=simclr model.head=simclr model.batch_norm=per_chunk"
    begun(configured(tmp_path, f"also.views='{of_chunks}'"), 10)
    with raises(ConfigError, "chunk_size: null there, 8 now"):
        check_run(configured(tmp_path, f"also.views='{of_chunks}'", "chunk_size=8"))
    own = f"also.views='{of_chunks} chunk_size=4'"
    begun(configured(tmp_path, own, name="b"), 10)
    check_run(configured(tmp_path, own, "chunk_size=8", name="b"))


def test_the_same_resume_goes_on_once_it_has_begun(tmp_path: Path) -> None:
    named = tmp_path / "b" / "checkpoints" / "step_00000020"
    config = configured(tmp_path, f"resume={named}/")
    run = run_folder(config)
    with RunState(run.parent, 20, 40, resumed_from=str(named)):  # that of another folder
        assert resume_mode(config) == config.resume.mode
    run.mkdir()
    with RunState(run, 20, 40, resumed_from=str(named)) as record:
        assert resume_mode(config) == config.resume.mode  # no checkpoint of its own
        begun(config, 40)
        assert resume_mode(config) == "auto" and not is_finished(config)
        record.write("finished", 40)
    assert json.loads((run / STATE).read_text())["resumed_from"] == str(named)
    assert not is_finished(config)  # killed before its report was written
    (run / REPORT).touch()
    assert is_finished(config)
    assert resume_mode(configured(tmp_path, f"resume={named}1")) == f"{named}1"
    open_run(config)
    assert steps(run) == [40]


def test_a_text_that_begins_with_a_tilde_is_shown_as_it_is() -> None:
    assert by_section({"data.question.prefix": "~nobody: "}) == {"data": 'question.prefix="~nobody: "'}

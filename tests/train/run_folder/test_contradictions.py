"""Numbers of a stranger's checkpoint that contradict each other are refused in one line, before they are used."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.foreign_files import seal
from helpers.messages import raises
from safetensors import safe_open
from safetensors.torch import save_file

from dyad.data.base.errors import ConfigError, DataError
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import CheckpointState, capture, restore
from dyad.train.run_folder.folder import STATE, recorded_state
from dyad.train.run_folder.saving import write_checkpoint

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in two parts: x has rows 0 … 3 and 4 … 6."""
    x, found = torch.arange(14.0).reshape(7, 2), tmp_path
    for rank, rows in ((1, slice(4, 7)), (0, slice(0, 4))):
        state = CheckpointState(
            3, {"x": x[rows]}, {"x/exp_avg": x[rows]}, {}, {}, part=(rank, 2, "a"), rows={"x": rows}
        )
        found = write_checkpoint(tmp_path, state, keep=1)
    assert torch.equal(Checkpoint(found).read().model["x"], x)
    return found


def part(x: torch.Tensor, starts: Any) -> Callable[[Path], None]:
    """Write the second part anew."""
    return lambda folder: save_file({"x": x}, folder / SECOND, {"starts": json.dumps(starts)})


def with_step(step: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**facts, "step": step}))

    return change


WRONG = {
    "rows overlap": (part(torch.zeros(3, 2), {"x": 3}), "x"),
    "rows are left out": (part(torch.zeros(3, 2), {"x": 5}), "x"),
    "rows begin before the first": (part(torch.zeros(3, 2), {"x": -1}), "x"),
    "both are the first part": (part(torch.zeros(3, 2), {}), "x"),
    "another width": (part(torch.zeros(3, 5), {"x": 4}), "x"),
    "no rows at all": (part(torch.tensor(1.0), {"x": 4}), "x"),
    "a row that is no number": (part(torch.zeros(3, 2), {"x": "4"}), ""),
    "starts that are no object": (part(torch.zeros(3, 2), [4]), ""),
    "a negative step": (with_step(-1), "step"),
    "a huge step": (with_step(10**18), "step"),
    "a step that is text": (with_step("3"), "step"),
    "a step that is true": (with_step(True), "step"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_contradict_each_other(folder: Path, wrong: str) -> None:
    change, key = WRONG[wrong]
    change(folder)
    seal(folder)
    with raises(DataError, folder, *filter(None, [key])) as error:
        Checkpoint(folder).read()
    assert "\n" not in str(error.value)
    if key == "x":
        with raises(DataError, folder, key):
            Checkpoint(folder).weights()


def test_parts_know_where_they_begin(folder: Path) -> None:
    with safe_open(folder / SECOND, "pt") as file:
        assert json.loads(file.metadata()["starts"]) == {"x": 4}


@pytest.mark.parametrize("step", ["x", None, 1.5, -1, [3]])
def test_a_state_with_another_step_is_no_finished_run(tmp_path: Path, step: Any) -> None:
    from dyad.train.cli.compose import compose_config
    from dyad.train.run_folder.folder import run_folder
    from dyad.train.run_folder.run_state import is_finished

    config = compose_config(["data.train=x", "steps=3", "run.name=a", f"run.dir={tmp_path}", "tracking.report=false"])
    (tmp_path / "a" / "checkpoints" / "step_00000003").mkdir(parents=True)
    (run_folder(config) / STATE).write_text(json.dumps({"status": "finished", "step": step}))
    assert recorded_state(run_folder(config)) and not is_finished(config)


MOMENTS = {
    "a moment of one number": {"exp_avg": torch.zeros(())},
    "a short moment": {"exp_avg": torch.zeros(7)},
    "a long moment": {"exp_avg_sq": torch.zeros(1000)},
    "a moment as a number of state.json": {"exp_avg": 0.5},
    "several steps": {"step": torch.zeros(4)},
    "one more": {"max_exp_avg_sq": torch.zeros(5, 4)},
    "no moment": {"exp_avg": None},
}


@pytest.mark.parametrize("wrong", MOMENTS)
def test_optimiser_state_of_another_shape_than_its_weight(wrong: str) -> None:
    """The fused kernel would write behind the end of a short tensor: the process aborted."""
    modules = {"towers": torch.nn.Linear(4, 5, bias=False)}
    optimizer = torch.optim.AdamW(modules["towers"].parameters(), fused=True)
    modules["towers"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = capture(modules, optimizer, 1, {})
    restore(state, modules, optimizer)
    changed = {f"towers.weight/{key}": value for key, value in MOMENTS[wrong].items()}
    tensors = {**state.optimizer, **changed}
    numbers = {key: value for key, value in changed.items() if isinstance(value, float)}
    tensors = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    with raises(ConfigError, "optimiser state", "(5, 4)") as error:
        restore(replace(state, optimizer=tensors, scalars=numbers), modules, optimizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("copy", ["average", "target"])
@pytest.mark.parametrize("shape", [(1,), (4, 5), (7,)])
def test_an_average_or_target_of_another_shape_than_its_weight(shape: tuple[int, ...], copy: str) -> None:
    """One number was taken for all; another shape was a RuntimeError, after the weights had changed."""
    modules = {"towers": torch.nn.Linear(4, 5)}
    optimizer = torch.optim.AdamW(modules["towers"].parameters())
    state = replace(capture(modules, optimizer, 1, {}), **{copy: {"towers.bias": torch.zeros(shape)}})
    state.model = {name: torch.ones_like(tensor) for name, tensor in state.model.items()}
    with raises(ConfigError, "towers.bias"):
        restore(state, modules, optimizer)
    assert not (modules["towers"].weight == 1).any()


@pytest.mark.parametrize("key", ["0/lr", "0/params", "0/betas", "9/x", f"{'9' * 5000}/x"])
def test_groups_take_nothing_that_the_configuration_says(key: str) -> None:
    modules = {"towers": torch.nn.Linear(4, 5)}
    optimizer = torch.optim.AdamW(modules["towers"].parameters())
    state = replace(capture(modules, optimizer, 1, {}), scalars={key: 1.0})
    with raises(ConfigError, "optimiser state of"):
        restore(state, modules, optimizer)

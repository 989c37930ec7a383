"""The average of the weights: the recurrence by hand over real steps, and what holds it when."""

from pathlib import Path

import pytest
import torch
from helpers.step import batch, towers, train_step
from torch import Tensor

from dyad.train.config import OptimConfig
from dyad.train.run_folder import checkpoint
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import AVERAGE, MANIFEST, capture, restore
from dyad.train.run_folder.named_tensors import named_tensors
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.step.step import TrainStep

EMA = OptimConfig(lr=1e-2, ema=0.6)


def weights(step: TrainStep) -> dict[str, Tensor]:
    parts = {"towers": step.towers, "objective": step.objective}
    return {name: tensor.detach().clone() for name, tensor in named_tensors(parts).items()}


def evaluated(step: TrainStep) -> dict[str, Tensor]:
    with step.average.applied():
        return weights(step)


def test_the_average_is_the_recurrence_and_a_skipped_step_is_not_in_it() -> None:
    step, spoiled = train_step(towers(normed=True), 8, optim=EMA), 3
    by_hand: dict[str, Tensor] = {}
    taken = 0
    for index in range(7):
        rows = batch(8, seed=index)
        if index == spoiled:
            rows.x[0] = torch.nan
        step(rows, index)
        assert bool(step.skip_reason) == (index == spoiled)
        if index == spoiled:
            continue
        now, share = weights(step), min(0.6, (1 + taken) / (10 + taken))
        by_hand = {name: share * by_hand.get(name, value) + (1 - share) * value for name, value in now.items()}
        taken += 1
    before, average = weights(step), evaluated(step)
    trained = {name for name, _ in step.towers.named_parameters("towers")} | {"objective.logit_scale"}
    for name, value in average.items():
        expected = by_hand[name] if name in trained else before[name]  # buffers are those of the last step
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    assert any(not torch.equal(average[name], before[name]) for name in trained)
    assert all(torch.equal(value, before[name]) for name, value in weights(step).items())


@pytest.mark.parametrize("normed", [False, True])
def test_a_resumed_average_is_that_of_the_undisturbed_run_to_the_bit(tmp_path: Path, normed: bool) -> None:
    straight, first = (train_step(towers(normed=normed), 8, optim=EMA) for _ in range(2))
    for index in range(6):
        straight(batch(8, seed=index), index)
        if index < 3:
            first(batch(8, seed=index), index)
    parts = {"towers": first.towers, "objective": first.objective}
    state = capture(parts, first.optimizer, 3, {}, average=first.average.tensors)
    saved = write_checkpoint(tmp_path, state, keep=1)
    second = train_step(towers(seed=9, normed=normed), 8, optim=EMA)
    parts = {"towers": second.towers, "objective": second.objective}
    second.average.tensors, _ = restore(Checkpoint(saved).read(), parts, second.optimizer)
    second.load_state_dict(first.state_dict())
    used = Checkpoint(saved).weights()  # what eval, mining and exports take
    assert all(torch.equal(value, used[name]) for name, value in evaluated(second).items())
    for index in range(3, 6):
        second(batch(8, seed=index), index)
    for a, b in ((weights(second), weights(straight)), (evaluated(second), evaluated(straight))):
        assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_without_it_nothing_is_held_or_written(tmp_path: Path) -> None:
    step = train_step(towers(), 8)
    step(batch(8), 0)
    assert not step.average.tensors and "averaged" not in step.state_dict()
    parts = {"towers": step.towers, "objective": step.objective}
    state = capture(parts, step.optimizer, 1, {}, average=step.average.tensors)
    saved = write_checkpoint(tmp_path, state, keep=1)
    assert not (saved / AVERAGE).exists()
    assert f'"format": {checkpoint.OLDEST}' in (saved / MANIFEST).read_text()

"""What counts as a loss spike, and what a step that has one leaves behind."""

import json
from dataclasses import replace

import pytest
from helpers.messages import raises
from helpers.step import batch, same_bits, snapshot, towers, train_step

from dyad.data.base.errors import UserError
from dyad.train.config import OptimConfig
from dyad.train.monitor.loss_spikes import WINDOW, LossSpikes


def spikes(factor: float | None, losses: list[float]) -> LossSpikes:
    made = LossSpikes(factor)
    made.losses.extend(losses)
    return made


def test_a_spike_is_this_many_times_the_mean_of_the_last_ten() -> None:
    usual = spikes(2.0, [9.0] * 5 + [1.5, 0.5] * 5)  # the first five are forgotten
    assert usual.mean == 1.0
    assert usual.is_spike(2.001) and not usual.is_spike(1.999)


def test_below_ten_losses_and_without_a_factor_there_is_none() -> None:
    assert not spikes(2.0, [1.0] * (WINDOW - 1)).is_spike(100.0)
    assert not spikes(None, [1.0] * WINDOW).is_spike(100.0)


@pytest.mark.parametrize(
    ("losses", "highest"),
    [([-4.0] * WINDOW, 0.0), ([-1.0, 1.0] * 5, 2.0), ([0.1, -0.3] * 5, 0.3)],
    ids=["below zero", "around zero", "near zero"],
)
def test_losses_below_or_near_zero_may_rise_by_their_size(losses: list[float], highest: float) -> None:
    usual = spikes(2.0, losses)
    assert usual.is_spike(highest + 1e-9) and not usual.is_spike(highest - 1e-9)


def test_a_spike_changes_nothing_and_is_counted_and_the_window_is_saved() -> None:
    usual = batch(8)
    rare = replace(usual, y=usual.y.flip(0))  # captions of one step permuted
    step = train_step(towers(), 8, optim=OptimConfig(lr=1e-2, spike=1.5, max_skipped=2))
    for index in range(100):
        step(usual, index)
    before, state = snapshot(step), json.loads(json.dumps(step.state_dict()))
    assert step(rare, 100)["skipped"] == 1 and step.skip_reason == "spike"
    assert same_bits(snapshot(step), before)
    assert step(usual, 101)["skipped"] == 1 and step.skip_reason == ""
    step(rare, 102)
    with raises(UserError, "step 104", "optim.spike=1.5"):
        step(rare, 103)

    again = train_step(towers(), 8, optim=OptimConfig(lr=1e-2, spike=1.5))
    again.load_state_dict(state)
    assert again.state_dict() == state and len(state["losses"]) == WINDOW
    assert again(rare, 100)["skipped"] == 1 and again.skip_reason == "spike"

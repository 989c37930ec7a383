"""Several losses in one step: the weighted sum of what each is alone."""

from time import sleep

import pytest
import torch
from helpers.dist import launch
from helpers.messages import raises
from helpers.step import batch, towers

from dyad.data.base.errors import UserError
from dyad.train.config import OptimConfig, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_of_two_losses_has_the_gradient_of_their_sum(world_size: int) -> None:
    launch("dist_several.py", world_size)


def test_a_loss_that_is_not_finite_skips_the_step_for_all() -> None:
    model, world = towers(normed=True), World()
    config = TrainConfig(seed=1, global_batch_size=8, optim=OptimConfig(lr=1e-2, max_skipped=2))
    term = LossTerm(model, build_objective("spectral").double(), config, 100, world, name="more")
    step = TrainStep([LossTerm(model, build_objective("clip").double(), config, 100, world), term])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own, auxiliary = batch(8), batch(8, 1)
    auxiliary.x[0] = torch.inf
    own.auxiliary = (auxiliary,)
    assert step(own, 0)["skipped"] == 1 and step.skip_reason == "nonfinite"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with raises(UserError, "step 2", "Not finite: loss, more/loss, towers.x_tower.layers.0.weight.grad") as caught:
        step(own, 1)
    assert caught.value.args[0].count(".grad") == 3 and "image_text/loss" not in str(caught.value)


def test_a_gradient_whose_norm_alone_overflows_is_named() -> None:
    model, world = towers(normed=True), World()
    config = TrainConfig(seed=1, global_batch_size=8, optim=OptimConfig(lr=1e-2, max_skipped=1))
    step = TrainStep([LossTerm(model, build_objective("clip").double(), config, 100, world)])
    next(model.parameters()).register_hook(lambda gradient: torch.full_like(gradient, 1e200))
    with raises(UserError, "step 1", "Not finite: grad_norm."):
        step(batch(8), 0)


def test_the_own_time_of_a_step_ends_where_its_first_loss_waits() -> None:
    model, config, world = towers(normed=True), TrainConfig(seed=1, global_batch_size=8), World()
    term = LossTerm(model, build_objective("spectral").double(), config, 100, world, name="more")
    step = TrainStep([LossTerm(model, build_objective("clip").double(), config, 100, world), term])
    step.objective.register_forward_hook(lambda *_: sleep(0.5))  # as if another rank were late
    own = batch(8)
    own.auxiliary = (batch(8, 1),)
    step(own, 0)
    assert step.local_timer.read() < 0.5

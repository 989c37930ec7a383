"""Job for torchrun: a step of two losses over shared weights has the gradient of their weighted sum, in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.step import LOGIT_SCALE, batch, dense_gradients, towers
from torch import Tensor, nn

from dyad.data.batch import Batch
from dyad.train.config import OptimConfig, TrainConfig
from dyad.train.distributed.world import init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import TwoTower
from jobs.dist_step import own

PAIRS = {1: (8,), 2: (5, 3), 4: (3, 0, 4, 1)}
VIEWS = {1: (6,), 2: (2, 4), 4: (0, 3, 1, 2)}
WEIGHT = 0.5


def spectral(views: TwoTower, whole: Batch) -> Tensor:
    x, y = views.x_tower(whole.x), views.y_tower(whole.y)
    scores, b = x @ y.T, len(x)
    others = scores.square().sum() - scores.diagonal().square().sum()
    return others / (b * (b - 1)) - 2 / b * scores.diagonal().sum()


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    for chunk_size in (None, 2):
        model = towers()
        first, between, _ = model.x_tower.get_submodule("layers").children()
        head = nn.Sequential(first, between, nn.Linear(8, 4).double())  # shares the first layer
        views = TwoTower(head, head)
        options = {"seed": 1, "optim": OptimConfig(lr=1e-2), "chunk_size": chunk_size}
        of_views = TrainConfig(global_batch_size=6, weight=WEIGHT, **options)
        term = LossTerm(views, build_objective("spectral").double(), of_views, 100, world, name="views")
        config = TrainConfig(global_batch_size=8, **options)
        step = TrainStep([LossTerm(model, build_objective("clip").double(), config, 100, world), term])
        for index in range(3):
            whole, second = batch(8, index), batch(6, 100 + index)
            step.objective.get_parameter("logit_scale").data.fill_(LOGIT_SCALE)
            loss, wanted = dense_gradients(model, whole)
            loss_of_views = spectral(views, second)
            named = dict(views.named_parameters())
            further = torch.autograd.grad(loss_of_views, [*named.values()])
            sums = {id(p): wanted[name] for name, p in model.named_parameters()}
            for p, gradient in zip(named.values(), further, strict=True):
                sums[id(p)] = sums.get(id(p), 0.0) + WEIGHT * gradient
            mine = own(whole, PAIRS[world.size], world.rank)
            scalars = step(replace(mine, auxiliary=(own(second, VIEWS[world.size], world.rank),)), index)
            for p in {*model.parameters(), *views.parameters()}:
                torch.testing.assert_close(p.grad, sums[id(p)], rtol=1e-9, atol=1e-12)
            parts = loss.item(), loss_of_views.item()
            expected = {"loss": parts[0] + WEIGHT * parts[1], "image_text/loss": parts[0], "views/loss": parts[1]}
            torch.testing.assert_close({name: scalars[name] for name in expected}, expected, rtol=1e-9, atol=0.0)
            assert scalars["views/x_moment_error"] > 0
    print("all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()

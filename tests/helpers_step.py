"""What the tests of the training step share: small towers, batches, a step, and a dense reference in one process."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batch import Batch
from train.config import OptimConfig
from train.distributed import World
from train.losses import build_objective
from train.step import StepOptions, TrainStep
from train.towers import TwoTower

LOCAL = World()
LOGIT_SCALE = math.log(1 / 0.07)  # where the objective starts, in float64


class Net(nn.Module):
    """(b, 6) → (b, 5); with `noisy` also dropout and a batch norm."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        between = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if noisy else []
        self.layers = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def towers(seed: int = 0, noisy: bool = False, shared: bool = False) -> TwoTower:
    torch.manual_seed(seed)
    x_tower = Net(noisy)
    return TwoTower(x_tower, x_tower if shared else Net(noisy)).double()


def batch(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    x, y = torch.randn(2, count, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(count)
    return Batch(x, y, ids, ids, ids)


def rows(of: Batch, start: int, stop: int) -> Batch:
    part = slice(start, stop)
    return Batch(of.x[part], of.y[part], of.sample_ids[part], of.x_keys[part], of.y_keys[part])


def train_step(
    model: TwoTower, count: int, *, world: World = LOCAL, optim: OptimConfig | None = None, **options: Any
) -> TrainStep:
    """A step of the clip objective for global batches of `count` pairs."""
    dtype = next(model.parameters()).dtype
    objective = build_objective("clip").to(dtype)
    chosen = StepOptions(seed=1, total_steps=100, global_batch_size=count, **options)
    return TrainStep(model, objective, optim or OptimConfig(lr=1e-2), chosen, world)


def dense_gradients(model: TwoTower, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of clip on the whole batch and the gradient of every trained parameter and of logit_scale, by autograd."""
    logit_scale = torch.tensor(LOGIT_SCALE, dtype=whole.x.dtype, requires_grad=True)
    x, y = F.normalize(model.x_tower(whole.x), dim=1), F.normalize(model.y_tower(whole.y), dim=1)
    logits, own = logit_scale.exp() * x @ y.T, torch.arange(len(whole))
    loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, [*named.values(), logit_scale])
    return loss.detach(), dict(zip([*named, "logit_scale"], gradients, strict=True))


def gradients_of(step: TrainStep) -> dict[str, Tensor]:
    """What the last step left in .grad: as it was used, not clipped away."""
    named = {**dict(step.towers.named_parameters()), **dict(step.objective.named_parameters())}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def snapshot(step: TrainStep) -> dict[str, Tensor]:
    """Copies of all weights, buffers and optimiser state."""
    state = {**step.towers.state_dict(), **step.objective.state_dict()}
    slots = step.optimizer.state_dict()["state"]
    state |= {f"{place}/{key}": value for place, slot in slots.items() for key, value in slot.items()}
    return {name: tensor.clone() for name, tensor in state.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

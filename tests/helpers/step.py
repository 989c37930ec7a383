"""What the tests of the training step share: small towers, batches, a step, and dense references in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra, ExtraX
from dyad.train.config import OptimConfig, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective, TemperatureObjective
from dyad.train.losses.options.common import TemperatureOptions
from dyad.train.losses.options.registry import configure
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import TwoTower

LOCAL = World()
LOGIT_SCALE = math.log(1 / 0.07)  # where the objective starts, in float64


class Net(nn.Module):
    """(b, 6) → (b, 5); with `noisy` also dropout and a batch norm, with `normed` a batch norm alone."""

    def __init__(self, noisy: bool = False, normed: bool = False) -> None:
        super().__init__()
        between = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if noisy else [nn.BatchNorm1d(8)] if normed else []
        self.layers = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def towers(seed: int = 0, noisy: bool = False, shared: bool = False, normed: bool = False) -> TwoTower:
    torch.manual_seed(seed)
    x_tower = Net(noisy, normed)
    return TwoTower(x_tower, x_tower if shared else Net(noisy, normed)).double()


def batch(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    x, y = torch.randn(2, count, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(count)
    return Batch(x, y, ids, ids, ids)


def with_extra(whole: Batch, per_row: Sequence[int]) -> Batch:
    """`per_row[i]` further y-side items of row i; every third is a positive, every fifth has the key of its row's y."""
    row = torch.arange(len(per_row)).repeat_interleave(torch.tensor(per_row))
    index = torch.arange(len(row))
    y = torch.randn(len(row), 6, dtype=whole.y.dtype, generator=torch.Generator().manual_seed(11))
    keys = torch.where(index % 5 == 1, whole.y_keys[row], 1000 + index)
    return replace(whole, extra=Extra(y, row, keys, index % 3 == 0))


def with_wrong_x(whole: Batch, per_row: Sequence[int]) -> Batch:
    """`per_row[i]` x items that are wrong for the y of row i."""
    row = torch.arange(len(per_row)).repeat_interleave(torch.tensor(per_row))
    x = torch.randn(len(row), 6, dtype=whole.x.dtype, generator=torch.Generator().manual_seed(12))
    return replace(whole, extra_x=ExtraX(x, row, 2000 + torch.arange(len(row))))


def rows(of: Batch, start: int, stop: int) -> Batch:
    """Return the pairs start … stop − 1 of a batch, with their extra items: what a rank or a chunk gets."""
    part, extra, extra_x = slice(start, stop), of.extra, of.extra_x
    if extra is not None:
        own = (extra.row >= start) & (extra.row < stop)
        extra = Extra(extra.y[own], extra.row[own] - start, extra.keys[own], extra.positive[own])
    if extra_x is not None:
        own = (extra_x.row >= start) & (extra_x.row < stop)
        extra_x = ExtraX(extra_x.x[own], extra_x.row[own] - start, extra_x.keys[own])
    pairs = of.x[part], of.y[part], of.sample_ids[part], of.x_keys[part], of.y_keys[part]
    return Batch(*pairs, extra, extra_x=extra_x)


class OverAllColumns(TemperatureObjective):
    """L = mean_i [log Σ_{j∈C_i} e^a_ij − log Σ_{p∈P_i} e^a_ip] over the columns y of all ranks, then the further ones.

    P_i: the own y and the further positives of row i; C_i: all columns but those that have the key of y_i and are not
    in P_i. a_ij = s_ij e^logit_scale.
    """

    def __init__(self) -> None:
        super().__init__(cast(TemperatureOptions, configure("clip")))
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, y: Tensor, sample_ids: Tensor, negatives: Any, x_keys: Tensor, y_keys: Tensor
    ) -> Any:
        pairs, extras = Layout.of(x, negatives.embeddings_kD)
        columns = torch.cat([pairs.gather(y), extras.gather(negatives.embeddings_kD)])
        keys = torch.cat([pairs.gather(y_keys), extras.gather(negatives.keys_k)])
        positive = torch.zeros(len(x), len(columns), dtype=torch.bool)
        positive[torch.arange(len(x)), pairs.own.start + torch.arange(len(x))] = True
        place = pairs.total + extras.own.start + torch.arange(len(negatives.row_k))
        positive[negatives.row_k[negatives.positive_k], place[negatives.positive_k]] = True
        logits = self.logit_scale.exp() * x @ columns.T
        among = logits.masked_fill((keys == y_keys[:, None]) & ~positive, -math.inf).logsumexp(1)
        loss_b = among - logits.masked_fill(~positive, -math.inf).logsumexp(1)
        return SimpleNamespace(loss=loss_b.sum() * pairs.world_size / pairs.total, metrics={})

    def clamp_(self) -> None: ...

    def undo(self) -> None: ...


def train_step(
    model: TwoTower,
    count: int,
    *,
    world: World = LOCAL,
    optim: OptimConfig | None = None,
    objective: Objective | None = None,
    pairs: tuple[int, ...] | None = None,
    **options: Any,
) -> TrainStep:
    """A step of the clip objective, or another, for global batches of `count` pairs; `pairs` of each rank."""
    dtype = next(model.parameters()).dtype
    of_step = (objective or build_objective("clip")).to(dtype)
    config = TrainConfig(seed=1, global_batch_size=count, optim=optim or OptimConfig(lr=1e-2), **options)
    return TrainStep([LossTerm(model, of_step, config, 100, world, pairs)])


def dense_gradients(model: TwoTower, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of clip on the whole batch and the gradient of every trained parameter and of logit_scale, by autograd.

    x items that are wrong for a y are candidates of every y.
    """
    logit_scale = torch.tensor(LOGIT_SCALE, dtype=next(model.parameters()).dtype, requires_grad=True)
    x, y = F.normalize(model.x_tower(whole.x), dim=1), F.normalize(model.y_tower(whole.y), dim=1)
    wrong = x[:0] if whole.extra_x is None else F.normalize(model.x_tower(whole.extra_x.x), dim=1)
    logits, own = logit_scale.exp() * torch.cat([x, wrong]) @ y.T, torch.arange(len(whole))
    loss = (F.cross_entropy(logits[: len(own)], own) + F.cross_entropy(logits.T, own)) / 2
    return loss.detach(), _gradients(loss, model, logit_scale)


def dense_gradients_over_all_columns(model: TwoTower, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what `dense_gradients` does, for the loss of OverAllColumns, by loops."""
    assert whole.extra is not None
    extra, logit_scale = whole.extra, torch.tensor(0.5, dtype=next(model.parameters()).dtype, requires_grad=True)
    x, y, further = model.x_tower(whole.x), model.y_tower(whole.y), model.y_tower(extra.y)
    losses = []
    for i in range(len(whole)):
        among, positives = [], []
        for j in range(len(whole)):
            if j == i:
                positives.append(x[i] @ y[j])
            if j == i or whole.y_keys[j] != whole.y_keys[i]:
                among.append(x[i] @ y[j])
        for j in range(len(extra.row)):
            is_positive = bool(extra.positive[j]) and int(extra.row[j]) == i
            if is_positive:
                positives.append(x[i] @ further[j])
            if is_positive or extra.keys[j] != whole.y_keys[i]:
                among.append(x[i] @ further[j])
        of_all, of_positives = (torch.stack(s).mul(logit_scale.exp()).exp().sum().log() for s in (among, positives))
        losses.append(of_all - of_positives)
    loss = torch.stack(losses).mean()
    return loss.detach(), _gradients(loss, model, logit_scale)


def _gradients(loss: Tensor, model: TwoTower, logit_scale: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, [*named.values(), logit_scale])
    return dict(zip([*named, "logit_scale"], gradients, strict=True))


def gradients_of(step: TrainStep) -> dict[str, Tensor]:
    """Return copies of .grad of towers and objective after the last step, as the optimiser used them."""
    named = {**dict(step.towers.named_parameters()), **dict(step.objective.named_parameters())}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def snapshot(step: TrainStep) -> dict[str, Tensor]:
    """Copies of all weights, buffers, state of samples and optimiser state."""
    state = {**step.towers.state_dict(), **step.objective.state_dict()}
    state |= {name: value["table"] for name, value in state.items() if isinstance(value, dict)}
    slots = step.optimizer.state_dict()["state"]
    state |= {f"{place}/{key}": value for place, slot in slots.items() for key, value in slot.items()}
    return {name: tensor.clone() for name, tensor in state.items() if tensor is not None}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

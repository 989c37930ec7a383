"""The whole step with real DDP as rank 0 of 512, on torch's fake process group: its loss, and what it sends."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.step import LOGIT_SCALE, batch, towers, train_step

from dyad.plan.measure import Measured, only_rank_0
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective

pytestmark = pytest.mark.uniform_ranks
ROWS, WIDTH = 8, 5


class Sent(Measured):
    """Counts collectives, too, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += func.namespace == "c10d"
        return super().__torch_dispatch__(func, types, args, kwargs)


def one_step(world_size: int, **options: Any) -> tuple[float, Sent]:
    """The loss of the first step on the same 8 pairs on every rank, and what one rank sends for it."""
    torch.manual_seed(0)
    with only_rank_0(world_size):
        world = World(0, world_size)
        step = train_step(towers(), ROWS * world_size, world=world, objective=build_objective("clip"), **options)
        with Sent() as sent:
            loss = step(batch(ROWS), 0)["loss"]
    return loss, sent


def known_loss(world_size: int) -> float:
    """clip of one rank's pairs when every rank holds the same: each row sees every column W times, so it grows by ln W.

    A rank leaves the own pairs out of its part of the column sums and adds them afterwards, so with equal parts the own
    pair of a column counts once, and the other pairs W times.
    """
    model, pairs = towers(), batch(ROWS)
    x, y = (F.normalize(e, dim=1) for e in (model.x_tower(pairs.x), model.y_tower(pairs.y)))
    a = math.exp(LOGIT_SCALE) * x @ y.T
    rows = a.logsumexp(1) + math.log(world_size)
    others = a.masked_fill(torch.eye(ROWS, dtype=torch.bool), -math.inf).logsumexp(0) + math.log(world_size)
    return ((rows + torch.logaddexp(others, a.diagonal())) / 2 - a.diagonal()).mean().item()


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("world_size", [1, 8, 512])
def test_the_loss_is_known(world_size: int, chunk_size: int | None) -> None:
    loss, _ = one_step(world_size, chunk_size=chunk_size)
    assert loss == pytest.approx(known_loss(world_size), rel=1e-8)  # 1/τ was rounded to float32


def test_what_a_rank_sends() -> None:
    """y is gathered once, and its gradient reduced once; all else is numbers and the weights."""
    _, step = one_step(512)
    sent, calls, gathered = step.sent, step.calls, 512 * ROWS * WIDTH * 8
    assert gathered <= sent["all-gather"] <= gathered + 512 * 40  # and how many rows each rank has
    assert sent["reduce-scatter"] == gathered
    assert 1 <= calls["_allgather_base_"] <= 2 and calls["_reduce_scatter_base_"] == 1
    weights = sum(p.nbytes for p in towers().parameters())
    assert weights < sent["all-reduce"] <= weights + 2 * 512 * ROWS * 8 + 1000  # column sums and their gradients
    assert 2 <= calls["allreduce_"] <= 5, calls  # two of DDP, one for each tower

"""Job for torchrun: steps whose y side has columns of its own (classes, or scores of others) equal dense autograd.

b rows and m ≠ b columns in all, each shared over W ranks in other ways than the other, some ranks without any: the loss
and the gradient of every parameter, class vectors included, float64, 1e-10; and that all ranks end with the same
weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import cycle, product

import torch
import torch.nn.functional as F
from helpers.step import Net, train_step
from torch import Tensor, nn

from dyad.data.batch import Batch
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.towers.tower import TwoTower
from jobs.dist_step import compare

B, C = 8, 5
ROWS = {1: [(8,)], 2: [(4, 4), (1, 7), (8, 0)], 4: [(2, 2, 2, 2), (1, 5, 0, 2)]}
COLUMNS = {1: [(5,)], 2: [(2, 3), (5, 0)], 4: [(1, 1, 1, 2), (0, 4, 1, 0)]}
Reference = Callable[[TwoTower, Tensor, Tensor, Tensor], Tensor]


class ClassVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(C, 5)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table(numbers)


def cross_entropy(model: TwoTower, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model.x_tower(x) @ model.y_tower(y).T, target)


def mean_inside(model: TwoTower, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(model, x, y, target) - math.log(C)


def supervised(model: TwoTower, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """COCE with KL, τ = 1: log mean over the wrong classes of e^(s_ij − s_ip), of cosines."""
    s = F.normalize(model.x_tower(x), dim=1) @ F.normalize(model.y_tower(y), dim=1).T
    own = F.one_hot(target, C).bool()
    wrong = s.masked_fill(own, -math.inf).logsumexp(1) - math.log(C - 1)
    return (wrong - s[own]).mean()


OF_CLASSES: list[tuple[str, dict[str, object], Reference]] = [
    ("cross_entropy", {"partition": "sum"}, cross_entropy),
    ("cross_entropy", {}, mean_inside),
    ("listwise_ce", {}, mean_inside),
    ("coce", {"setting": "supervised", "temperature": 1.0}, supervised),
]


def worst_negatives(model: TwoTower, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """The mean of the highest 2 of 5 scores of negatives minus the mean score of positives."""
    return model.y_tower(y)[:, 0].topk(2).values.mean() - model.x_tower(x).mean()


OF_SCORES: tuple[str, dict[str, object], Reference] = ("partial_auc", {"alpha": 0.4}, worst_negatives)


def check(
    name: str,
    options: dict[str, object],
    reference: Reference,
    chunk_size: int | None,
    sizes: tuple[int, ...],
    of_columns: tuple[int, ...],
    world: World,
) -> None:
    scores = name == "partial_auc"
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(B, 6, dtype=torch.float64, generator=generator), torch.arange(B) % (C - 1)  # one class less
    y = torch.randn(C, 6, dtype=torch.float64, generator=generator) if scores else torch.arange(C)
    torch.manual_seed(0)
    tower = Net()
    tower.layers[-1] = nn.Linear(8, 1 if scores else 5)
    model = TwoTower(tower, tower if scores else ClassVectors()).double()
    step = train_step(model, B, world=world, objective=build_objective(name, **options), chunk_size=chunk_size)
    for index in range(2):
        loss, named = reference(model, x, y, target), dict(model.named_parameters())
        want = dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))
        rows, columns = (slice(sum(s[: world.rank]), sum(s[: world.rank + 1])) for s in (sizes, of_columns))
        ids = torch.arange(B)[rows]
        part = Batch(x[rows], y[columns], ids, ids, torch.arange(C)[columns])
        part.positives = None if scores else target[rows]
        compare(step, part, index, (loss.detach(), want), (name, options, sizes, of_columns, chunk_size), world)


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    # every objective with every chunk size, each on the next way the rows and columns lie
    every = [*product(ROWS[world.size], COLUMNS[world.size])]
    turns = cycle(every)
    for chunk_size in (None, 1, 3):
        for objective in (*OF_CLASSES, OF_SCORES):
            for way in every if "all" in sys.argv else [next(turns)]:
                check(*objective, chunk_size, *way, world)
    print("all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()

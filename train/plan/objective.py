"""What the objective takes beside the towers: small steps of the run's own training step, with towers that do nothing.

A step is taken for a few small batches, as rank 0 of a fake process group. What it allocates, multiplies and sends is
fitted by a sum of products of the sizes. So every objective, also one of a plugin, has its own formula.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.sums.tiles import TILE
from dyad.train.plan.measure import COLLECTIVES, Measured, only_rank_0
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import TwoTower

SENT_AT = ((2, 3), (3, 3), (2, 5), (4, 4), (3, 7), (5, 2))  # b, D
SENT = ("B·D", "B", "D²", "D", "1")
TAKEN_AT = (
    (8, 1, 1024),
    (8, 8, 1024),
    (8, 32, 1024),
    (8, 8, 512),
    (512, 2, 8),
    (256, 8, 8),
    (64, 16, 64),
    (512, 4, 128),
)
TAKEN = ("B·D", "b·D", "D²", "tile", "B")
UNCHANGED_BYTES = 8  # of gradients of the two towers below
Formula = Mapping[str, float]  # product of sizes → its factor


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step: b pairs of each of W ranks, embeddings of width D, tiles of at most `most` rows and columns."""

    b: int
    W: int
    D: int
    most: int = TILE

    def products(self) -> dict[str, float]:
        """Return the products of sizes of which formulas consist. B: the pairs of all ranks."""
        B, D = self.b * self.W, self.D
        tile = min(self.b, self.most) * min(B, self.most)
        return {"B·D": B * D, "b·D": self.b * D, "D²": D**2, "B": B, "tile": tile, "D": D, "1": 1}

    def value(self, formula: Formula) -> float:
        return sum(factor * self.products()[product] for product, factor in formula.items())


class Unchanged(nn.Module):
    """A tower that returns its input; a number of 4 bytes makes it train."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.zero


@dataclass(frozen=True)
class ObjectiveCost:
    """Formulas: bytes that each kind of collective sends, bytes of memory, and FLOPs for each pair."""

    sent: Mapping[str, Formula]
    memory: Formula
    flops: Formula


def objective_cost(config: TrainConfig, world_size: int) -> ObjectiveCost:
    """Measure the objective of a configuration; what is sent, for `world_size` ranks."""
    at = [Sizes(b, world_size, D) for b, D in SENT_AT]
    steps = [small_step(config, sizes).sent for sizes in at] if world_size > 1 else []
    sent = {kind: fitted([step[kind] for step in steps], at, SENT) for kind in COLLECTIVES.values() if steps}
    for formula in sent.values():  # every rank sends whole bytes for each number
        formula.update({product: round(factor) for product, factor in formula.items()})
    if sent:
        sent["all-reduce"]["1"] = sent["all-reduce"].get("1", 0) - UNCHANGED_BYTES
    at = [Sizes(b, W, D) for b, W, D in TAKEN_AT]
    measured = [small_step(config, sizes) for sizes in at]
    flops = [m.flops / sizes.b for m, sizes in zip(measured, at, strict=True)]
    return ObjectiveCost(sent, fitted([m.peak for m in measured], at, TAKEN), fitted(flops, at, ("B·D", "D²")))


def planned_objective(config: TrainConfig, samples: int) -> Objective:
    """Build the objective; `samples`: their number, where the options leave it to the data."""
    options: Any = asdict(config.objective)
    own = {name: samples for name in ("num_samples", "samples_per_epoch") if options.get(name, ...) is None}
    return build_objective(**options | own)


def small_step(config: TrainConfig, sizes: Sizes) -> Measured:
    """Take a step of the run's objective and target network with random embeddings; return what was measured."""
    torch.manual_seed(0)
    B, (batch, has_pairs) = sizes.b * sizes.W, random_batch(config, sizes)
    run = {"task": config.task, "target": config.target, "objective": config.objective}
    small = TrainConfig(**run, global_batch_size=B, precision=Precision.fp32)
    with only_rank_0(sizes.W, torch.arange(B)):
        towers, objective = TwoTower(Unchanged(), Unchanged()), planned_objective(config, max(4096, B))
        pairs = (sizes.b,) * sizes.W if has_pairs else None
        step = TrainStep([LossTerm(towers, objective, small, 100, World(0, sizes.W), pairs)])
        with Measured([*towers.parameters(), *objective.parameters(), batch.x, batch.y]) as measured:
            step(batch, 0)
    return measured


def random_batch(config: TrainConfig, sizes: Sizes) -> tuple[Batch, bool]:
    """Return unit vectors in place of the inputs of a run's batch, and whether side y has the items of pairs alone."""
    b, ids, per_row = sizes.b, torch.arange(sizes.b), config.data.negatives.per_row
    classes = len(config.run.classes or [])
    m = -(-classes // sizes.W) if classes > 1 else b
    x, y = (F.normalize(torch.randn(rows, 1 if classes == 1 else sizes.D)) for rows in (b, m))
    batch = Batch(x, y, ids, ids, torch.arange(m), positives=ids % m if classes > 1 else None)
    if per_row:
        row = ids.repeat_interleave(per_row)
        batch.extra = Extra(y[row], row, b + torch.arange(len(row)), torch.zeros(len(row), dtype=torch.bool))
    return batch, not classes


def fitted(values: Sequence[float], at: Sequence[Sizes], products: Sequence[str]) -> dict[str, float]:
    """Return the factors of `products` in the sum that gives `values` at the sizes `at`; those near 0 are left out."""
    matrix = torch.tensor([[sizes.products()[product] for product in products] for sizes in at], dtype=torch.float64)
    scale = matrix.amax(0)
    found = torch.linalg.lstsq(matrix / scale, torch.tensor(values, dtype=torch.float64)).solution / scale
    return {name: factor for name, factor in zip(products, found.tolist(), strict=True) if abs(factor) > 0.5}


def written(formula: Formula) -> str:
    """Write a formula as "4·B·D + 16·B"."""
    parts = (f"{round(factor, 1):,g}" + f"·{product}" * (product != "1") for product, factor in formula.items())
    return " + ".join(parts) or "0"

"""The costs of the objective in a plan: memory, FLOPs and traffic, measured on the run's own training step with towers
that do nothing.

A step is taken for several small batches, as rank 0 of a fake process group. What the step allocates, multiplies and
sends is fitted by a sum of products of the sizes. So every objective, also a plugin's, gets its own formula.

Letters: b pairs of a rank, W ranks, B = b · W pairs in all, D width of embeddings.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra, ExtraX
from dyad.plan.measure import COLLECTIVES, Measured, only_rank_0
from dyad.run.components import objective_options, pairs_of_ranks
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.gathered.importance import ItemTable
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.tiles import KEPT, TILE
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import TwoTower

SENT_AT = ((2, 3), (3, 3), (2, 5), (4, 4), (3, 7), (5, 2))  # (b, D) of the steps that measure traffic
SENT = ("B·D", "B", "D²", "D", "1")
TAKEN_AT = ((8, 1, 1024), (8, 8, 1024), (8, 32, 1024), (8, 8, 512))  # (b, W, D) of those that measure memory, FLOPs
TAKEN_AT += ((512, 2, 8), (256, 8, 8), (64, 16, 64), (512, 4, 128))
TAKEN = ("B·D", "b·D", "D²", "tile", "B")
Formula = Mapping[str, float]  # product of sizes, a key of `products` → its factor


class ObjectiveCost(NamedTuple):
    """The cost of an objective in one step, as formulas: a formula maps products of sizes to their factors.

    `products` returns the products of sizes, `value_of` the value of a formula. sent: kind of collective → bytes of the
    whole tensors; empty for one rank. memory: bytes that a rank allocates at most. flops: FLOPs for each pair of a
    rank. memory and flops are those of a batch whose scores are too large to be kept for backward. keeps: whether the
    objective keeps the scores for backward if they take at most KEPT bytes (train/losses/sums/tiles.py).
    """

    sent: Mapping[str, Formula]
    memory: Formula
    flops: Formula
    keeps: bool

    def kept(self, b: int, B: int) -> int:
        """Return the bytes of the scores that are kept for backward, float32 (b, B); 0 if they are not kept.

        b: rows of a rank. B: columns, of all ranks.
        """
        scores = 4 * b * B
        return scores if self.keeps and scores <= KEPT else 0


def objective_cost(config: TrainConfig, world_size: int) -> ObjectiveCost:
    """Measure the costs of the objective of a configuration, by training steps of small random batches on the CPU.

    world_size: the number of ranks between which bytes are sent. This process must not be in a process group: more than
    one rank is simulated. Seeds torch's global random generator. Raises ConfigError with torch before 2.15.
    """
    sizes = [(b, world_size, D) for b, D in SENT_AT]
    steps = [small_step(config, *each).sent for each in sizes] if world_size > 1 else []
    sent = {kind: fitted([step[kind] for step in steps], sizes, SENT) for kind in COLLECTIVES.values() if steps}
    whole = {kind: {product: round(factor) for product, factor in sent[kind].items()} for kind in sent}
    keeping = small_step(config, *TAKEN_AT[0])
    with nothing_kept():
        taken = [small_step(config, *each) for each in TAKEN_AT]
    flops = [step.flops / b for step, (b, _, _) in zip(taken, TAKEN_AT, strict=True)]
    memory = fitted([step.peak for step in taken], TAKEN_AT, TAKEN)
    return ObjectiveCost(whole, memory, fitted(flops, TAKEN_AT, ("B·D", "D²")), keeping.flops < taken[0].flops)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Context manager in which objectives compute scores again in backward, as they do for large batches.

    It sets KEPT of train/losses/sums/tiles.py to 0, and restores it.
    """
    kept, tiles.KEPT = tiles.KEPT, 0
    try:
        yield
    finally:
        tiles.KEPT = kept


def planned_objective(config: TrainConfig, samples: int) -> Objective:
    """Build the objective of a configuration, without the losses of narrower embeddings (objective.matryoshka).

    The small embeddings of a plan cannot have those. samples: the number of training samples, in the data set and in an
    epoch, for objectives that keep numbers for each sample or schedule by epochs.
    """
    steps = config.steps or 1  # the schedule of γ depends on the number of steps, but no cost does
    options = objective_options(config, steps, num_samples=samples, samples_per_epoch=samples)
    options.pop("matryoshka", None)
    return build_objective(**options)


def first_step(
    towers: TwoTower, objective: Objective, config: TrainConfig, world: World, batch: Batch
) -> tuple[TrainStep, Measured]:
    """Take the first training step as rank 0 of a simulated group whose ranks all hold `batch`.

    Returns the TrainStep, and a Measured with memory, FLOPs and traffic of the step. The step changes the weights of
    `towers` and `objective`. world: rank 0 and the number of ranks. The sample ids of `batch` must be 0, 1, …, its
    tensors on the CPU, and this process in no process group.
    """
    with only_rank_0(world.size), patch.object(ItemTable, "of_columns", numbers_of_rank_0):
        term = LossTerm(towers, objective, config, config.steps or 1, world, pairs_of_ranks(config, world))
        step = TrainStep([term])
        with Measured([*towers.parameters(), *objective.parameters(), batch.x, batch.y]) as measured:
            step(batch, 0)
    return step, measured


def numbers_of_rank_0(table: ItemTable, batch: GatheredBatch, like: Tensor) -> Tensor:
    """Return the values that `table` has for rank 0's columns (y items), repeated for each rank, (M,).

    It replaces the method ItemTable.of_columns in a simulated group, in which the keys of other ranks' columns are made
    up. batch: a batch with M columns and keys of y. like: a tensor with the dtype and device of the result. Items that
    the table lacks, as those of random batches, have the value 0.
    """
    assert batch.y_keys_M is not None
    W, B = batch.columns.world_size, batch.columns.total
    keys_of_kinds = (keys[: len(keys) // W] for keys in (batch.y_keys_M[:B], batch.y_keys_M[B:]))
    values = [torch.from_numpy(table.weights.of(keys.cpu().numpy(), absent=0.0)).repeat(W) for keys in keys_of_kinds]
    return torch.cat(values).to(like)


def small_step(config: TrainConfig, b: int, W: int, D: int) -> Measured:
    """Measure a step of the run's objective and target network with b random embeddings of width D on each of W ranks.

    The towers do nothing, and the traffic of their gradients is subtracted. Seeds torch's global random generator.
    """
    torch.manual_seed(0)
    run = {"task": config.task, "target": config.target, "objective": config.objective}
    small = TrainConfig(**run, steps=100, global_batch_size=b * W, precision=Precision.fp32)
    towers, objective = TwoTower(nn.PReLU(init=1.0), nn.PReLU(init=1.0)), planned_objective(config, max(4096, b * W))
    _, measured = first_step(towers, objective, small, World(0, W), random_batch(config, b, W, D))
    if W > 1:
        measured.sent["all-reduce"] -= sum(p.nbytes for p in towers.parameters())  # of the gradients of these towers
    return measured


def random_batch(config: TrainConfig, b: int, W: int, D: int) -> Batch:
    """Return a batch of rank 0 with random unit vectors of width D in place of the inputs, float32 (b, D) on each side.

    It has as many extra items and teacher scores (zeros) as the configuration has. With classes, side y holds one
    rank's share of the classes; with a single class (data.rare), vectors have width 1. W: number of ranks.
    """
    ids, further, classes = torch.arange(b), further_items(config, b), len(config.run.classes or [])
    m = -(-classes // W) if classes > 1 else b
    x, y = (F.normalize(torch.randn(rows, 1 if classes == 1 else D)) for rows in (b, m))
    batch = Batch(x, y, ids, ids, torch.arange(m), positives=ids % m if classes > 1 else None)
    if config.data.teacher is not None:
        batch.teacher = torch.zeros(b)
    if further:
        number = torch.arange(further)
        row = number * b // further
        scores = None if config.data.teacher is None else torch.zeros(further)
        batch.extra = Extra(y[row], row, b + number, torch.zeros(further, dtype=torch.bool), teacher=scores)
        if config.objective.draws:
            batch.extra.log_q, batch.y_log_q = torch.zeros(further), torch.zeros(b)
    if images := b * config.data.negatives.pictures:
        row = torch.arange(images) % b
        batch.extra_x = ExtraX(x[row], row, images + row)
    return batch


def further_items(config: TrainConfig, pairs: int) -> int:
    """Return how many y items a batch of `pairs` pairs has beside those of its pairs: hard negatives and noise samples.

    The noise samples that an objective draws for each global batch count by the batch's share of the pairs, rounded up.
    """
    size = config.global_batch_size
    return pairs * config.data.negatives.per_row + -(-pairs * config.objective.drawn_items(size) // size)


def products(b: int, W: int, D: int, most: int = TILE) -> dict[str, float]:
    """Return the products of sizes that formulas of costs are made of, name (such as "B·D") → value.

    b: pairs of a rank. W: ranks. D: width of embeddings. most: the most rows and columns of a tile of scores. The
    product "tile" is the number of scores in the largest tile.
    """
    B = b * W
    return {"B·D": B * D, "b·D": b * D, "D²": D**2, "B": B, "tile": min(b, most) * min(B, most), "D": D, "1": 1}


def value_of(formula: Formula, sizes: Mapping[str, float]) -> float:
    """Return the value of a formula: Σ factor · product. sizes: the result of `products`, product → its value."""
    return sum(factor * sizes[product] for product, factor in formula.items())


def fitted(values: Sequence[float], at: Sequence[tuple[int, int, int]], names: Sequence[str]) -> dict[str, float]:
    """Fit values[k] ≈ Σ_name factor[name] · products(*at[k])[name] by least squares; return name → factor.

    at: sizes (b, W, D) of each value, at least as many as names. names: the products to use, keys of `products`.
    Factors of at most 0.5 in size are left out.
    """
    matrix = torch.tensor([[products(*sizes)[name] for name in names] for sizes in at], dtype=torch.float64)
    scale = matrix.amax(0)
    found = torch.linalg.lstsq(matrix / scale, torch.tensor(values, dtype=torch.float64)).solution / scale
    return {name: factor for name, factor in zip(names, found.tolist(), strict=True) if abs(factor) > 0.5}


def formula_text(formula: Formula) -> str:
    """Return a formula as text, such as "4·B·D + 16·B"."""
    parts = (f"{round(factor, 1):,g}" + f"·{product}" * (product != "1") for product, factor in formula.items())
    return " + ".join(parts) or "0"

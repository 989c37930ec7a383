"""One loss of a step: its two towers, its objective, and the gradient of its batch with the memory of one chunk.

With several chunks the towers run twice: first to get the embeddings of the whole batch, on which the objective is
computed once; then, chunk by chunk, to propagate the gradient of the embeddings back to the weights (GradCache, Gao et
al. 2021, arXiv 2101.06983). So the gradient is that of the whole batch. The newest chunks keep their graphs from the
first pass, as far as memory allows, and are not run again; a single chunk is therefore a plain step. Batch norms couple
the rows of a tower's input: for statistics of the global batch they need a single chunk (train/towers/batch_norm.py).

Noise (dropout, patch dropout) is seeded by (seed, step, rank, side, chunk), and by one more entry each for a target
network and for an auxiliary loss; a tower that both sides share draws other noise for each side. Both passes draw the
same noise, and so does a resumed run of as many ranks, without any generator state in the checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from dyad.data.base.errors import ConfigError
from dyad.data.batch import Batch
from dyad.train.config import TargetKind, TrainConfig
from dyad.train.distributed.data_parallel import backward
from dyad.train.distributed.devices import AUTOCAST, chosen_precision
from dyad.train.distributed.sharding import shard, shard_size
from dyad.train.distributed.world import World
from dyad.train.losses.objectives.base import Objective, TemperatureObjective
from dyad.train.losses.sums.conditions import Checks, Sizes, collect_checks
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.step.chunks import Chunk, TensorPair, chunk_count, in_chunks, separated, separated_x
from dyad.train.step.graph_cache import GraphCache, MemoryBudget
from dyad.train.step.seeded_rng import seeded_rng
from dyad.train.step.target import Target
from dyad.train.towers.batch_norm import RunningStatistics
from dyad.train.towers.text.rows import sequence_sizes
from dyad.train.towers.tower import TwoTower, tf32_products

RESERVED = {"loss", "violated", "stop", "grad_norm", "lr", "skipped", "logit_scale"}  # names of a step's own numbers


@dataclass(frozen=True)
class StepRun:
    """What a step passes to LossTerm.gradient to run a loss.

    towers: the x tower and the y tower, wrapped for data parallelism where needed. graph_budget: the memory for cached
    autograd graphs. scaled: multiplies a loss by the loss scale of fp16 before backward. timer: a timer that the first
    loss of a step stops when its embeddings are computed.
    """

    towers: Sequence[nn.Module]
    graph_budget: MemoryBudget
    scaled: Callable[[Tensor], Tensor]
    timer: LocalTimer


@dataclass(frozen=True)
class TermResult:
    """The result of one loss in a step, on this rank.

    loss, 0-d: the value of the objective times the weight of the loss (key `weight`). metrics: name as it is logged,
    without "train/" → 0-d. Means over ranks of loss and metrics are those of the global batch. violated, 0-d: how many
    of the conditions that were recorded on this rank (losses/sums/conditions.py) do not hold. checks: these conditions,
    and values still to be summed over ranks.
    """

    loss: Tensor
    violated: Tensor
    metrics: dict[str, Tensor]
    checks: Checks


class LossTerm:
    """One loss of a step: an objective on the embeddings of a batch by an x tower and a y tower.

    The constructor puts the towers in train() mode and, with dist=fsdp2 or hsdp, shards them in place. config: that of
    the run, or of an auxiliary loss (also.NAME). total_steps: optimiser steps of the run. pairs: the number of pairs of
    each rank, if it is the same in every step and each x has one y; else None. name: NAME of an auxiliary loss, "" for
    the run's own loss. Raises ConfigError if dist.shard_size does not divide the number of ranks.

    Attributes: modules: prefix of weight names → module. target: the target network. statistics: the running statistics
    of batch norms. chunks: the number of chunks of a batch. embeddings: those of the b x rows and m y rows of the last
    batch, without extra items and gradient: (b, D) and (m, D). keys: their content keys, int64 (b,) and (m,).
    """

    embeddings: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]

    def __init__(
        self,
        towers: TwoTower,
        objective: Objective,
        config: TrainConfig,
        total_steps: int,
        world: World,
        pairs: tuple[int, ...] | None = None,
        name: str = "",
    ) -> None:
        self.towers, self.objective, self.world = towers.train(), objective, world
        self.config, self.total_steps, self.pairs = config, total_steps, pairs
        self._prefix, self._key = (f"{name}/", (name,)) if name else ("", ())
        self.modules: dict[str, nn.Module] = {
            f"{name}.{part}".lstrip("."): m for part, m in (("towers", towers), ("objective", objective))
        }
        self._dtype = AUTOCAST[chosen_precision(config.precision, world.device)]
        copy = towers.frozen_copy() if config.target.kind is not TargetKind.none else None
        all_towers = [tower for pair in (towers, copy) if pair for tower in (pair.x_tower, pair.y_tower)]
        shard(all_towers, config.dist, self._dtype, config.compile, world)
        self.target = Target(towers, copy, config, total_steps, world)
        self.statistics = RunningStatistics(nn.ModuleList([towers, *self.target.towers]))
        self.chunks = chunk_count(config.global_batch_size, world.size, config.chunk_size)
        # sharded towers run equally often on all ranks, whose memory may differ
        self._unsharded = shard_size(config.dist, world.size) == 1
        self._keep_graphs = (config.keep_graphs if self._unsharded else 1) if self.chunks > 1 else 1

    def begin(self, batch: Batch, step: int) -> Batch:
        """Prepare optimiser step `step` (from 0). Return `batch` on the device, with its noise (such as blur) added.

        The towers are put in train() mode, the target network takes on new weights if they are due (target.kind=copy),
        and the running statistics of batch norms are remembered for `undo`.
        """
        if not self.towers.training:  # an evaluation may have left eval() behind
            self.towers.train()
        self.target.begin(step)
        self._before = self.statistics.read()
        return batch.to(self.world.device).with_noise()

    def undo(self) -> None:
        """Restore the objective's state and the batch norms' running statistics to those at the last `begin`."""
        self.objective.undo()
        self.statistics.write(self._before)

    def after(self, step: int) -> None:
        """Clamp the objective's parameters and update the target, after optimiser step `step` (from 0) was taken."""
        self.objective.clamp_()
        self.target.update(step)

    def named(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `metrics` with "NAME/" before each name if this is the auxiliary loss also.NAME, else unchanged."""
        return {f"{self._prefix}{name}": value for name, value in metrics.items()}

    def gradient(
        self,
        batch: Batch,
        step: int,
        run: StepRun,
        wait_for_sizes: Callable[[], Sizes],
        speculative: bool,
        logged: bool,
    ) -> TermResult:
        """Compute the loss of a batch, and add the gradient of run.scaled(weight · loss) to .grad of the parameters.

        batch: as `begin` returns it. step: index of the optimiser step, which seeds dropout. run: the towers and tools
        to use. wait_for_sizes: the function that `exchange_sizes` (sizes.py) returned for this batch. speculative:
        whether the objective may assume the conditions of losses/sums/conditions.py; then the gradient is right only if
        `violated` of the result is 0 on all ranks. logged: whether costly metrics are wanted, the same on all ranks.

        Every rank must call it. On return the gradients of towers that are wrapped in DistributedDataParallel or
        sharded are averaged over ranks; gradients of other towers and of the objective's parameters (e.g. temperature)
        are not. Sets the attributes embeddings and keys. Raises ConfigError if a metric of the objective has a name of
        RESERVED.
        """
        self.statistics.begin_step(len(batch))
        chunks, sides = in_chunks(batch, self.chunks)
        graphs = GraphCache(self._keep_graphs, run.graph_budget)
        # with a graph even where the cache drops it: some kernels are chosen by whether there is one
        embed = partial(self._embed, step=step)
        pairs = [[e.detach() for e in graphs.add(partial(embed, c, run.towers), c.inputs)] for c in chunks]
        statistics = self.statistics.read()  # the target and the second pass must not count the rows again
        parts = zip(*pairs, strict=True)
        x, y = (side.joined(own).requires_grad_() for side, own in zip(sides, parts, strict=True))
        x_pairs, rows = separated_x(x, len(batch.x), batch.extra_x)
        y_pairs, columns = separated(y, len(batch.y), batch.extra)
        self.embeddings, self.keys = (x_pairs.detach(), y_pairs.detach()), (batch.x_keys, batch.y_keys)
        related: dict[str, Any] = {"x_keys": batch.x_keys, "y_keys": batch.y_keys, "importance": batch.y_log_q}
        related |= {"relevance": batch.relevance, "teacher": batch.teacher, "x_negatives": rows}
        if "excluded" in self.objective.takes:  # only some objectives can leave columns out of a row's negatives
            related["known_positives"] = batch.known_positives
        if batch.x_places is not None and "lengths" in self.objective.takes:
            related["lengths"] = torch.from_numpy(sequence_sizes(batch.x_places))
        if batch.positives is not None:
            numbers = torch.arange(len(batch), device=batch.positives.device)
            related["positives"] = torch.stack([numbers, batch.positives], 1)
        related |= self.target.embeddings(chunks, sides, len(batch), embed)
        given = {name: value for name, value in related.items() if value is not None}
        run.timer.stop()  # the objective begins with a collective
        with record_function("objective"):
            with collect_checks(speculative, wait_for_sizes(), logged) as checks:
                result = self.objective(x_pairs, y_pairs, batch.sample_ids, negatives=columns, **given)
            run.scaled(self.config.weight * result.loss).backward()
        # a frozen side has no gradient, but its tower must run backward too: its averaging waits for one
        of_sides = [torch.zeros_like(e) if e.grad is None else e.grad for e in (x, y)]
        gradients = list(zip(*(side.split(g) for side, g in zip(sides, of_sides, strict=True)), strict=True))
        for chunk in reversed(chunks):  # the order of a single backward through all chunks: bitwise equal sums
            embeddings = graphs.pop() if graphs else embed(chunk, run.towers)
            trained = [(e, g) for e, g in zip(embeddings, gradients[chunk.index], strict=True) if e.requires_grad]
            with record_function("towers backward"), tf32_products(self.world.device):
                backward(run.towers, [e for e, _ in trained], [g for _, g in trained], last=chunk.index == 0)
            del embeddings, trained  # frees the graph before the next chunk is embedded
        self.statistics.write(statistics)
        loss, metrics = result.loss.detach(), dict(result.metrics)
        if taken := RESERVED & metrics.keys():
            name = self.config.objective.name
            raise ConfigError(f"objective={name}: a metric named {min(taken)} is the step's own. Choose another name")
        if isinstance(self.objective, TemperatureObjective):
            metrics["logit_scale"] = self.objective.logit_scale.detach().exp()  # 1/τ, before the optimiser moves it
        if self._prefix:
            metrics["loss"] = loss
        return TermResult(self.config.weight * loss, checks.violated(loss), self.named(metrics), checks)

    @record_function("towers forward")
    def _embed(self, chunk: Chunk, towers: Sequence[nn.Module], *key: int, step: int) -> TensorPair:
        """Run the x and the y tower on a chunk, with the noise of step `step`; return their embeddings, (n, D) each.

        n is the chunk's number of rows of the side, as dummy rows are left out. The dtype is that of `to_score_dtype`.
        key: further numbers from which the noise is seeded.
        """
        device, embeddings = self.world.device, []
        is_on, dtype = self._dtype is not None, self._dtype
        for side, (tower, rows, arguments) in enumerate(zip(towers, chunk.inputs, chunk.arguments, strict=True)):
            with (
                seeded_rng(device, self.config.seed, step, self.world.rank, side, chunk.index, *key, *self._key),
                tf32_products(device),
                # with cached casts, gradients of sharded weights were incomplete in several chunks on CPUs
                torch.autocast(device.type, dtype=dtype, enabled=is_on, cache_enabled=self._unsharded),
            ):
                embeddings.append(tower(rows, **arguments))
        return [e[:size] for e, size in zip(to_score_dtype(embeddings, device), chunk.sizes, strict=True)]


def to_score_dtype(embeddings: TensorPair, device: torch.device) -> TensorPair:
    """Convert the x and y embeddings to one dtype: the wider of their two dtypes, and on a CPU at least float32.

    device: where the scores (dot products) are computed. A GPU accumulates half-precision dot products in higher
    precision; a CPU may round the sums to half precision.
    """
    dtype = torch.promote_types(*(e.dtype for e in embeddings))
    if device.type != "cuda":
        dtype = torch.promote_types(dtype, torch.float32)
    return [e.to(dtype) for e in embeddings]

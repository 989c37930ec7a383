"""One optimiser step on a global batch of any size, at the memory of one chunk.

With several chunks the towers run twice: first without graph, to have all embeddings for the objective; then, chunk by
chunk and with graph, to pass the gradient of the embeddings on (GradCache, Gao et al. 2021). The objective is computed
once, over everything, so the gradient is that of the whole batch. One chunk takes the plain path.

Noise (dropout, patch dropout) is keyed by (seed, step, rank, tower, chunk): both passes see the same, and so does a
resumed run, without any generator state to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from data.batch import Batch
from data.errors import UserError
from train.config import OptimConfig, Precision
from train.distributed import World, all_reduce_sum
from train.optim import build_optimizer, learning_rate
from train.towers import TwoTower

AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
# Steps in a row that may be skipped. fp16 begins with a loss scale that is too high on purpose.
PATIENCE = {Precision.fp32: 3, Precision.bf16: 3, Precision.fp16: 25}


@dataclass(frozen=True)
class StepOptions:
    """chunk_size: pairs per rank embedded at a time, None for all; global_batch_size fixes the number of chunks."""

    seed: int
    total_steps: int
    global_batch_size: int
    chunk_size: int | None = None
    precision: Precision = Precision.fp32
    compile: bool = False


class TrainStep:
    """`step(batch, index)` takes one optimiser step and returns its scalars, equal on all ranks."""

    def __init__(
        self, towers: TwoTower, objective: nn.Module, optim: OptimConfig, options: StepOptions, world: World
    ) -> None:
        self.objective, self.world, self._optim, self._options = objective, world, optim, options
        named = [*towers.named_parameters("towers"), *objective.named_parameters("objective")]
        self.optimizer = build_optimizer(named, optim)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._towers = _parallel(towers, options.compile, world)
        self._dtype = AUTOCAST[options.precision]
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision is Precision.fp16)
        self._skipped, self._skipped_in_a_row = 0, 0
        most = math.ceil(options.global_batch_size / world.size)
        self._chunks = math.ceil(most / (options.chunk_size or most))

    def __call__(self, batch: Batch, step: int) -> dict[str, float]:
        """Raises UserError after PATIENCE steps in a row without a finite gradient; until then they change nothing."""
        batch = batch.to(self.world.device)
        for tower in self._towers:
            tower.train()
        self.optimizer.zero_grad(set_to_none=True)
        objective = self._plain(batch, step) if self._chunks == 1 else self._chunked(batch, step)
        scalars = self._share(objective.loss, objective.metrics)
        self._scaler.unscale_(self.optimizer)
        limit = self._optim.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        lr = learning_rate(step, self._options.total_steps, self._optim)
        scale = getattr(self.objective, "logit_scale", None)
        scalars |= {"grad_norm": float(norm), "lr": lr, "skipped": float(self._skipped)}
        scalars |= {} if scale is None else {"logit_scale": float(scale.detach().exp())}
        self._update(lr, math.isfinite(scalars["grad_norm"]) and math.isfinite(scalars["loss"]), step)
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides weights and optimiser: JSON."""
        return {"scaler": self._scaler.state_dict(), "skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state["scaler"])
        self._skipped = state["skipped"]

    def _plain(self, batch: Batch, step: int) -> Any:
        x, y = self._embed((batch.x, batch.y), step, chunk=0)
        result = self._objective_of(x, y, batch)
        self._scaler.scale(result.loss).backward()
        return result

    def _chunked(self, batch: Batch, step: int) -> Any:
        bounds = self._bounds(len(batch))
        with torch.no_grad(), _held_statistics(self._towers):
            parts = [
                [e[: stop - start] for e in self._embed(_rows(batch, start, stop), step, chunk)]
                for chunk, (start, stop) in enumerate(bounds)
            ]
        x, y = (torch.cat(side).requires_grad_() for side in zip(*parts, strict=True))
        result = self._objective_of(x, y, batch)
        self._scaler.scale(result.loss).backward()
        for chunk, (start, stop) in enumerate(bounds):
            with ExitStack() as stack:
                for tower in self._towers:
                    if isinstance(tower, DistributedDataParallel) and chunk < len(bounds) - 1:
                        stack.enter_context(tower.no_sync())  # gradients are averaged in the last backward only
                embeddings = self._embed(_rows(batch, start, stop), step, chunk)
                pairs = [(e, _padded(g.grad, start, stop, e)) for e, g in zip(embeddings, (x, y), strict=True)]
                trained = [(e, g) for e, g in pairs if e.requires_grad]
                torch.autograd.backward([e for e, _ in trained], [g for _, g in trained])
        return result

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        """(start, stop) of every chunk; the same number on all ranks, the last ones may be empty."""
        size = self._options.chunk_size or rows
        starts = [min(chunk * size, rows) for chunk in range(self._chunks)]
        return [(start, min(start + size, rows)) for start in starts]

    def _embed(self, inputs: tuple[Tensor, Tensor], step: int, chunk: int) -> tuple[Tensor, ...]:
        """Embeddings of both sides, in float32 or better."""
        device, options = self.world.device, self._options
        embeddings = []
        for side, (tower, rows) in enumerate(zip(self._towers, inputs, strict=True)):
            with (
                noise(device, options.seed, step, self.world.rank, side, chunk),
                torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None),
            ):
                embedding = tower(rows)
            embeddings.append(embedding.to(torch.promote_types(embedding.dtype, torch.float32)))
        return tuple(embeddings)

    def _objective_of(self, x: Tensor, y: Tensor, batch: Batch) -> Any:
        return self.objective(x, y, batch.sample_ids, x_keys=batch.x_keys, y_keys=batch.y_keys)

    def _share(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        """Average the objective's few gradients, the loss and the metrics over ranks: one flat all-reduce."""
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        scalars = {"loss": loss.detach(), **metrics}
        flat = torch.cat([t.flatten().to(loss.dtype) for t in (*gradients, *scalars.values())])
        all_reduce_sum(flat, self.world).div_(self.world.size)
        sizes = [g.numel() for g in gradients]
        *averaged, values = flat.split([*sizes, len(scalars)])
        for gradient, mean in zip(gradients, averaged, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return dict(zip(scalars, values.tolist(), strict=True))

    def _update(self, lr: float, finite: bool, step: int) -> None:
        """The optimiser step, or nothing at all; loss and gradient norm are the same on all ranks, so they agree."""
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self._scaler.step(self.optimizer)
            self.objective.clamp_()  # pyright: ignore[reportCallIssue]
            self._skipped_in_a_row = 0
        else:
            self.objective.undo()  # pyright: ignore[reportCallIssue]
            self._skipped += 1
            self._skipped_in_a_row += 1
        self._scaler.update()
        if self._skipped_in_a_row >= PATIENCE[self._options.precision]:
            raise UserError(
                f"step {step}: no finite loss and gradient in {self._skipped_in_a_row} steps in a row; the weights are those "
                "of before. Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32"
            )


@contextmanager
def noise(device: torch.device, *key: int) -> Iterator[None]:
    """The random numbers of `key`, on CPU and device; the generators go on afterwards as if nothing had happened."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def _parallel(towers: TwoTower, compiled: bool, world: World) -> tuple[nn.Module, nn.Module]:
    """The towers, each on its own, so that gradients are averaged over ranks; one module for both sides stays one."""

    def wrapped(tower: nn.Module) -> nn.Module:
        inner: Any = torch.compile(tower) if compiled else tower
        if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return inner
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(inner, devices, broadcast_buffers=False, process_group=world.group)

    x_tower = wrapped(towers.x_tower)
    return x_tower, x_tower if towers.y_tower is towers.x_tower else wrapped(towers.y_tower)


@contextmanager
def _held_statistics(towers: Sequence[nn.Module]) -> Iterator[None]:
    """Running statistics of batch norms stay: the pass with graph is the one that counts."""
    norms = [m for tower in towers for m in tower.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def _rows(batch: Batch, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Inputs of a chunk; an empty one runs the first row, with a gradient of zero."""
    rows = slice(start, stop) if stop > start else slice(0, 1)
    return batch.x[rows], batch.y[rows]


def _padded(gradient: Tensor | None, start: int, stop: int, embedding: Tensor) -> Tensor:
    assert gradient is not None
    return gradient[start:stop].to(embedding.dtype) if stop > start else torch.zeros_like(embedding)

"""One optimiser step on a global batch of any size, at the memory of one chunk.

With several chunks the towers run twice: first to have all embeddings for the objective; then, chunk by chunk, to pass
the gradient of the embeddings on (GradCache, Gao et al. 2021). The objective is computed once, over everything, so the
gradient is that of the whole batch. The last chunk keeps its graph from the first pass and needs no second; a single
chunk is therefore a plain step.

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
PATIENCE = 3  # steps in a row without a finite gradient after which a run stops

Pair = Sequence[Tensor]  # of x and of y


@dataclass(frozen=True)
class StepOptions:
    """chunk_size: pairs per rank embedded at a time, None for all; global_batch_size fixes the number of chunks."""

    seed: int
    total_steps: int
    global_batch_size: int
    chunk_size: int | None = None
    precision: Precision = Precision.fp32
    compile: bool = False


@dataclass(frozen=True)
class Chunk:
    """Inputs of x and y, and how many of the rows count: an empty chunk runs one row that does not."""

    index: int
    inputs: Pair
    size: int


class TrainStep:
    """`step(batch, index)` takes one optimiser step and returns its scalars, equal on all ranks."""

    def __init__(
        self, towers: TwoTower, objective: nn.Module, optim: OptimConfig, options: StepOptions, world: World
    ) -> None:
        self.towers, self.objective, self.world = towers.train(), objective, world
        named = [*towers.named_parameters("towers"), *objective.named_parameters("objective")]
        self.optimizer = build_optimizer(named, optim)
        self._optim, self._options = optim, options
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._parallel = _parallel(towers, options.compile, world)
        self._statistics = RunningStatistics(towers)
        self._dtype = AUTOCAST[options.precision]
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision is Precision.fp16)
        self._skipped, self._skipped_in_a_row = 0, 0
        rows = math.ceil(options.global_batch_size / world.size)
        self._chunks = math.ceil(rows / (options.chunk_size or rows))  # the same number on all ranks

    def __call__(self, batch: Batch, step: int) -> dict[str, float]:
        """Raises UserError after PATIENCE steps in a row without a finite gradient; until then they change nothing."""
        assert batch.extra is None, "no objective takes further columns"
        if not self.towers.training:
            self.towers.train()
        batch = batch.to(self.world.device)
        lr = learning_rate(step, self._options.total_steps, self._optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        before = self._statistics.read()
        result = self._gradient(batch, step)
        shared = self._averaged({"loss": result.loss.detach(), **result.metrics, **self._scale()})
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        values = torch.stack([*shared.values(), norm]).tolist()  # all at once: a GPU waits for every reading
        scalars = dict(zip([*shared, "grad_norm"], values, strict=True))
        finite = math.isfinite(scalars["loss"]) and math.isfinite(scalars["grad_norm"])
        self._take(finite, norm, before)
        self._count(finite, math.isfinite(scalars["loss"]), step)
        return {**scalars, "lr": lr, "skipped": float(self._skipped)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides weights and optimiser: JSON."""
        return {"scaler": self._scaler.state_dict(), "skipped": [self._skipped, self._skipped_in_a_row]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state["scaler"])
        self._skipped, self._skipped_in_a_row = state["skipped"]

    def _gradient(self, batch: Batch, step: int) -> Any:
        """Fill .grad of all parameters, of the towers averaged over ranks; returns the objective's result."""
        *earlier, last = _chunks(batch, self._chunks)
        # With graph, which is dropped at once: some kernels are chosen by whether there is one
        pairs = [[e.detach() for e in self._embed(chunk, step)] for chunk in earlier]
        kept = self._embed(last, step, synchronise=not earlier)
        statistics = self._statistics.read()
        sides = zip(*pairs, [e.detach() for e in kept], strict=True)
        x, y = (_joined(side).requires_grad_() for side in sides)
        result = self.objective(x, y, batch.sample_ids, x_keys=batch.x_keys, y_keys=batch.y_keys)
        self._scaler.scale(result.loss).backward()
        assert x.grad is not None and y.grad is not None
        sizes = [chunk.size for chunk in (*earlier, last)]
        gradients = list(zip(x.grad.split(sizes), y.grad.split(sizes), strict=True))
        _backward(kept, gradients[-1])
        del kept
        for chunk in reversed(earlier):  # as one backward through all of them would go: the same sums, bit for bit
            _backward(self._embed(chunk, step, synchronise=chunk.index == 0), gradients[chunk.index])
        self._statistics.write(statistics)
        return result

    def _embed(self, chunk: Chunk, step: int, synchronise: bool = False) -> Pair:
        """Embeddings of both sides, in float32 or better. Gradients are averaged over ranks in backward on demand."""
        device, embeddings = self.world.device, []
        with ExitStack() as stack:
            for tower in self._parallel:
                if isinstance(tower, DistributedDataParallel) and not synchronise:
                    stack.enter_context(tower.no_sync())
            for side, (tower, rows) in enumerate(zip(self._parallel, chunk.inputs, strict=True)):
                with (
                    noise(device, self._options.seed, step, self.world.rank, side, chunk.index),
                    torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None),
                ):
                    embedding = tower(rows)
                embeddings.append(embedding.to(torch.promote_types(embedding.dtype, torch.float32))[: chunk.size])
        return embeddings

    def _averaged(self, scalars: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over ranks, also of the objective's gradients and of running statistics: one flat all-reduce."""
        if self.world.size == 1:
            return scalars
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        shared = [*gradients, *self._statistics.floating]
        flat = torch.cat([t.flatten().to(scalars["loss"].dtype) for t in (*shared, *scalars.values())])
        all_reduce_sum(flat, self.world).div_(self.world.size)
        *means, values = flat.split([*(t.numel() for t in shared), len(scalars)])
        for tensor, mean in zip(shared, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        return dict(zip(scalars, values, strict=True))

    def _take(self, finite: bool, norm: Tensor, before: list[Tensor]) -> None:
        """The optimiser step, or nothing at all. Loss and gradient norm are the same on all ranks, so they agree."""
        if finite:
            if self._optim.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._optim.clip_norm, norm)
            self.optimizer.step()
            self.objective.clamp_()  # pyright: ignore[reportCallIssue]
        else:
            self.objective.undo()  # pyright: ignore[reportCallIssue]
            self._statistics.write(before)

    def _count(self, finite: bool, finite_loss: bool, step: int) -> None:
        """Too many skipped steps in a row end the run; what a smaller loss scale of fp16 may mend does not count."""
        mendable = finite_loss and self._scaler.get_scale() > 1
        self._scaler.update()
        if finite:
            self._skipped_in_a_row = 0
            return
        self._skipped += 1
        self._skipped_in_a_row += not mendable
        if self._skipped_in_a_row >= PATIENCE:
            raise UserError(
                f"step {step}: no finite loss and gradient in {PATIENCE} steps in a row; the weights are those of "
                "before. Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32"
            )

    def _scale(self) -> dict[str, Tensor]:
        """The objective's scale 1/τ in this step, if it has one."""
        scale = getattr(self.objective, "logit_scale", None)
        return {} if scale is None else {"logit_scale": scale.detach().exp()}


class RunningStatistics:
    """Means and variances that batch norms keep: forward changes them, a second forward or a skipped step must not."""

    def __init__(self, towers: nn.Module) -> None:
        norms = [module for module in towers.modules() if isinstance(module, _BatchNorm)]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers()]
        self.floating = [buffer for buffer in self._buffers if buffer.is_floating_point()]

    def read(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._buffers]

    def write(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


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
        if compiled:
            tower.compile()
        if world.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return tower
        devices = [world.device] if world.device.type == "cuda" else None
        parallel = DistributedDataParallel(tower, devices, process_group=world.group, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False  # set here, as the argument changes its name between versions of torch
        return parallel

    x_tower = wrapped(towers.x_tower)
    return x_tower, x_tower if towers.y_tower is towers.x_tower else wrapped(towers.y_tower)


def _chunks(batch: Batch, count: int) -> list[Chunk]:
    """`count` runs of rows whose sizes differ by one at most; some are empty when there are fewer rows."""
    parts = zip(batch.x.tensor_split(count), batch.y.tensor_split(count), strict=True)
    return [Chunk(i, part, len(part[0])) if len(part[0]) else _idle(i, batch) for i, part in enumerate(parts)]


def _idle(index: int, batch: Batch) -> Chunk:
    rows = [side[:1] if len(batch) else side.new_zeros(1, *side.shape[1:]) for side in (batch.x, batch.y)]
    return Chunk(index, rows, 0)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _backward(embeddings: Pair, gradients: Pair) -> None:
    trained = [(e, g) for e, g in zip(embeddings, gradients, strict=True) if e.requires_grad]
    torch.autograd.backward([e for e, _ in trained], [g for _, g in trained])

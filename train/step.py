"""One optimiser step on a global batch of any size, at the memory of one chunk.

With several chunks the towers run twice: first to have all embeddings for the objective; then, chunk by chunk, to pass
the gradient of the embeddings on (GradCache, Gao et al. 2021). The objective is computed once, over everything, so the
gradient is that of the whole batch. Batch norms couple rows inside a tower: with statistics of the global batch they
need a single chunk (train/towers/batch_norm.py). The last chunks keep their graphs from the first pass, as many as
memory has room for, and need no second; a single chunk is therefore a plain step.

Noise (dropout, patch dropout) is keyed by (seed, step, rank, tower, chunk): both passes see the same, and so does a
resumed run, without any generator state to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import Batch, Known
from data.errors import UserError
from train.chunks import Chunk, Pair, chunk_count, in_chunks, joined, separated
from train.config import OptimConfig, Precision
from train.distributed.parallel import average_in_next_backward, in_parallel, without_averages
from train.distributed.world import World, all_reduce_sum
from train.graphs import Room
from train.optim import build_optimizer, learning_rate
from train.pace import Alone
from train.spikes import Spikes
from train.towers.batch_norm import RunningStatistics
from train.towers.tower import TwoTower

AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


@dataclass(frozen=True)
class StepOptions:
    """chunk_size: pairs per rank embedded at a time, None for all; global_batch_size fixes the number of chunks.

    keep_graphs: chunks that are embedded once, None for as many as memory has room for.
    """

    seed: int
    total_steps: int
    global_batch_size: int
    chunk_size: int | None = None
    keep_graphs: int | None = None
    precision: Precision = Precision.fp32
    compile: bool = False


class TrainStep:
    """`step(batch, index)` takes one optimiser step and returns its scalars, equal on all ranks.

    embeddings, keys: (b, D) and content keys (b,) of x and of y in the last step, without graph; scalars: what it
    returned; not_taken: why it changed nothing ("nonfinite", "spike"), "" if it did. alone: seconds of this rank before
    it waits for others. place: where it is, for messages.
    """

    embeddings: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    scalars: Mapping[str, float]
    not_taken = ""
    place = "the first step"

    def __init__(
        self, towers: TwoTower, objective: nn.Module, optim: OptimConfig, options: StepOptions, world: World
    ) -> None:
        self.towers, self.objective, self.world = towers.train(), objective, world
        named = [*towers.named_parameters("towers"), *objective.named_parameters("objective")]
        self.optimizer = build_optimizer(named, optim)
        self._optim, self._options = optim, options
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._parallel = in_parallel(towers, options.compile, world)
        self._statistics = RunningStatistics(towers)
        self._dtype = AUTOCAST[options.precision]
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision is Precision.fp16)
        self._skipped, self._skipped_in_a_row = 0, 0
        self._spikes = Spikes(optim.spike)
        self.alone = Alone(world.device)
        self._chunks = chunk_count(options.global_batch_size, world.size, options.chunk_size)
        self._room = Room(options.keep_graphs if self._chunks > 1 else 1, towers, world.device)

    def __call__(self, batch: Batch, step: int) -> Mapping[str, float]:
        """Raises UserError after optim.patience steps in a row that are not taken; until then they change nothing."""
        self.place, self.not_taken = f"step {step + 1}", ""
        self.alone.begins()
        if not self.towers.training:
            self.towers.train()
        batch = batch.to(self.world.device)
        lr = learning_rate(step, self._options.total_steps, self._optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        before = self._statistics.read()
        self._statistics.begin(len(batch))
        result = self._gradient(batch, step)
        shared = self._averaged({"loss": result.loss.detach(), **result.metrics, **self._scale()})
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        values = torch.stack([*shared.values(), norm]).tolist()  # all at once: a GPU waits for every reading
        scalars = dict(zip([*shared, "grad_norm"], values, strict=True))
        self.not_taken = self._fault(scalars["loss"], scalars["grad_norm"])
        self._take(norm, before)
        self._count(scalars["loss"])
        self.scalars = {**scalars, "lr": lr, "skipped": float(self._skipped)}
        if self._skipped_in_a_row >= self._optim.patience:
            raise UserError(f"step {step + 1}: {self._complaint(scalars['loss'])}")
        self.place = f"what follows step {step + 1}"
        return self.scalars

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides weights and optimiser: JSON."""
        skipped = [self._skipped, self._skipped_in_a_row]
        return {"scaler": self._scaler.state_dict(), "skipped": skipped, "losses": [*self._spikes.losses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state["scaler"])
        self._skipped, self._skipped_in_a_row = state["skipped"]
        self._spikes.losses.extend(state["losses"])

    def _gradient(self, batch: Batch, step: int) -> Any:
        """Fill .grad of all parameters, of the towers averaged over ranks; returns the objective's result."""
        chunks = in_chunks(batch, self._chunks)
        with without_averages(self._parallel):
            graphs = self._room.graphs()
            # All with graph, if only to drop it: some kernels are chosen by whether there is one
            pairs = [_detached(graphs.add(partial(self._embed, chunk, step), chunk.inputs)) for chunk in chunks]
            statistics = self._statistics.read()
            x, y = (joined(side).requires_grad_() for side in zip(*pairs, strict=True))
            y_pairs, columns = separated(y, chunks, batch.extra)
            self.embeddings, self.keys = (x.detach(), y_pairs.detach()), (batch.x_keys, batch.y_keys)
            related = {"x_keys": batch.x_keys, "y_keys": batch.y_keys, **self._known(batch)}
            self.alone.ends()
            result = self.objective(x, y_pairs, batch.sample_ids, negatives=columns, **related)
            self._scaler.scale(result.loss).backward()
            # a side that the objective freezes has none, and its tower's averaging still waits for one
            whole = [torch.zeros_like(e) if e.grad is None else e.grad for e in (x, y)]
            sides = (gradient.split(sizes) for gradient, sizes in zip(whole, _sizes(chunks), strict=True))
            gradients = list(zip(*sides, strict=True))
            for chunk in reversed(chunks):  # as one backward through all of them would go: the same sums, bit for bit
                embeddings = graphs.pop() if graphs else self._embed(chunk, step)
                if chunk.index == 0:
                    average_in_next_backward(self._parallel)
                _backward(embeddings, gradients[chunk.index])
                del embeddings
        self._statistics.write(statistics)
        return result

    def _known(self, batch: Batch) -> dict[str, Known]:
        """What is right for a row, for an objective that can exclude it from its negatives."""
        known = batch.known if "excluded" in getattr(self.objective, "takes", ()) else None
        return {} if known is None else {"known_positives": known}

    def _embed(self, chunk: Chunk, step: int) -> Pair:
        """Embeddings of both sides, as many as count."""
        device, embeddings = self.world.device, []
        for side, (tower, rows) in enumerate(zip(self._parallel, chunk.inputs, strict=True)):
            with (
                noise(device, self._options.seed, step, self.world.rank, side, chunk.index),
                torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None),
            ):
                embeddings.append(tower(rows))
        return [e[:size] for e, size in zip(_for_scores(embeddings, device), chunk.sizes, strict=True)]

    def _averaged(self, scalars: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over ranks, also of the objective's gradients and of running statistics: one flat all-reduce."""
        if self.world.size == 1:
            return scalars
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        shared = [*gradients, *self._statistics.own]
        flat = torch.cat([t.flatten().to(scalars["loss"].dtype) for t in (*shared, *scalars.values())])
        all_reduce_sum(flat, self.world).div_(self.world.size)
        *means, values = flat.split([*(t.numel() for t in shared), len(scalars)])
        for tensor, mean in zip(shared, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        return dict(zip(scalars, values, strict=True))

    def _fault(self, loss: float, norm: float) -> str:
        """What keeps the step from being taken. Both numbers are the same on all ranks, so they agree."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nonfinite"
        return "spike" if self._spikes.is_one(loss) else ""

    def _take(self, norm: Tensor, before: list[Tensor]) -> None:
        """The optimiser step, or nothing at all."""
        if self.not_taken:
            self.objective.undo()  # pyright: ignore[reportCallIssue]
            self._statistics.write(before)
            return
        if self._optim.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._optim.clip_norm, norm)
        self.optimizer.step()
        self.objective.clamp_()  # pyright: ignore[reportCallIssue]

    def _count(self, loss: float) -> None:
        """What is skipped, also in a row; there, what a smaller loss scale of fp16 may mend does not count."""
        mendable = self.not_taken == "nonfinite" and math.isfinite(loss) and self._scaler.get_scale() > 1
        self._scaler.update()
        if not self.not_taken:
            self._spikes.losses.append(loss)
            self._skipped_in_a_row = 0
            return
        self._skipped += 1
        self._skipped_in_a_row += not mendable

    def _complaint(self, loss: float) -> str:
        row = f"in {self._optim.patience} steps in a row (optim.patience); the weights are those of before"
        if self.not_taken == "spike":
            return (
                f"the loss, now {loss:.4g}, was far above the usual {self._spikes.mean:.4g} (optim.spike="
                f"{self._optim.spike:g}) {row}. Go back to an earlier checkpoint with a lower optim.lr, or raise "
                "optim.spike"
            )
        return (
            f"no finite loss and gradient {row}. Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32"
        )

    def _scale(self) -> dict[str, Tensor]:
        """The objective's scale 1/τ in this step, if it has one."""
        scale = getattr(self.objective, "logit_scale", None)
        return {} if scale is None else {"logit_scale": scale.detach().exp()}


@contextmanager
def noise(device: torch.device, *key: int) -> Iterator[None]:
    """The random numbers of `key`, on CPU and device; the generators go on afterwards as if nothing had happened."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def _for_scores(embeddings: Pair, device: torch.device) -> Pair:
    """Both sides in one precision: float32 or better on a CPU, what the towers computed in on a GPU.

    Only GPUs have matrix products of half-precision numbers with sums that are not rounded back to them.
    """
    least = [] if device.type == "cuda" else [torch.float32]
    dtype = reduce(torch.promote_types, [*(e.dtype for e in embeddings), *least])
    return [e.to(dtype) for e in embeddings]


def _detached(embeddings: Pair) -> Pair:
    return [e.detach() for e in embeddings]


def _sizes(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Rows of every chunk, of x and of y."""
    return [list(side) for side in zip(*(chunk.sizes for chunk in chunks), strict=True)]


def _backward(embeddings: Pair, gradients: Pair) -> None:
    trained = [(e, g) for e, g in zip(embeddings, gradients, strict=True) if e.requires_grad]
    torch.autograd.backward([e for e, _ in trained], [g for _, g in trained])

"""One optimiser step on a global batch of any size, with the memory of one chunk of it.

With several chunks the towers run twice: first to get the embeddings of the whole batch, on which the objective is
computed once; then, chunk by chunk, to propagate the gradient of the embeddings back to the weights (GradCache, Gao et
al. 2021, arXiv 2101.06983). So the gradient is that of the whole batch. The newest chunks keep their graphs from the
first pass, as far as memory allows, and are not run again; a single chunk is therefore a plain step. Batch norms couple
the rows of a tower's input: for statistics of the global batch they need a single chunk (train/towers/batch_norm.py).

Noise (dropout, patch dropout) is seeded by (seed, step, rank, tower, chunk), that of a target network by one number
more. Both passes draw the same noise, and so does a resumed run, without any generator state in the checkpoint.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from dyad.data.base.errors import UserError
from dyad.data.batch import Batch
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.data_parallel import no_gradient_sync, sync_in_next_backward, wrap_towers
from dyad.train.distributed.devices import chosen_precision
from dyad.train.distributed.world import World, all_reduce_sum
from dyad.train.losses.sums.conditions import Checks, Sizes, checked
from dyad.train.monitor.loss_spikes import LossSpikes
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.step.averaging import WeightAverage
from dyad.train.step.chunks import Chunk, TensorPair, chunk_count, in_chunks, separated
from dyad.train.step.graph_cache import GraphCache, MemoryBudget
from dyad.train.step.layer_decay import learning_rate_scales
from dyad.train.step.optim import build_optimizer, learning_rate
from dyad.train.step.sizes import SizeExchange
from dyad.train.step.target import Target
from dyad.train.towers.batch_norm import RunningStatistics
from dyad.train.towers.tower import TwoTower, tf32_products

AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
BACK_OFF = 100  # steps that assume nothing, after one whose assumptions did not hold


class TrainStep:
    """Takes optimiser steps: `step(batch, index)` takes step `index` (from 0) and returns its scalars.

    The scalars are equal on all ranks. Attributes that describe the last step: embeddings: of x and of y, (b, D) each,
    without gradient. keys: content keys of x and of y, (b,) each. scalars: as returned. skip_reason: "nonfinite" or
    "spike" if the step was skipped, else "". stage: the work in progress, for error messages. Other attributes:
    local_timer: measures the time from a step's start to this rank's first communication with other ranks.
    on_skip(batch, steps, reason, scalars): a function called on all ranks when a step is skipped; steps: the number of
    finished steps, including the skipped one. stop_requested(): whether this process was asked to stop; stopping:
    whether a rank was when its last step ended. average: the moving average of the weights (optim.ema). target: the
    target network. pairs: how many pairs each rank has, if in every step; None: side y has items of its own, or the
    numbers change.
    """

    embeddings: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    scalars: Mapping[str, float]
    skip_reason, stopping = "", False
    stage = "the first step"

    def __init__(
        self,
        towers: TwoTower,
        objective: nn.Module,
        config: TrainConfig,
        total_steps: int,
        world: World,
        pairs: tuple[int, ...] | None = None,
    ) -> None:
        self.towers, self.objective, self.world = towers.train(), objective, world
        named = [*towers.named_parameters("towers"), *objective.named_parameters("objective")]
        decay = config.optim.layer_decay
        scales = None if decay is None else learning_rate_scales(towers, decay)
        self.optimizer = build_optimizer(named, config.optim, scales)
        # one rank has no others to be compared with: events of a GPU would never be read
        self.local_timer = LocalTimer(world.device if world.size > 1 else torch.device("cpu"))
        self.stop_requested: Callable[[], bool] = lambda: False
        self.on_skip: Callable[[Batch, int, str, Mapping[str, float]], None] = lambda *_: None
        self._config, self._total_steps = config, total_steps
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.average = WeightAverage(self._parameters, config.optim.ema)
        self.target = Target(towers, config, total_steps, world)
        self._parallel = wrap_towers(towers, config.compile, world)
        self._statistics = RunningStatistics(nn.ModuleList([towers, *self.target.towers]))
        precision = chosen_precision(config.precision, world.device)
        self._dtype = AUTOCAST[precision]
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=precision is Precision.fp16)
        self._skipped, self._skipped_in_a_row = 0, 0
        self._spikes = LossSpikes(config.optim.spike)
        self._sizes, self._trust_from, self.pairs = SizeExchange(world, pairs), 0, pairs
        self._chunks = chunk_count(config.global_batch_size, world.size, config.chunk_size)
        self._keep_graphs = config.keep_graphs if self._chunks > 1 else 1
        self._memory = MemoryBudget(towers, world.device, self.optimizer)

    def __call__(self, batch: Batch, step: int) -> Mapping[str, float]:
        """Take optimiser step `step` (from 0) and return its scalars by name; or skip it, which changes no weight.

        A step is skipped if its loss or gradient is not finite, or its loss is a spike. Raises UserError after
        optim.max_skipped skipped steps in a row.
        """
        self.stage = f"step {step + 1}"
        self.local_timer.start()
        sizes = self._sizes.begin(batch)
        if not self.towers.training:  # an evaluation may have left eval() behind
            self.towers.train()
        batch = batch.to(self.world.device)
        lr = learning_rate(step, self._total_steps, self._config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.target.begin(step)
        statistics = self._statistics.read()  # to put back if the step is skipped
        self._statistics.begin(len(batch))
        scalars, norm = self._attempt(batch, step, sizes, trusting=step >= self._trust_from)
        if scalars is None:  # what was assumed does not hold: again, from the same state
            self._trust_from = step + BACK_OFF
            scaler = self._scaler.state_dict()
            self._scaler.update()  # forgets that the gradients were unscaled
            self._scaler.load_state_dict(scaler)
            self.objective.undo()  # pyright: ignore[reportCallIssue]
            self._statistics.write(statistics)
            self._statistics.begin(len(batch))
            self.local_timer.start()  # the first attempt has stopped it
            scalars, norm = self._attempt(batch, step, sizes, trusting=False)
            assert scalars is not None
        self._apply_or_skip(step, scalars["loss"], scalars["grad_norm"], norm, statistics)
        self.scalars = {**scalars, "lr": lr, "skipped": float(self._skipped)}
        if self.skip_reason:
            self.on_skip(batch, step + 1, self.skip_reason, scalars)
        if self._skipped_in_a_row >= self._config.optim.max_skipped:
            raise UserError(f"step {step + 1}: {self._skip_message(scalars['loss'])}")
        self.stage = f"what follows step {step + 1}"
        return self.scalars

    def _attempt(
        self, batch: Batch, step: int, sizes: Callable[[], Sizes], trusting: bool
    ) -> tuple[dict[str, float] | None, Tensor]:
        """Fill .grad of the trained parameters; return the step's scalars and the norm of the gradient.

        One host read brings the scalars, the stop requests, and whether the conditions hold that the objective assumes
        if `trusting` (see train/losses/sums/conditions.py). The scalars are None if they do not.
        """
        self.optimizer.zero_grad(set_to_none=True)
        result, checks = self._gradient(batch, step, sizes, trusting)
        tensors = {"loss": result.loss.detach(), **result.metrics}
        if (scale := getattr(self.objective, "logit_scale", None)) is not None:
            tensors["logit_scale"] = scale.detach().exp()  # 1/τ of this step, before the optimiser moves it
        tensors["broken"] = checks.broken(tensors["loss"])
        tensors["stop"] = torch.full_like(tensors["loss"], self.stop_requested())
        tensors, sums = self._averaged(tensors, [values for values, _ in checks.later])
        for (_, finish), of_all in zip(checks.later, sums, strict=True):
            tensors |= finish(of_all)
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        values = torch.stack([*tensors.values(), norm]).tolist()  # one reading: the host waits for the GPU at each
        scalars = dict(zip([*tensors, "grad_norm"], values, strict=True))
        self.stopping, broken = scalars.pop("stop") > 0, scalars.pop("broken") > 0
        return (None if trusting and broken else scalars), norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training step for a checkpoint: loss scale, counts of skipped steps, recent losses.

        All values can be written as JSON. Weights and optimiser state are saved separately.
        """
        state = {"scaler": self._scaler.state_dict(), "skipped": [self._skipped, self._skipped_in_a_row]}
        averaged = {} if self._config.optim.ema is None else {"averaged": self.average.updates}
        return {**state, "losses": [*self._spikes.losses], "trust_from": self._trust_from, **averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state["scaler"])
        self._skipped, self._skipped_in_a_row = state["skipped"]
        self._spikes.losses.extend(state["losses"])
        self._trust_from = state.get("trust_from", 0)  # older checkpoints have none
        self.average.updates = state.get("averaged", 0)

    def _gradient(self, batch: Batch, step: int, of_ranks: Callable[[], Sizes], trusting: bool) -> tuple[Any, Checks]:
        """Compute the loss of a batch and fill .grad of the trained parameters.

        Returns the objective's result (loss, metrics), and the conditions under which it is right. of_ranks: a function
        that waits for the sizes of the global batch.

        On return the towers' gradients are averaged over ranks; those of the objective's parameters (e.g. temperature)
        are not yet: _averaged does that. step: index of the optimiser step, which seeds dropout.
        """
        chunks, sides = in_chunks(batch, self._chunks)
        graphs = GraphCache(self._keep_graphs, self._memory)
        # The end of the outermost autocast context forgets the casts of the weights. This one, which is off, keeps them
        # from chunk to chunk, so that each weight is cast once. Backward is outside of autocast, as torch wants it.
        casts = torch.autocast(self.world.device.type, enabled=False)
        with casts, no_gradient_sync(self._parallel):
            # with a graph even where the cache drops it: some kernels are chosen by whether there is one
            embed = partial(self._embed, step=step)
            pairs = [[e.detach() for e in graphs.add(partial(embed, c, self._parallel), c.inputs)] for c in chunks]
            statistics = self._statistics.read()  # the target and the second pass must not count the rows again
            parts = zip(*pairs, strict=True)
            x, y = (side.joined(own).requires_grad_() for side, own in zip(sides, parts, strict=True))
            y_pairs, columns = separated(y, len(batch.y), batch.extra)
            self.embeddings, self.keys = (x.detach(), y_pairs.detach()), (batch.x_keys, batch.y_keys)
            related: dict[str, Any] = {"x_keys": batch.x_keys, "y_keys": batch.y_keys}
            # only some objectives can leave columns out of a row's negatives
            if batch.known_positives is not None and "excluded" in getattr(self.objective, "takes", ()):
                related["known_positives"] = batch.known_positives
            related |= self.target.embeddings(chunks, sides, len(batch), embed)
            if batch.positives is not None:
                rows = torch.arange(len(batch), device=batch.positives.device)
                related["positives"] = torch.stack([rows, batch.positives], 1)
            self.local_timer.stop()  # the objective begins with a collective
            with record_function("objective"):
                with checked(trusting, of_ranks()) as checks:
                    result = self.objective(x, y_pairs, batch.sample_ids, negatives=columns, **related)
                self._scaler.scale(result.loss).backward()
            # a frozen side has no gradient, but its tower must run backward too: its averaging waits for one
            whole = [torch.zeros_like(e) if e.grad is None else e.grad for e in (x, y)]
            gradients = list(zip(*(side.split(g) for side, g in zip(sides, whole, strict=True)), strict=True))
            for chunk in reversed(chunks):  # in the order of one backward through all of them: the same sums to the bit
                embeddings = graphs.pop() if graphs else embed(chunk, self._parallel)
                if chunk.index == 0:  # the last backward of this step: gradients are complete and can be averaged
                    sync_in_next_backward(self._parallel)
                trained = [(e, g) for e, g in zip(embeddings, gradients[chunk.index], strict=True) if e.requires_grad]
                with record_function("towers backward"), tf32_products(self.world.device):
                    torch.autograd.backward([e for e, _ in trained], [g for _, g in trained])
                del embeddings, trained  # frees the graph before the next chunk is embedded
        self._statistics.write(statistics)
        return result, checks

    @record_function("towers forward")
    def _embed(self, chunk: Chunk, towers: Sequence[nn.Module], *key: int, step: int) -> TensorPair:
        """Run `towers` (x and y) on a chunk, with the noise of step `step`; return x and y embeddings, (b, D) each.

        Dummy rows are left out. key: further numbers of the noise's seed.
        """
        device, embeddings = self.world.device, []
        for side, (tower, rows, lengths) in enumerate(zip(towers, chunk.inputs, chunk.lengths, strict=True)):
            with (
                noise(device, self._config.seed, step, self.world.rank, side, chunk.index, *key),
                tf32_products(device),
                torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None),
            ):
                embeddings.append(tower(rows) if lengths is None else tower(rows, lengths))
        return [e[:size] for e, size in zip(_for_scores(embeddings, device), chunk.sizes, strict=True)]

    def _averaged(self, scalars: dict[str, Tensor], summed: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Average the loss and metrics in `scalars` (name → 0-d tensor) over ranks, and sum the 1-d tensors `summed`.

        Returns the means by name, and the sums. Every rank must call it. It also averages, in place, the gradients of
        the objective's parameters and those running statistics of batch norms that differ between ranks. One all-reduce
        of one flat tensor does all of this, as many small ones would take longer.
        """
        if self.world.size == 1:
            return scalars, summed
        shared = [*(p.grad for p in self.objective.parameters() if p.grad is not None), *self._statistics.own]
        parts = [*shared, *scalars.values(), *summed]
        flat = all_reduce_sum(torch.cat([t.flatten().to(scalars["loss"].dtype) for t in parts]), self.world)
        *means, values, sums = flat.split([*(t.numel() for t in shared), len(scalars), sum(map(len, summed))])
        for tensor, total in zip(shared, means, strict=True):
            tensor.copy_(total.view_as(tensor) / self.world.size)
        return dict(zip(scalars, values / self.world.size, strict=True)), [*sums.split([len(t) for t in summed])]

    def _apply_or_skip(self, step: int, loss: float, grad_norm: float, norm: Tensor, statistics: list[Tensor]) -> None:
        """Take the optimiser step; or skip it, and undo what the forward pass changed, if loss or gradient is unusable.

        Sets self.skip_reason: "nonfinite" (loss or grad_norm is not finite), "spike" (the loss is far above the recent
        ones), or "" if the step is taken. loss and grad_norm must be equal on all ranks, so that all decide alike.
        norm: grad_norm as a tensor, for clipping. statistics: the batch norms' running statistics before the step,
        restored if the step is skipped.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.skip_reason = "nonfinite" if not is_finite else "spike" if self._spikes.is_spike(loss) else ""
        if self.skip_reason:
            self.objective.undo()  # pyright: ignore[reportCallIssue]
            self._statistics.write(statistics)
            # an overflow of fp16 that a smaller loss scale may avoid does not count as one in a row
            avoidable = self.skip_reason == "nonfinite" and math.isfinite(loss) and self._scaler.get_scale() > 1
            self._skipped += 1
            self._skipped_in_a_row += not avoidable
        else:
            if self._config.optim.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.optim.clip_norm, norm)
            self.optimizer.step()
            self.objective.clamp_()  # pyright: ignore[reportCallIssue]
            self.average.update()
            self.target.update(step)
            self._spikes.losses.append(loss)
            self._skipped_in_a_row = 0
        self._scaler.update()

    def _skip_message(self, loss: float) -> str:
        optim = self._config.optim
        in_a_row = f"in {optim.max_skipped} steps in a row (optim.max_skipped); the weights are those of before"
        if self.skip_reason == "nonfinite":
            way_out = "Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32"
            return f"no finite loss and gradient {in_a_row}. {way_out}"
        return (
            f"the loss, now {loss:.4g}, was far above the usual {self._spikes.mean:.4g} (optim.spike={optim.spike:g}) "
            f"{in_a_row}. Go back to an earlier checkpoint with a lower optim.lr, or raise optim.spike"
        )


@contextmanager
def noise(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the random generators of CPU and `device` from the integers `key` during the block.

    key: for example (seed, step, rank, tower, chunk). Equal keys give equal noise. Afterwards the states of the
    generators are restored.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def _for_scores(embeddings: TensorPair, device: torch.device) -> TensorPair:
    """Convert the x and y embeddings to one dtype: the wider of their two dtypes, and on a CPU at least float32.

    device: where the scores (dot products) are computed. A GPU accumulates half-precision dot products in higher
    precision; a CPU may round the sums to half precision.
    """
    dtype = torch.promote_types(*(e.dtype for e in embeddings))
    if device.type != "cuda":
        dtype = torch.promote_types(dtype, torch.float32)
    return [e.to(dtype) for e in embeddings]

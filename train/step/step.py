"""One optimiser step on a global batch of any size, for one loss or the weighted sum of several (see loss_term.py).

Here are also the clipping of the gradient, the steps that are skipped, and the stop after optim.max_skipped of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dyad.data.base.errors import UserError
from dyad.data.batch import Batch
from dyad.train.config import Precision
from dyad.train.distributed.consistency import on_all_ranks
from dyad.train.distributed.data_parallel import average_now, no_gradient_sync, wrap_towers_of_terms
from dyad.train.distributed.devices import chosen_precision
from dyad.train.distributed.sharded_tensors import local, split_sharded, total_norm
from dyad.train.distributed.world import all_reduce_sum
from dyad.train.losses.sums.conditions import Sizes
from dyad.train.monitor.loss_spikes import LossSpikes
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.step.averaging import WeightAverage
from dyad.train.step.exchange_sizes import exchange_sizes
from dyad.train.step.graph_cache import MemoryBudget
from dyad.train.step.loss_term import LossTerm, StepRun
from dyad.train.step.optim import build_optimizer, learning_rate_scales
from dyad.train.step.schedule import learning_rate

STEPS_WITHOUT_ASSUMING = 100  # steps whose objective assumes nothing, after a step whose assumptions did not hold


class TrainStep:
    """Takes optimiser steps: `step(batch, index)` takes step `index` (from 0) and returns its scalars.

    The scalars are equal on all ranks. terms: the losses, whose weighted sum is trained. The first is the run's own,
    with the run's configuration; auxiliary losses have objectives, batches (Batch.auxiliary) and towers of their own,
    which may share weights. The constructor builds the optimiser and wraps the towers for data parallelism, so every
    rank must call it; it raises ConfigError as `build_optimizer` does.

    Attributes that describe the last step: scalars: those that the call returned. skip_reason: "nonfinite" or "spike"
    if the step was skipped, else "". stopping: whether any rank had been asked to stop. Other attributes: stage: the
    work in progress, for error messages. towers, objective, target: those of the run's own loss. local_timer: measures
    the time from a step's start to this rank's first communication with other ranks. optimizer: that of all losses.
    average: the moving average of the weights.
    """

    scalars: Mapping[str, float]
    skip_reason, stopping = "", False
    stage = "the first step"

    def __init__(self, terms: Sequence[LossTerm]) -> None:
        own, config, world = terms[0], terms[0].config, terms[0].world
        self.terms, self.towers, self.objective, self.target = terms, own.towers, own.objective, own.target
        self.world, self._config, self._total_steps = world, config, own.total_steps
        modules = {name: module for term in reversed(terms) for name, module in term.modules.items()}
        named = [parameter for name, module in modules.items() for parameter in module.named_parameters(name)]
        decay = config.optim.layer_decay
        scales = None if decay is None else learning_rate_scales(own.towers, decay)
        self.optimizer = build_optimizer(named, config.optim, scales)
        # one rank has no others to be compared with: events of a GPU would never be read
        self.local_timer = LocalTimer(world.device if world.size > 1 else torch.device("cpu"))
        self._names = {parameter: name for name, parameter in named}  # of a shared one, that of the first loss
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.average = WeightAverage(self._parameters, config.optim.ema)
        pairs_of_terms, self._parallel = wrap_towers_of_terms([term.towers for term in terms], config.compile, world)
        precision = chosen_precision(config.precision, world.device)
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=precision is Precision.fp16)
        self._runs = [
            StepRun(
                wrapped, MemoryBudget(term.towers, world.device, self.optimizer), self._scaler.scale, self.local_timer
            )
            for term, wrapped in zip(terms, pairs_of_terms, strict=True)
        ]
        self._skipped, self._skipped_in_a_row = 0, 0
        self._spikes = LossSpikes(config.optim.spike)
        self._assume_from = 0

    def __call__(
        self,
        batch: Batch,
        step: int,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        logs: Callable[[int], bool] = lambda steps: True,
        on_skip: Callable[[Batch, int, str, Mapping[str, float]], None] = lambda *_: None,
    ) -> Mapping[str, float]:
        """Take optimiser step `step` (from 0), or skip it, which changes no weight; return its scalars, name → value.

        Every rank must call it. A step is skipped if its loss or gradient is not finite, or its loss is a spike. batch:
        this rank's part of the global batch, with those of the auxiliary losses in batch.auxiliary. stop_requested():
        whether this process was asked to stop. logs(steps): whether metrics are logged after `steps` finished steps,
        the same on all ranks; if not, costly metrics are left out. on_skip(batch, steps, reason, scalars): called on
        all ranks when a step is skipped; steps: finished steps, with the skipped one; reason: skip_reason; scalars:
        those of the step and in_a_row, how many steps in a row were skipped. Raises UserError after optim.max_skipped
        of them; a gradient that overflows in fp16, and need not with a smaller loss scale, does not count.
        """
        self.stage = f"step {step + 1}"
        self.local_timer.start()
        terms = list(zip(self.terms, (batch, *batch.auxiliary), strict=True))
        sizes = [exchange_sizes(own, self.world, term.pairs) for term, own in terms]
        lr = learning_rate(step, self._total_steps, self._config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        batches = [term.begin(own, step) for term, own in terms]
        attempt = partial(self._attempt, batches, step, sizes, stop_requested=stop_requested, logged=logs(step + 1))
        scalars, norm = attempt(speculative=step >= self._assume_from)
        if scalars is None:  # a condition is violated: retry the step without assumptions
            self._assume_from = step + STEPS_WITHOUT_ASSUMING
            scaler = self._scaler.state_dict()
            self._scaler.update()  # forgets that the gradients were unscaled
            self._scaler.load_state_dict(scaler)
            self._undo()
            self.local_timer.start()  # the first attempt has stopped it
            scalars, norm = attempt(speculative=False)
            assert scalars is not None
        self._apply_or_skip(step, scalars["loss"], scalars["grad_norm"], norm)
        self.scalars = {**scalars, "lr": lr, "skipped": float(self._skipped)}
        if self.skip_reason:
            on_skip(batch, step + 1, self.skip_reason, {**scalars, "in_a_row": self._skipped_in_a_row})
        if self._skipped_in_a_row >= self._config.optim.max_skipped:
            raise on_all_ranks(self.world, UserError(f"step {step + 1}: {self._skip_message(scalars)}"))
        self.stage = f"after step {step + 1}"
        return self.scalars

    def _attempt(
        self,
        batches: Sequence[Batch],
        step: int,
        sizes: Sequence[Callable[[], Sizes]],
        *,
        stop_requested: Callable[[], bool],
        logged: bool,
        speculative: bool,
    ) -> tuple[dict[str, float] | None, Tensor]:
        """Compute .grad of the trained parameters; return the step's scalars and the gradient's L2 norm, a 0-d tensor.

        batches, sizes: one for each loss. stop_requested: as in `__call__`; its result sets self.stopping on all ranks.
        logged: whether costly metrics are wanted. speculative: whether objectives may assume conditions (see
        train/losses/sums/conditions.py); the scalars are None if one of them does not hold. The scalars, the stop
        requests and the conditions are read from the device at once.
        """
        self.optimizer.zero_grad(set_to_none=True)
        # The end of the outermost autocast context forgets the casts of the weights. This one, which is off, keeps them
        # from chunk to chunk, so that each weight is cast once. Backward is outside of autocast, as torch wants it.
        casts = torch.autocast(self.world.device.type, enabled=False)
        with casts, no_gradient_sync(self._parallel):
            own = zip(self.terms, batches, self._runs, sizes, strict=True)
            results = [term.gradient(batch, step, run, size, speculative, logged) for term, batch, run, size in own]
            if len(self.terms) > 1:
                average_now(self._parallel)
        loss, violated = results[0].loss, results[0].violated
        for result in results[1:]:
            loss, violated = loss + result.loss, violated + result.violated
        tensors = {"loss": loss, "violated": violated, "stop": torch.full_like(loss, stop_requested())}
        if len(results) > 1:
            tensors[f"{self._config.task}/loss"] = results[0].loss / self._config.weight
        for result in results:
            tensors |= result.metrics
        later = [(term, *of_term) for term, r in zip(self.terms, results, strict=True) for of_term in r.checks.later]
        tensors, sums = self._averaged(tensors, [values for _, values, _ in later])
        for (term, _, finish), total in zip(later, sums, strict=True):
            tensors |= term.named(finish(total))
        self._scaler.unscale_(self.optimizer)
        norm = total_norm([p.grad for p in self._parameters if p.grad is not None])
        values = torch.stack([*tensors.values(), norm]).tolist()  # one reading: the host waits for the GPU at each
        scalars = dict(zip([*tensors, "grad_norm"], values, strict=True))
        self.stopping, violated = scalars.pop("stop") > 0, scalars.pop("violated") > 0
        return (None if speculative and violated else scalars), norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training step for a checkpoint, as values that can be written as JSON.

        These are the loss scale, the numbers of skipped steps, recent losses, the step from which conditions may be
        assumed again and, with optim.ema, the number of updates of the average. Weights, the average and optimiser
        state are saved separately.
        """
        state = {"scaler": self._scaler.state_dict(), "skipped": [self._skipped, self._skipped_in_a_row]}
        averaged = {} if self._config.optim.ema is None else {"averaged": self.average.updates}
        return {**state, "losses": [*self._spikes.losses], "trust_from": self._assume_from, **averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The entries trust_from and averaged may be missing, as in older ones."""
        self._scaler.load_state_dict(state["scaler"])
        self._skipped, self._skipped_in_a_row = state["skipped"]
        self._spikes.losses.extend(state["losses"])
        self._assume_from = state.get("trust_from", 0)  # older checkpoints have none
        self.average.updates = state.get("averaged", 0)

    def _averaged(self, scalars: dict[str, Tensor], summed: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Average the loss and metrics in `scalars` (name → 0-d tensor) over ranks, and sum the 1-d tensors `summed`.

        Returns (the means by name, the sums). Every rank must call it. It also averages, in place, the gradients of the
        objectives' parameters and the running statistics of batch norms that differ between ranks. One all-reduce of
        one flat tensor does all of this, as many small ones would take longer.
        """
        if self.world.size == 1:
            return scalars, summed
        gradients = [p.grad for term in self.terms for p in term.objective.parameters() if p.grad is not None]
        shared = [*gradients, *(buffer for term in self.terms for buffer in term.statistics.own)]
        parts = [*shared, *scalars.values(), *summed]
        flat = all_reduce_sum(torch.cat([t.flatten().to(scalars["loss"].dtype) for t in parts]), self.world)
        *means, values, sums = flat.split([*(t.numel() for t in shared), len(scalars), sum(map(len, summed))])
        for tensor, total in zip(shared, means, strict=True):
            tensor.copy_(total.view_as(tensor) / self.world.size)
        return dict(zip(scalars, values / self.world.size, strict=True)), [*sums.split([len(t) for t in summed])]

    def _apply_or_skip(self, step: int, loss: float, grad_norm: float, norm: Tensor) -> None:
        """Take the optimiser step; if loss or gradient is unusable, skip it and undo what the forward pass changed.

        Sets self.skip_reason: "nonfinite" (loss or grad_norm is not finite), "spike" (the loss is far above the recent
        ones), or "" if the step is taken. loss and grad_norm must be equal on all ranks, so that all decide alike.
        norm: grad_norm as a tensor, for clipping.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.skip_reason = "nonfinite" if not is_finite else "spike" if self._spikes.is_spike(loss) else ""
        if self.skip_reason:
            self._undo()
            # an overflow of fp16 that a smaller loss scale may avoid does not count as one in a row
            avoidable = self.skip_reason == "nonfinite" and math.isfinite(loss) and self._scaler.get_scale() > 1
            self._skipped += 1
            self._skipped_in_a_row += not avoidable
        else:
            if self._config.optim.clip_norm is not None:
                for parameters in split_sharded(self._parameters):
                    torch.nn.utils.clip_grads_with_norm_(parameters, self._config.optim.clip_norm, norm)
            self.optimizer.step()
            self.average.update()
            for term in self.terms:
                term.after(step)
            self._spikes.losses.append(loss)
            self._skipped_in_a_row = 0
        self._scaler.update()

    def _undo(self) -> None:
        """Restore the objectives' states and the batch norms' running statistics to those before the last attempt."""
        for term in reversed(self.terms):  # so that state which two terms share is as it was before the first of them
            term.undo()

    def _skip_message(self, scalars: Mapping[str, float]) -> str:
        """Return the message of the error that ends the run: what the last steps were skipped for, and what to do.

        scalars: those of the last step. Losses that are not finite are named, and up to three weights whose gradients
        are not finite, of sharded weights in this rank's rows; without any, the norm of the gradient.
        """
        optim, loss = self._config.optim, scalars["loss"]
        in_a_row = f"in {optim.max_skipped} steps in a row (optim.max_skipped); the weights are those of before"
        if self.skip_reason == "nonfinite":
            losses = [n for n, value in scalars.items() if n.rpartition("/")[2] == "loss" and not math.isfinite(value)]
            grads = ((p, local(p.grad)) for p in self._parameters if p.grad is not None)
            weights = islice((self._names[p] for p, grad in grads if not grad.isfinite().all()), 3)
            found = ", ".join([*losses, *(f"{name}.grad" for name in weights)]) or "grad_norm"  # it overflowed
            way_out = "Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32"
            return f"no finite loss and gradient {in_a_row}. Not finite: {found}. {way_out}"
        return (
            f"the loss, now {loss:.4g}, was far above the usual {self._spikes.mean:.4g} (optim.spike={optim.spike:g}) "
            f"{in_a_row}. Go back to an earlier checkpoint with a lower optim.lr, or raise optim.spike"
        )

"""The monitor of a run: it watches for slow ranks, bad samples and weights that differ, and records skipped steps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from dyad.data.batch import Batch
from dyad.train.distributed.consistency import check_same_weights
from dyad.train.distributed.sharded_tensors import local, own_rows
from dyad.train.distributed.world import World, gather_objects
from dyad.train.monitor.bad_samples import BadSampleCounter
from dyad.train.monitor.stragglers import Stragglers
from dyad.train.run_folder.ledger import Ledger
from dyad.train.run_folder.named_tensors import named_tensors


@dataclass
class Monitor:
    """Observes the training steps of a run. Every rank has a Monitor and must call the same methods.

    modules: name → module whose weights are compared between ranks. digest_every: steps between two comparisons; 0: the
    weights are never compared. ledger: the run's event file. log: called with each line to print. shard_size: how many
    ranks share one copy of the weights.
    """

    stragglers: Stragglers
    bad_samples: BadSampleCounter
    modules: Mapping[str, nn.Module]
    digest_every: int
    ledger: Ledger
    world: World
    log: Callable[[str], None]
    shard_size: int = 1
    _compared_at: int = field(default=-1, init=False)

    def observe(self, batch: Batch, waited: float, step: int) -> None:
        """Record one finished step; call it after each step. Every dist.digest_every steps, compare the ranks' weights.

        waited: seconds that the step waited for `batch`. step: finished optimiser steps, including this one. Bad
        samples of `batch` are only counted by the next `check` or `verify`. Raises HardwareError when the ranks'
        weights differ. Every rank must call it.
        """
        self.stragglers.observe(waited)
        self.bad_samples.observe(batch, step)
        if self.digest_every and step % self.digest_every == 0:
            self._compare_weights(step)

    def record_skipped(self, batch: Batch, step: int, reason: str, scalars: Mapping[str, float]) -> None:
        """Write a skipped step to the run's event file, with the lowest and highest sample id of its global batch.

        A line is printed, too. reason: the kind of entry, "nonfinite" or "spike". scalars: metrics of the step by name,
        of which loss and grad_norm are written; a number that is not finite is written as null; and in_a_row, how many
        skipped steps in a row count for optim.max_skipped. Every rank must call it.
        """
        own = (int(batch.sample_ids.min()), int(batch.sample_ids.max())) if len(batch) else None
        first, last = zip(*filter(None, gather_objects(own, self.world)), strict=True)
        numbers = {name: scalars[name] for name in ("loss", "grad_norm")}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.ledger.write(step, reason, first_id=min(first), last_id=max(last), **finite)
        found = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        counts = f"{scalars['in_a_row']:.0f} in a row; optim.max_skipped of them end the run"
        why = counts if scalars["in_a_row"] else "fp16 overflowed, and the loss scale is lowered"
        self.log(f"Step {step} is skipped ({reason}): {found}; {why}")

    def check(self) -> Mapping[str, float]:
        """Warn of stragglers (slow ranks), and return the count of bad samples as a metric.

        The metric is "substituted", the bad samples of the run so far. Call it when a step is logged. Raises as
        `BadSampleCounter.check` does when there are too many. Every rank must call it.
        """
        self.stragglers.check()
        return {"substituted": float(self.bad_samples.check())}

    def verify(self, step: int) -> None:
        """Compare the ranks' weights and count the bad samples; call it before training and before each checkpoint.

        This keeps weights that differ between ranks out of checkpoints. Weights are not compared if digest_every is 0,
        or if they were compared at this step already. step: finished optimiser steps. Raises HardwareError when weights
        differ, and as `BadSampleCounter.check` does when there are too many bad samples. Every rank must call it.
        """
        self._compare_weights(step)
        self.bad_samples.check()

    def _compare_weights(self, step: int) -> None:
        if self.digest_every and self.world.size > 1 and step != self._compared_at:
            named = named_tensors(self.modules)
            whole = {name: tensor for name, tensor in named.items() if own_rows(tensor) is None}
            parts = {name: local(tensor) for name, tensor in named.items() if name not in whole}
            for tensors, shards in ((whole, 1), (parts, self.shard_size)):
                if tensors:  # all may be sharded, or none
                    check_same_weights(self.world, tensors, step, shards)
            self._compared_at = step

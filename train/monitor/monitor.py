"""The monitor of a run: stragglers, skipped steps, bad samples, and ranks whose weights differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dyad.data.batch import Batch
from dyad.train.distributed.consistency import check_same_weights
from dyad.train.distributed.world import World, gather_objects
from dyad.train.monitor.bad_samples import BadSampleCounter
from dyad.train.monitor.stragglers import Stragglers
from dyad.train.run_folder.checkpoint import named_tensors
from dyad.train.run_folder.ledger import Ledger


@dataclass
class Monitor:
    """Observes the steps of a run. Every rank has one and calls the same methods.

    modules: those whose weights are compared, by name; digest_every: steps between two comparisons, 0 for none.
    """

    stragglers: Stragglers
    bad_samples: BadSampleCounter
    modules: Mapping[str, nn.Module]
    digest_every: int
    ledger: Ledger
    world: World
    _compared_at: int = field(default=-1, init=False)

    def observe(self, batch: Batch, waited: float, step: int) -> None:
        """Call after each step. waited: seconds that the step waited for `batch`; step: finished steps, with this one.

        Raises HardwareError, every digest_every steps, when the ranks' weights differ.
        """
        self.stragglers.observe(waited)
        self.bad_samples.observe(batch, step)
        if self.digest_every and step % self.digest_every == 0:
            self._compare_weights(step)

    def record_skipped(self, batch: Batch, step: int, reason: str, scalars: Mapping[str, float]) -> None:
        """Write a skipped step to the ledger, with the range of sample ids of its global batch. A collective."""
        own = (int(batch.sample_ids.min()), int(batch.sample_ids.max())) if len(batch) else None
        first, last = zip(*filter(None, gather_objects(own, self.world)), strict=True)
        numbers = {name: scalars[name] for name in ("loss", "grad_norm")}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.ledger.write(step, reason, first_id=min(first), last_id=max(last), **finite)

    def check(self) -> Mapping[str, float]:
        """Call when a step is logged. Warns of stragglers; returns what to log. A collective.

        Raises DataError, on all ranks, when there are too many bad samples.
        """
        self.stragglers.check()
        return {"substituted": float(self.bad_samples.check())}

    def verify(self, step: int) -> None:
        """Call before training and before each checkpoint, which must not hold weights of which ranks differ.

        Raises HardwareError when they do, DataError when there are too many bad samples. A collective.
        """
        self._compare_weights(step)
        self.bad_samples.check()

    def _compare_weights(self, step: int) -> None:
        if self.digest_every and self.world.size > 1 and step != self._compared_at:
            check_same_weights(self.world, named_tensors(self.modules), step)
            self._compared_at = step

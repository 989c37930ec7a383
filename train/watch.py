"""What is watched while a run trains: who is slow, which steps are not taken, whether all have the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import nn

from data.batch import Batch
from train.config import DistConfig
from train.distributed.digest import check_same_weights
from train.distributed.world import World, gather_objects
from train.pace import Pace
from train.runs.checkpoint import named_tensors
from train.step import TrainStep


class Note(Protocol):
    """Ledger.note"""

    def __call__(self, step: int, kind: str, **facts: int | float | None) -> None: ...


class Watch:
    """Stands between the loop and the parts of a run. Every rank has one and calls the same methods.

    warn: takes a line; note: takes an entry of the ledger; both of rank 0.
    """

    def __init__(
        self,
        step: TrainStep,
        modules: Mapping[str, nn.Module],
        config: DistConfig,
        world: World,
        warn: Callable[[str], None],
        note: Note,
    ) -> None:
        self._step, self._modules, self._world, self._note = step, modules, world, note
        self._digest_every, self._compared_at = config.digest_every, -1
        self._pace = Pace(step.alone, config.slow_rank, world, warn)

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return self._pace.timed(batches)

    def step(self, batch: Batch, index: int) -> Mapping[str, float]:
        try:
            scalars = self._step(batch, index)
        finally:
            if self._step.not_taken:
                self._note_not_taken(batch, index + 1)
        if self._digest_every and (index + 1) % self._digest_every == 0:
            self.compare(index + 1)
        return scalars

    def judge(self) -> Mapping[str, float]:
        """Warn of slow ranks; part of what is asked for when a step is logged, without scalars of its own."""
        self._pace.judge()
        return {}

    def compare(self, step: int) -> None:
        """Raises HardwareError unless all ranks have the same weights after `step` steps."""
        if self._digest_every and self._world.size > 1 and step != self._compared_at:
            check_same_weights(self._world, named_tensors(self._modules), step)
            self._compared_at = step

    def _note_not_taken(self, batch: Batch, step: int) -> None:
        own = (int(batch.sample_ids.min()), int(batch.sample_ids.max())) if len(batch) else None
        firsts, lasts = zip(*filter(None, gather_objects(own, self._world)), strict=True)
        numbers = {name: self._step.scalars[name] for name in ("loss", "grad_norm")}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._note(step, self._step.not_taken, first_id=min(firsts), last_id=max(lasts), **finite)

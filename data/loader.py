"""One rank's batches, step after step, made ahead by worker processes.

The order of samples is `Order`'s; workers only decide who decodes what. One iterator serves all steps of a run: at the
border of two epochs nothing is started anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from data.batch import Batch
from data.order import Order
from data.workers import served

Positions = Sequence[tuple[int, int]]  # (epoch, sample id) each


class BatchSource(Protocol):
    """place: how an error names the sample that is read, told without asking any storage."""

    def __getitems__(self, positions: Positions) -> Batch: ...
    def place(self, sample_id: int) -> str: ...


def build_loader(
    dataset: BatchSource,
    order: Order,
    *,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
    workers: int,
    timeout: float = 0,
) -> Iterable[Batch]:
    """The batches of steps first_step … last_step - 1, this rank's part of each. Iterate once.

    With CUDA they lie in pinned memory. Raises as `served`.
    """
    positions = _Positions(order, rank, world_size, first_step, last_step)
    return _Batches(_ByPositions(dataset), positions, workers, timeout)


@dataclass(frozen=True)
class _Positions:
    """Per step the positions (epoch, id) of one rank."""

    order: Order
    rank: int
    world_size: int
    first_step: int
    last_step: int

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first_step, self.last_step):
            epoch, ids = self.order.local(step, self.rank, self.world_size)
            yield [(epoch, sample_id) for sample_id in ids.tolist()]


@dataclass(frozen=True)
class _ByPositions:
    dataset: BatchSource

    def __getitem__(self, positions: Positions, /) -> Batch:
        return self.dataset.__getitems__(positions)

    def place(self, item: int) -> str:
        return self.dataset.place(item)


@dataclass(frozen=True)
class _Batches:
    source: _ByPositions
    positions: _Positions
    workers: int
    timeout: float

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Batch]:
        return served(
            self.source,
            self.positions,
            workers=self.workers,
            timeout=self.timeout,
            rank=self.positions.rank,
            pin=torch.cuda.is_available(),
        )

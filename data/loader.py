"""One rank's batches, step after step, made ahead by worker processes.

The order of samples is `Order`'s; workers only decide who decodes what. One iterator serves all steps of a run: at the
border of two epochs nothing is started anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.batch import Batch
from data.errors import UserError
from data.order import Order
from data.workers import obey_parent_alone, started


class BatchSource(Protocol):
    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch: ...


def build_loader(
    dataset: BatchSource, order: Order, *, rank: int, world_size: int, first_step: int, last_step: int, workers: int
) -> Iterable[Batch]:
    """The batches of steps first_step … last_step - 1, this rank's part of each. Iterate once.

    With CUDA they lie in pinned memory. A UserError of the dataset is raised here, without a worker's traceback.
    """
    if workers:  # the tokenizers library would say at every fork that it stops using threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader = DataLoader(
        _Outcomes(dataset),
        batch_sampler=_Positions(order, rank, world_size, first_step, last_step),
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=obey_parent_alone,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # otherwise the start of workers draws from the global generator
    )
    return _Batches(loader)


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
class _Outcome:
    """A batch, or the error that took its place. torch pins what has a method `pin_memory`."""

    value: Batch | UserError

    def pin_memory(self) -> _Outcome:
        return _Outcome(_pinned(self.value) if isinstance(self.value, Batch) else self.value)


class _Outcomes(Dataset[_Outcome]):
    """torch would turn an exception of a worker into text with a traceback; as a value it arrives as it was."""

    def __init__(self, dataset: BatchSource) -> None:
        self.dataset = dataset

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> _Outcome:
        try:
            return _Outcome(self.dataset.__getitems__(positions))
        except UserError as error:
            return _Outcome(error)


@dataclass(frozen=True)
class _Batches:
    loader: DataLoader[_Outcome]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for outcome in started(self.loader):
            if isinstance(outcome.value, UserError):
                raise outcome.value
            yield outcome.value


def _unchanged(outcome: Any) -> Any:
    return outcome


def _pinned(record: Any) -> Any:
    """A dataclass of tensors and such dataclasses, in pinned memory."""
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    pinned = {name: part.pin_memory() for name, part in parts.items() if isinstance(part, Tensor)}
    pinned |= {name: _pinned(part) for name, part in parts.items() if is_dataclass(part)}
    return replace(record, **pinned)

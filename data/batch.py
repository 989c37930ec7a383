"""Batch: all that the trainer knows of a task. After the dataset there is only x and y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Extra:
    """Further y-side items, flat: k ≥ 0 for the whole batch, any number per row.

    y (k, …) tower inputs; row (k,) local row each belongs to; keys (k,) content ids; positive (k,) bool: a further
    positive (else a hard negative).
    """

    y: Tensor
    row: Tensor
    keys: Tensor
    positive: Tensor


@dataclass
class Known:
    """y-side items that are known to be right for a row, whether or not they are in the batch: never its negatives.

    row (P,) local row; keys (P,) content ids; int64.
    """

    row: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Bad:
    """A sample that could not be used. place: the row of the batch that it would have been; by: the id tried next."""

    place: int
    id: int
    shard: str
    key: str
    reason: str
    by: int


@dataclass
class Batch:
    """One rank's part of a global batch.

    x, y (b, …) tower inputs: uint8 pictures (b, 3, H, W) or int64 tokens (b, L); sample_ids (b,) int64, dense ids that
    index per-sample state and nothing else; x_keys, y_keys (b,) int64 content ids: equal keys are the same item on any
    rank; bad: samples in whose place others stand.
    """

    x: Tensor
    y: Tensor
    sample_ids: Tensor
    x_keys: Tensor
    y_keys: Tensor
    extra: Extra | None = None
    known: Known | None = None
    bad: tuple[Bad, ...] = ()

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        return _changed(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return _changed(self, Tensor.pin_memory)


def _changed(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass of tensors and such dataclasses, with every tensor changed."""
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
    changed |= {name: _changed(part, change) for name, part in parts.items() if is_dataclass(part)}
    return replace(record, **changed)

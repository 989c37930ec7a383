"""Batch: all that the trainer knows of a task. After the dataset there is only x and y."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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
class Batch:
    """One rank's part of a global batch.

    x, y (b, …) tower inputs: uint8 pictures (b, 3, H, W) or int64 tokens (b, L); sample_ids (b,) int64, dense ids that
    index per-sample state and nothing else; x_keys, y_keys (b,) int64 content ids: equal keys are the same item on any
    rank.
    """

    x: Tensor
    y: Tensor
    sample_ids: Tensor
    x_keys: Tensor
    y_keys: Tensor
    extra: Extra | None = None

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        extra = None if self.extra is None else _moved(self.extra, device, non_blocking)
        return replace(_moved(replace(self, extra=None), device, non_blocking), extra=extra)


def _moved(record, device: torch.device, non_blocking: bool):
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(
        record,
        **{k: t.to(device, non_blocking=non_blocking) for k, t in tensors.items() if isinstance(t, Tensor)},
    )

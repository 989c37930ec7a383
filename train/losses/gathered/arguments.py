"""Checks and conversions of the arguments of an objective: integers, pairs, relevance, a teacher's scores."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from dyad.train.losses.sums.conditions import holds


@overload
def as_int64(name: str, values: Tensor, device: torch.device, *, pairs: bool = False) -> Tensor: ...
@overload
def as_int64(name: str, values: Tensor | None, device: torch.device, *, pairs: bool = False) -> Tensor | None: ...
def as_int64(name: str, values: Tensor | None, device: torch.device, *, pairs: bool = False) -> Tensor | None:
    """Convert `values` to an int64 tensor on `device`, of the shape (n,), or (P, 2) if `pairs`; None stays None.

    values: integers in a tensor, list or array; the empty list has none. name: what the message calls them. pairs:
    whether they are P pairs. Raises ValueError for another shape, and for floats, complex numbers and bools.
    """
    if values is None:
        return None
    if isinstance(values, list) and not values:  # torch would make floats of it
        values = torch.empty((0, 2) if pairs else 0, dtype=torch.int64)
    tensor, shape = torch.as_tensor(values, device=device), "(P, 2)" if pairs else "(n,)"
    fits = tensor.ndim == 1 + pairs and (not pairs or tensor.shape[1] == 2)
    if not fits or tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise ValueError(f"{name} must be int64 {shape}, not {dtype_name(tensor.dtype)} {tuple(tensor.shape)}")
    return tensor.long()


def as_relevance(name: str, values: Tensor | None, count: int, like: Tensor) -> Tensor | None:
    """Convert the relevance of `count` positive pairs to float32 or float64 (count,) without gradient; None stays None.

    values: the relevance of each pair, a weight in (0, 1]; a tensor, list or array. like: a tensor on the device of the
    result; if `like` is float64, so is the result. name: what the message calls the values. Raises ValueError for
    another shape and for a relevance outside (0, 1]; within collect_checks(speculative=True) of sums/conditions.py the
    range is assumed.
    """
    if values is None:
        return None
    weights = torch.as_tensor(values, device=like.device).detach()
    if weights.shape != (count,):
        raise ValueError(f"{name} must be ({count},), one for each positive pair, not {tuple(weights.shape)}")
    weights = weights.to(torch.promote_types(like.dtype, torch.float32))
    inside = (weights > 0) & (weights <= 1)
    if not holds(inside.all()):
        raise ValueError(f"{name} must be above 0 and at most 1, not {float(weights[~inside][0]):g}")
    return weights


def as_teacher(name: str, values: Tensor, count: int, like: Tensor) -> Tensor:
    """Convert the scores that a teacher gave `count` pairs to float32 or float64 (count,) without gradient.

    values: a tensor, list or array. name, like: as in `as_relevance`. Raises ValueError for another shape and for
    scores that are not finite; within collect_checks(speculative=True) of sums/conditions.py they are assumed to be.
    """
    scores = torch.as_tensor(values, device=like.device).detach()
    if scores.shape != (count,):
        raise ValueError(f"{name} must be ({count},), one score for each pair, not {tuple(scores.shape)}")
    scores = scores.to(torch.promote_types(like.dtype, torch.float32))
    if not holds(scores.isfinite().all()):
        raise ValueError(f"{name} must be finite scores, not {float(scores[~scores.isfinite()][0]):g}")
    return scores


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

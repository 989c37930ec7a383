"""An independent reading of the core term: anchor by anchor, positive by positive, on dense float64 scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def same_item(keys: Sequence[Tensor], i: int, j: int) -> bool:
    return i == j or any(key[i].item() == key[j].item() for key in keys)


def reference_direction(
    scores: Tensor, tau: Tensor, keys: Sequence[Tensor], *, candidates: str, partition: str, duplicates: str
) -> Tensor:
    """mean_i mean_{p∈P_i} τ [LSE_{j∈C_i}((s_ij − s_ip)/τ) − c_i], anchors without candidates skipped."""
    values = []
    for i in range(len(scores)):
        others = [j for j in range(len(scores)) if j != i and same_item(keys, i, j)]
        positives = [i, *others] if duplicates == "positive" else [i]
        left_out = {
            ("all", "keep"): [],
            ("all", "mask"): others,
            ("all", "positive"): [],
            ("negatives", "keep"): [i],
            ("negatives", "mask"): [i, *others],
            ("negatives", "positive"): positives,
        }[candidates, duplicates]
        chosen = [j for j in range(len(scores)) if j not in left_out]
        if not chosen:
            continue
        c = torch.tensor(float(len(chosen))).double().log() if partition == "mean" else 0.0
        terms = [tau * (torch.logsumexp((scores[i, chosen] - scores[i, p]) / tau, 0) - c) for p in positives]
        values.append(torch.stack(terms).mean())
    return torch.stack(values).mean() if values else 0.0 * scores.sum()


def reference_loss(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    keys: Sequence[Tensor] = (),
    *,
    similarity: str = "cosine",
    candidates: str = "all",
    partition: str = "sum",
    tau_scaled: bool = False,
    directions: str = "mean",
    duplicates: str = "keep",
) -> Tensor:
    if similarity == "cosine":
        x, y = (F.normalize(e, dim=1) for e in (x, y))
    scores, tau = x @ y.T, torch.exp(-logit_scale)
    core = dict(candidates=candidates, partition=partition, duplicates=duplicates)
    keys = () if duplicates == "keep" else keys
    row, column = (reference_direction(s, tau, keys, **core) for s in (scores, scores.T))
    combine: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: row + column,
        "mean": lambda: 0.5 * row + 0.5 * column,
        "x": lambda: row,
        "y": lambda: column,
    }
    return combine[directions]() * (1.0 if tau_scaled else 1 / tau)


def used_path(log_sums: Tensor) -> str:
    """Which way an output of log_partition was summed."""
    return "general" if cast(Any, log_sums.grad_fn).shift is None else "bounded"


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out

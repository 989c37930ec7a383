"""Counting what collectives send, in jobs of torchrun."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor


def counted(name: str, collective: Callable[..., Any], sent: Counter[str]) -> Callable[..., Any]:
    """Wrap a collective of torch.distributed: each call adds the bytes of its largest tensor to sent[name]."""

    def counting(*tensors: Any, **more: Any) -> Any:
        sent[name] += max(t.nbytes for t in tensors if isinstance(t, Tensor))
        return collective(*tensors, **more)

    return counting

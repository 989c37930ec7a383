"""Counts where a computation on a GPU would make the host wait, on plain CPU tensors: no GPU is needed.

A read brings a value to the host (item, tolist, bool, float), or needs one to know the shape of a result (nonzero,
unique, an index by a bool tensor, repeat_interleave). A copy moves numbers between host and device and waits for it
(torch.tensor with a device, new_tensor, cpu, numpy). The collectives of torch.distributed are counted too; DDP's
buckets are not among them. torch.optim keeps its step counts on the host where the weights are on a CPU only, and
train/step/exchange_sizes.py handles tensors of the host alone: both are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = str(Path(__file__).parents[2])
OF_THE_HOST = ("train/step/exchange_sizes.py", "torch/optim/", "torch/testing/")
aten = torch.ops.aten
READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    *(aten.repeat_interleave.Tensor, aten.bincount.default),
}
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather_object")


@dataclass
class HostReads:
    """What was counted: place in the code ("file:line what") → how often."""

    reads: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)


def _place(what: str) -> str | None:
    """The innermost line of this project that is being executed; None in code that is left out."""
    frame, place = sys._getframe(2), None
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in OF_THE_HOST):
            return None
        if place is None and name.startswith(ROOT) and "/.venv/" not in name and name != __file__:
            place = f"{name.removeprefix(ROOT + '/')}:{frame.f_lineno} {what}"
        frame = frame.f_back
    return place


def _count(counter: Counter[str], what: str) -> None:
    if place := _place(what):
        counter[place] += 1


class _Dispatched(TorchDispatchMode):
    def __init__(self, found: HostReads) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not (func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size")):
            _count(self._found.reads, str(func))
        elif func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            by_bool = any(i is not None and i.dtype is torch.bool for i in args[1])
            one_value = func is not aten.index.Tensor and args[2].numel() == 1  # a masked fill
            if by_bool and not one_value:
                _count(self._found.reads, "bool index")
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    """What no dispatcher sees: tolist, numpy, and copies that a CPU tensor does not need."""

    def __init__(self, found: HostReads) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist:
            _count(self._found.reads, "tolist")
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        placed = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
        if (placed and not isinstance(args[0], Tensor)) or func in (Tensor.new_tensor, Tensor.cpu, Tensor.numpy):
            _count(self._found.copies, getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


@contextmanager
def counted_host_reads() -> Iterator[HostReads]:
    """Count the reads, copies and collectives of the block."""
    found = HostReads()

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def count(*tensors: Any, **more: Any) -> Any:
            _count_collective(name)
            return collective(*tensors, **more)

        def _count_collective(name: str) -> None:
            frame = sys._getframe(2)
            place = frame.f_code.co_filename.removeprefix(ROOT + "/")
            found.collectives[f"{place}:{frame.f_lineno} {name}"] += 1

        return count

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        stack.enter_context(_Dispatched(found))
        stack.enter_context(_Called(found))
        yield found

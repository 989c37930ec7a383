"""Count what operations allocate, multiply and send, and simulate a process group of which only rank 0 exists."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dyad.data.base.errors import ConfigError
from dyad.train.losses.sums.all_gather import Layout

# Operator of torch → kind of collective. The functional collectives, which DTensor uses, have no trailing underscore.
COLLECTIVES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
COLLECTIVES |= {"all_reduce": "all-reduce"}


class Measured(TorchDispatchMode):
    """A context manager that counts the memory, FLOPs and traffic of the operations in its block.

    existing: tensors that exist before the block and do not count when an operation returns them. Tensors may be real
    or fake; views and shared storages count once.

    Attributes, which may be read and set in the block and after it: live: bytes of the tensors that operations of the
    block made and that still exist. peak: the most such bytes at one time. flops: FLOPs of all matrix products,
    convolutions and attentions. sent: kind of collective (a value of COLLECTIVES, else the name of torch's operator) →
    bytes, the sum over its calls of the size of the call's largest tensor.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.peak, self.flops, self.sent = 0, 0, 0, Counter[str]()
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(of, DTensor) for of in types):
            return NotImplemented  # DTensor then calls the operation on this rank's local tensors, which is counted
        name, kwargs = str(func.overloadpacket.__name__), kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d" or name in COLLECTIVES:
            sizes = (leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.sent[COLLECTIVES.get(name, name)] += max(sizes, default=0)
        if count := flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None)):
            self.flops += count(*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, number: int, size: int) -> None:
        """Stop counting a storage of `size` bytes that no longer exists. number: its address."""
        self._known.discard(number)
        self.live -= size


def join_uniform_ranks(world_size: int, device: torch.device | None = None) -> None:
    """Join a process group of which only rank 0 exists; collectives assume that all ranks hold the data of rank 0.

    It becomes the default group of torch.distributed; this process must not be in one already, and the caller leaves it
    by dist.destroy_process_group(). device: the device to bind the group to, as is done for GPUs; subgroups are then
    split from this group, and simulated in the same way. Raises ConfigError with torch before 2.15.
    """
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    options: Any = FakeProcessGroup.Options
    if not hasattr(options, "simulate_uniform_ranks"):
        raise ConfigError(f"a plan needs torch 2.15 or newer, and this is {torch.__version__}")
    options = options()
    options.simulate_uniform_ranks = True
    group: dict[str, Any] = {"store": FakeStore(), "rank": 0, "world_size": world_size, "pg_options": options}
    dist.init_process_group("fake", device_id=device, **group)


@contextmanager
def only_rank_0(world_size: int) -> Iterator[None]:
    """Context manager: be rank 0 of a simulated group in which each rank has its own sample ids and content keys.

    The group is that of `join_uniform_ranks`: all ranks hold the tensors of rank 0. But to each int64 tensor of another
    rank that Layout.gathered returns, the number of rows of the ranks before it is added, so that ids and keys 0, 1, …
    of rank 0 go on on the other ranks. With world_size=1 it does nothing.
    """
    if world_size == 1:
        yield
        return
    gathered = Layout.gathered

    def with_own_numbers(layout: Layout, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return what Layout.gathered does, with the first row number of each rank added to int64 tensors."""
        sizes = torch.tensor(layout.sizes)
        start_B = (sizes.cumsum(0) - sizes).repeat_interleave(sizes).to(parts[0].device, non_blocking=True)
        return tuple(e + start_B if e.dtype == torch.int64 else e for e in gathered(layout, *parts))

    join_uniform_ranks(world_size)
    try:
        with patch.object(Layout, "gathered", with_own_numbers):
            yield
    finally:
        dist.destroy_process_group()

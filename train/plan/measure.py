"""Counts what operations allocate, multiply and send; and a process group of which only one rank is real."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dyad.train.losses.sums.all_gather import Layout

COLLECTIVES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}


class Measured(TorchDispatchMode):
    """Counts the bytes of tensors that operations make in the block: `live` now, `peak` the most at one time.

    existing: tensors of before, which do not count. flops: of all products and convolutions. sent: bytes of the largest
    tensor of each collective, by its name. Tensors may be real, or without values.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.peak, self.flops, self.sent = 0, 0, 0, Counter[str]()
        self._before = [tensor.untyped_storage() for tensor in existing]  # alive, so that no other has their number
        self._known = {storage._cdata for storage in self._before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func.overloadpacket.__name__), kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.sent[COLLECTIVES.get(name, name)] += max((tensor.nbytes for tensor in tensors), default=0)
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
        self._known.discard(number)
        self.live -= size


@contextmanager
def only_rank_0(world_size: int, ids_B: Tensor) -> Iterator[None]:
    """Join a process group of which only rank 0 is real: collectives take all ranks to hold what this one holds.

    ids_B: the sample ids of all ranks, those of rank 0 first. Content keys of the others are made to differ, too.
    """
    if world_size == 1:
        yield
        return
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gathered = Layout.gathered

    def with_own_ids(layout: Layout, *parts: Tensor) -> tuple[Tensor, ...]:
        shift_B = len(ids_B) * torch.arange(world_size).repeat_interleave(torch.tensor(layout.sizes))
        every = list(gathered(layout, *parts))
        for place, own in enumerate(parts):
            if own.dtype == torch.int64:
                every[place] = ids_B if torch.equal(own, ids_B[: len(own)]) else every[place] + shift_B
        return tuple(every)

    options = FakeProcessGroup.Options()
    options.simulate_uniform_ranks = True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size, pg_options=options)
    try:
        with patch.object(Layout, "gathered", with_own_ids):
            yield
    finally:
        dist.destroy_process_group()

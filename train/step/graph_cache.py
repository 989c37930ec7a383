"""Cache of the autograd graphs of chunks between the two passes of a step, as far as free memory allows.

A step embeds its batch chunk by chunk twice (see loss_term.py). A chunk whose graph is cached needs no second forward.
Caching changes no result, so ranks and steps may cache different numbers of graphs; but not ranks with sharded towers,
whose forward passes communicate.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyad.train.step.chunks import TensorPair

SPARE = 0.1  # share of the whole memory that stays free: for the objective, and for gaps between allocated blocks
TRAINING_COPIES = 3  # gradients and the two moments of AdamW, each as large as the trained weights


class GraphCache:
    """A stack of the embeddings of one step's chunks, with their autograd graphs. len() is the number of cached chunks.

    A full cache drops its oldest entries, but never the newest. most: how many chunks to keep; None: as many as fit
    into the memory that `budget` has for graphs when this object is made.
    """

    def __init__(self, most: int | None, budget: MemoryBudget) -> None:
        self._most, self._budget = most, budget
        self._free = budget.for_graphs() if most is None else math.inf
        self._cached: deque[TensorPair] = deque()
        self._sizes: list[int] = []  # bytes of the graphs of this step: texts of other lengths make other graphs

    def __len__(self) -> int:
        return len(self._cached)

    def add(self, embed: Callable[[], TensorPair], inputs: Sequence[Tensor]) -> TensorPair:
        """Call `embed`, which embeds one chunk; cache the embeddings with their autograd graph, and return them.

        If there is no room for one more graph, the oldest ones are dropped first. inputs: the tensors that `embed`
        reads, which do not count as memory of the graph.
        """
        while self._cached and len(self._cached) >= self._capacity():
            self._cached.popleft()
        if self._most is None:
            embeddings, size = self._budget.measured(embed, inputs)
            self._sizes.append(size)
        else:
            embeddings = embed()
        self._cached.append(embeddings)
        return embeddings

    def pop(self) -> TensorPair:
        """Remove the embeddings of the newest cached chunk, with their autograd graph, and return them.

        Raises IndexError if the cache is empty.
        """
        return self._cached.pop()

    def _capacity(self) -> int:
        """Return how many autograd graphs may be cached: the configured number, else as many as fit into memory.

        In the second case one graph less is allowed, to leave room for the gradients that backward makes. Every graph
        is taken to be as large as the largest one after the first. The first may be larger, as it also holds the casts
        of the weights for autocast, which all graphs share; this excess counts once.
        """
        if self._most is not None:
            return self._most
        largest = max(1, *(self._sizes[1:] or self._sizes))
        return int((self._free - max(self._sizes[0] - largest, 0)) // largest) - 1


class MemoryBudget:
    """Measures how many bytes the autograd graphs of `towers` may take on a device, and how many one graph takes.

    optimizer: the optimiser of the towers. Memory for its moments is kept free until they are allocated; if it is None,
    the memory is always kept free.
    """

    def __init__(self, towers: nn.Module, device: torch.device, optimizer: Optimizer | None = None) -> None:
        self._towers, self._device, self._on_gpu = towers, device, device.type == "cuda"
        self._optimizer = optimizer
        # Read once on a CPU: a process keeps much of what it frees, so a later reading would be too low
        self._cpu_memory = None if self._on_gpu else cpu_memory()

    def for_graphs(self) -> float:
        """Return how many bytes of device memory autograd graphs may take; negative if there is too little.

        The result is the free memory, minus the size of the gradients and AdamW's two moments of all trained weights,
        minus a reserve (the fraction SPARE of the total memory). On a GPU, optimiser state that is allocated already is
        not subtracted again. On a CPU, the free memory is that at the construction of this object.
        """
        free, total = self._cpu_memory or gpu_memory(self._device)
        state = TRAINING_COPIES * sum(p.nbytes for p in self._towers.parameters() if p.requires_grad)
        if self._on_gpu and self._optimizer:  # on a CPU `free` was read before anything was allocated
            slots = self._optimizer.state.values()  # a resume replaces the dictionary
            state -= sum(value.nbytes for slot in slots for value in slot.values() if isinstance(value, Tensor))
        return free - max(state, 0) - SPARE * total

    def measured(self, embed: Callable[[], TensorPair], inputs: Sequence[Tensor]) -> tuple[TensorPair, int]:
        """Call embed(); return (its result, the bytes of the autograd graph that the call builds).

        The bytes of `inputs` and of the weights do not count. On a GPU the bytes are the growth of allocated memory; on
        a CPU, the sizes of the tensors saved for backward.
        """
        if self._on_gpu:
            before = torch.cuda.memory_allocated(self._device)
            return embed(), torch.cuda.memory_allocated(self._device) - before
        # torch does not count CPU memory: the size is that of the tensors that the graph saves for backward
        existing = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *self._towers.parameters())}
        saved: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in existing:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a graph that held its own outputs would be a cycle, never freed

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            return embed(), sum(saved.values())


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of a GPU. Blocks that torch's allocator has cached and does not use count as free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def cpu_memory() -> tuple[int, int]:
    """Return (free, total) bytes of RAM for this process: the machine's, divided by the job's processes on it.

    Free memory is also limited by the control groups (see cgroup_headroom).
    """
    machine, processes = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(min(machine.available, cgroup_headroom())) // processes, machine.total // processes


def cgroup_headroom(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many more bytes this process's control groups allow (Linux cgroups, version 2); inf without a limit.

    Inactive file cache counts as free. process: the file that names this process's group; groups: the mount point of
    the cgroup file system.
    """
    if not process.exists():
        return math.inf
    own = groups / process.read_text().rpartition("0::/")[2].strip()
    headroom = math.inf
    for group in (own, *own.parents):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit = int((group / "memory.max").read_text())
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
            headroom = min(headroom, limit - int((group / "memory.current").read_text()) + int(cache))
    return headroom

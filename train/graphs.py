"""Chunks that keep their graphs until backward: as many of the newest as memory has room for.

A kept graph saves its chunk the second forward and changes no number, so that steps and ranks may keep different many.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import Tensor, nn

from train.chunks import Pair

SPARE = 0.1  # of the whole memory: for the objective, and for gaps between blocks
ALL = 1 << 62
STATE = 3  # times the trained weights: their gradients and the two moments of AdamW

Weighing = Callable[[Sequence[Tensor]], AbstractContextManager[Callable[[], int]]]


class Graphs:
    """Embeddings of the newest chunks with their graphs: `most` of them, and no more than fit into `budget` bytes.

    weighing: a context to build a graph in; what it yields says what that weighs beside the tensors it was given.
    """

    def __init__(self, most: int, budget: float, weighing: Weighing) -> None:
        self._most, self._budget, self._weighing = most, budget, weighing
        self._kept: deque[tuple[Pair, int]] = deque()
        self._heaviest = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, embed: Callable[[], Pair], inputs: Sequence[Tensor]) -> Pair:
        """Embeddings of one more chunk; the oldest graphs are dropped before there is no room for it."""
        while self._kept and self._is_full():
            self._kept.popleft()
        with self._weighing(inputs) as weight:
            embeddings = embed()
        self._kept.append((embeddings, graph := weight()))
        self._heaviest = max(self._heaviest, graph)
        return embeddings

    def pop(self) -> Pair:
        """The newest."""
        return self._kept.pop()[0]

    def _is_full(self) -> bool:
        """No room for one more, and for what backward passes down a graph, which is less than the graph."""
        weight = sum(weight for _, weight in self._kept) + 2 * self._heaviest
        return len(self._kept) >= self._most or weight > self._budget


class Room:
    """Room for graphs on one device. wanted: how many to keep, None for all that fit beside the weights of `towers`."""

    def __init__(self, wanted: int | None, towers: nn.Module, device: torch.device) -> None:
        self._wanted, self._towers = wanted, towers
        self._device = DEVICES[device.type](device)

    def graphs(self) -> Graphs:
        """A step's, none yet."""
        if self._wanted is not None:
            return Graphs(self._wanted, math.inf, _unweighed)
        parameters, memory = list(self._towers.parameters()), self._device.memory
        state = STATE * sum(p.nbytes for p in parameters if p.requires_grad)
        budget = memory.free - state - SPARE * memory.total
        return Graphs(ALL, budget, lambda inputs: self._device.weighing([*inputs, *parameters]))


@contextmanager
def _unweighed(there: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
    yield lambda: 0


@dataclass(frozen=True)
class Memory:
    """Bytes this process may still take, and bytes there are for it at all."""

    free: int
    total: int


class Device(Protocol):
    @property
    def memory(self) -> Memory: ...

    def weighing(self, there: Sequence[Tensor]) -> AbstractContextManager[Callable[[], int]]: ...


class Gpu:
    """By torch's account of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return Memory(free + cached, total)

    @contextmanager
    def weighing(self, there: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
        before = torch.cuda.memory_allocated(self._device)
        yield lambda: torch.cuda.memory_allocated(self._device) - before


class Cpu:
    """Without such an account: by what the system says, and by what a graph saves for backward.

    memory: this process's share, asked for once, as a process keeps much of what it frees, which then looks taken.
    """

    def __init__(self, device: torch.device) -> None:
        machine, processes = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = min(machine.available, control_groups_leave())
        self.memory = Memory(int(free) // processes, machine.total // processes)

    @contextmanager
    def weighing(self, there: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
        known = {tensor.untyped_storage().data_ptr() for tensor in there}
        saved: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a graph that held its own outputs would never be freed

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield lambda: sum(saved.values())


DEVICES: dict[str, Callable[[torch.device], Device]] = {"cpu": Cpu, "cuda": Gpu}


def control_groups_leave(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that the control groups of this process leave it (Linux, version 2): inf where there is no limit."""
    if not process.exists():
        return math.inf
    own = groups / process.read_text().rpartition("0::/")[2].strip()
    left = math.inf
    for group in (own, *own.parents):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit = int((group / "memory.max").read_text())
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
            left = min(left, limit - int((group / "memory.current").read_text()) + int(cache))
    return left

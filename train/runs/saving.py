"""Checkpoints written behind the training: a step waits for a copy in host memory, a thread takes it to the disk.

At most one is on its way: the next save waits for it, and so do the end of the run and a stop, which save without a
copy and return when the disk has it. A checkpoint that cannot be written in the middle of a run costs a line and is
tried again when the next one is due; at the end or at a stop it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from time import perf_counter

import torch
from torch import Tensor

from data.errors import HardwareError
from train.runs import checkpoint
from train.runs.checkpoint import CheckpointState

# No process forks while the thread writes: its loader workers would inherit locks that nobody opens any more
_WRITING = Lock()
os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


class Saves:
    """The checkpoints of a run, on rank 0. When the block ends, what is on its way has arrived.

    first: what must be on the disk before a checkpoint is. next_save: step → when the next one is due. say: hears what
    could not be written. seconds: spent writing so far, behind the training or not.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        *,
        first: Callable[[], None],
        next_save: Callable[[int], int],
        say: Callable[[str], None],
    ) -> None:
        self._run_dir, self._keep, self._first, self._next_save, self._say = run_dir, keep, first, next_save, say
        self._model, self._optimizer = HostCopies(), HostCopies()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._on_its_way: Future[None] | None = None
        self.seconds = 0.0

    def wait(self) -> None:
        """Until nothing is on its way."""
        if self._on_its_way is not None:
            self._on_its_way.result()
            self._on_its_way = None

    def behind(self, state: CheckpointState) -> None:
        """Write what is captured as it is now; returns when it is copied. Call `wait` first: its memory is not."""
        assert self._on_its_way is None
        copied = replace(state, model=self._model(state.model), optimizer=self._optimizer(state.optimizer))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._on_its_way = self._thread.submit(self._try, copied)

    def now(self, state: CheckpointState) -> None:
        """Write what is captured; returns when the disk has it. Raises HardwareError when it cannot be written."""
        start = perf_counter()
        with _WRITING:
            checkpoint.save(self._run_dir, state, self._keep, self._first)
        self.seconds += perf_counter() - start

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def _try(self, state: CheckpointState) -> None:
        try:
            self.now(state)
        except HardwareError as error:
            self._say(f"{error}. The run goes on; the next is due at step {self._next_save(state.step)}")


class HostCopies:
    """Tensors by name, copied to the same host memory each time; from a GPU while it goes on: synchronise after it."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[name] = copy
            copy.copy_(tensor.detach(), non_blocking=True)
        return {name: self._copies[name] for name in tensors}

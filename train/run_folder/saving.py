"""Checkpoints written in the background: training waits for a copy to host memory, then a thread writes it to the disk.

Loader processes may be forked meanwhile: a fork has Python's global lock, so the writing thread then either waits for
the disk or a digest, which hold no lock, or holds locks of its own files and pools, which a loader never takes.

At most one checkpoint is being written; the next save waits for it. At the end of the run, and at a stop request,
`save` writes without a copy and returns when the checkpoint is on the disk. If a checkpoint cannot be written, a
background save prints one line and the run goes on to the next one; `save` raises.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import HardwareError
from dyad.data.base.files import free_bytes
from dyad.train.run_folder import checkpoint
from dyad.train.run_folder.checkpoint import CheckpointState
from dyad.train.run_folder.named_tensors import named_tensors
from dyad.train.step_plan import Plan


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of a run, on rank 0.

    Leaving its `with` block waits for a checkpoint that is still being written.

    keep: how many checkpoints stay on the disk. before_save: called before each checkpoint is written, to flush the
    logs. plan: says when the next checkpoint is due, for the error message. Attribute seconds: time spent writing
    so far, in the background or not.
    """

    def __init__(
        self, run_dir: Path, keep: int, before_save: Callable[[], None], plan: Plan, log: Callable[[str], None]
    ) -> None:
        self._run_dir, self._keep, self._before_save, self._plan, self._log = run_dir, keep, before_save, plan, log
        # copies in host memory, by field of CheckpointState
        self._copies: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}, "target": {}}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[None] | None = None
        self.seconds = 0.0

    def wait(self) -> None:
        """Wait until the checkpoint that the background thread is writing, if there is one, is finished."""
        if self._in_flight is not None:
            self._in_flight.result()
            self._in_flight = None

    def save_in_background(self, state: CheckpointState) -> None:
        """Copy weights and optimiser of `state` to host memory, let a thread write the checkpoint, and return at once.

        Call `wait` first. state.memory (per-sample state) is not copied: do not change it before the next `wait`.
        """
        assert self._in_flight is None
        copied = {part: host_copies(getattr(state, part), memory) for part, memory in self._copies.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous, and the next step changes the weights
        self._in_flight = self._thread.submit(self._try, replace(state, **copied))

    def save(self, state: CheckpointState) -> None:
        """Write the checkpoint `state` and return when it is on the disk. Raises HardwareError if that fails."""
        start = perf_counter()
        checkpoint.save(self._run_dir, state, self._keep, self._before_save)
        seconds = perf_counter() - start
        self.seconds += seconds
        if seconds > float(os.environ.get("DYAD_LEAD_SECONDS", "inf")):  # set by launch/slurm.sbatch
            advice = f"SBATCH_SIGNAL=B:USR1@{2 * seconds:.0f} sbatch …"
            self._log(f"this checkpoint took {seconds:.0f} s, longer than SLURM waits after its signal: {advice}")

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def _try(self, state: CheckpointState) -> None:
        """Write the checkpoint `state` (called in the background thread); print an error instead of raising it."""
        try:
            self.save(state)
        except HardwareError as error:
            self._log(f"{error}. The run goes on; the next is due at step {self._plan.next_save(state.step)}")


def refuse_full_disk(run_dir: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Raise HardwareError if the disk of a run folder has no room for the first checkpoint.

    Counted are the weights, and the two moments that AdamW is going to have of each trained one.
    """
    weights = named_tensors(modules).values()
    trained = [p for group in optimizer.param_groups for p in group["params"]] if isinstance(optimizer, AdamW) else []
    needed = sum(t.numel() * t.element_size() for t in (*weights, *trained, *trained))
    if (free := free_bytes(run_dir)) < needed:
        raise HardwareError(
            f"{run_dir}: no room for a checkpoint: it needs {needed:,} bytes, {free:,} are free. Make room, or set "
            "run.dir to another disk"
        )


def host_copies(tensors: Mapping[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory and return the copies by name.

    memory: buffers of an earlier call by name; they are reused where shape and dtype are equal, and new ones are added.
    Copies from a GPU are asynchronous: synchronise before you read them.
    """
    for name, tensor in tensors.items():
        copy = memory.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            memory[name] = copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=True)
    return {name: memory[name] for name in tensors}

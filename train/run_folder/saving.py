"""Write checkpoints, in the background while training goes on, and delete old ones.

In the background means: training waits for a copy to host memory, then a thread writes the copy to the disk.

Loader processes may be forked meanwhile. fork() happens while the main thread holds Python's global lock. The writing
thread then waits for the disk or a digest, without a lock, or holds locks of its own files and pools, which a loader
never takes.

At most one checkpoint is being written; the next save waits for it. At the end of the run, and at a stop request,
`save` writes without a copy and returns when the checkpoint is on the disk. If a checkpoint cannot be written, a
background save prints one line and the run goes on to the next one; `save` raises. On a full disk, older checkpoints
are deleted first (`make_room`).
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import free_bytes, remove, sync, whole_folder, write_json
from dyad.data.shards.storage import sha256_of
from dyad.train.run_folder.checkpoint import OLDEST, Checkpoint, find_undamaged
from dyad.train.run_folder.checkpoint_parts import collect, give_up, parts_folder
from dyad.train.run_folder.checkpoint_state import BEST, MANIFEST, SCALARS, STATE, CheckpointState
from dyad.train.run_folder.folder import folder_of, steps
from dyad.train.run_folder.named_tensors import named_tensors
from dyad.train.run_folder.tensor_files import save_tensors
from dyad.train.run_schedule import RunSchedule

FULL = (errno.ENOSPC, errno.EDQUOT)  # of the disk, of the user's quota


class DiskFullError(HardwareError):
    """The disk, or a quota on it, has no room for a checkpoint."""


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of a run, on rank 0 and, with sharded towers, on every rank that writes a part of them.

    Leaving its `with` block waits for a checkpoint that is still being written.

    folder: the run folder. keep, keep_every: which older checkpoints stay, as in `write_checkpoint`. before_save:
    called on rank 0 before each checkpoint is written, to flush the logs. schedule: says at which step the next
    checkpoint is due. log: prints a line. If a checkpoint cannot be written in the background, `log` gets the error and
    the step at which the next one is due, and the run goes on. after_save: called on each rank that writes, with the
    step of a checkpoint when it is written; it may raise HardwareError. Attribute seconds: time that writing took so
    far, in the background or not, without failures.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        before_save: Callable[[], None],
        schedule: RunSchedule,
        log: Callable[[str], None],
        keep_every: int | None = None,
        after_save: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._run_dir, self._before_save, self._after_save = folder, before_save, after_save
        self._keep, self._keep_every = keep, keep_every
        self._schedule, self._log = schedule, log
        # copies in host memory, by field of CheckpointState
        self._copies: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}, "target": {}}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[None] | None = None
        self.seconds = 0.0

    def wait(self) -> None:
        """Wait until the background thread has written its checkpoint, or has logged that it cannot."""
        if self._in_flight is not None:
            self._in_flight.result()
            self._in_flight = None

    def save_in_background(self, state: CheckpointState) -> None:
        """Copy the tensors in `state`, except sample_state, to host memory, and let a thread write the checkpoint.

        Call `wait` first. As state.sample_state (per-sample state) is not copied, do not change it before the next
        `wait`. Old checkpoints are deleted as by `write_checkpoint`. An error of writing is given to `log`, not raised.
        """
        assert self._in_flight is None
        copied = {name: host_copies(getattr(state, name), buffers) for name, buffers in self._copies.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous, and the next step changes the weights
        self._in_flight = self._thread.submit(self._try, replace(state, **copied))

    def save(self, state: CheckpointState) -> None:
        """Write the checkpoint `state`, delete old ones (see `write_checkpoint`), and return when it is on the disk.

        Call `wait` first. On ranks other than 0 it returns when this rank's part is on the disk. If the disk is full,
        `make_room` deletes older checkpoints, `log` gets a line, and the checkpoint is written once more; one in parts
        is not, as the other ranks have gone on, but the next one has the room. Raises HardwareError if writing fails.
        """

        def write() -> None:
            write_checkpoint(self._run_dir, state, self._keep, self._before_save, keep_every=self._keep_every)

        start = perf_counter()
        try:
            write()
        except DiskFullError:
            number, *_ = state.part or (0,)
            if number or not (deleted := make_room(self._run_dir, state, self._keep_every)):
                raise
            self._log(
                f"no room for the checkpoint of step {state.step}: deleted those of steps "
                f"{', '.join(map(str, reversed(deleted)))}. checkpoint.keep=1 needs the least space"
            )
            if state.part:
                raise
            write()
        self._after_save(state.step)
        seconds = perf_counter() - start
        self.seconds += seconds
        if seconds > float(os.environ.get("DYAD_LEAD_SECONDS", "inf")):  # set by launch/slurm.sbatch
            advice = f"SBATCH_SIGNAL=B:USR1@{2 * seconds:.0f} sbatch …"
            self._log(f"this checkpoint took {seconds:.0f} s, longer than SLURM waits after its signal: {advice}")

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def _try(self, state: CheckpointState) -> None:
        """Write the checkpoint `state` (called in the background thread); log a HardwareError instead of raising it."""
        try:
            self.save(state)
        except HardwareError as error:
            self._log(f"{error}. The run goes on; the next is due at step {self._schedule.next_save(state.step)}")


def refuse_full_disk(
    run_dir: Path,
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    is_averaged: bool,
    target: Iterable[Tensor],
    sample_bytes: int,
    keep: int,
) -> list[str]:
    """Raise HardwareError if the disk of a run folder has no room for one more checkpoint.

    Returns a list with a line for the log if there is no room for the `keep` checkpoints of the run and one more, else
    an empty list. The checkpoints that the run has are counted as if all had this size.
    A checkpoint has the weights, of each trained weight a moving average (if is_averaged) and AdamW's two moments, the
    weights of the target network, and sample_bytes of per-sample state. The state of another optimiser is not counted,
    as it is made in the first step. modules: prefix of weight names → module.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    copies = 2 * isinstance(optimizer, AdamW) + is_averaged
    tensors = (*named_tensors(modules).values(), *trained * copies, *target)
    needed = sample_bytes + sum(t.numel() * t.element_size() for t in tensors)
    if (free := free_bytes(run_dir)) < needed:
        raise HardwareError(
            f"{run_dir}: no room for a checkpoint: it needs {needed:,} bytes, {free:,} are free. Make room, or set "
            "run.dir to another disk"
        )
    room = free // needed + min(keep, len(steps(run_dir)))
    if room > keep:
        return []
    return [
        f"{run_dir}: room for {room} checkpoints of {needed:,} bytes, checkpoint.keep={keep} needs it for {keep + 1}: "
        f"on a full disk only the newest stays. Make room, or set checkpoint.keep={max(1, room - 1)}"
    ]


def host_copies(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory and return the copies by name.

    buffers: name → CPU tensor of an earlier call, which is overwritten if shape and dtype are equal; new ones are
    added, in pinned memory for tensors on a GPU. Copies from a GPU are asynchronous: synchronise before you read them.
    """
    for name, tensor in tensors.items():
        copy = buffers.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            buffers[name] = copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=True)
    return {name: buffers[name] for name in tensors}


def write_checkpoint(
    run_dir: Path,
    state: CheckpointState,
    keep: int,
    before_save: Callable[[], None] = lambda: None,
    wait: float = 600.0,
    keep_every: int | None = None,
) -> Path:
    """Write the checkpoint `state` into the run folder, delete old checkpoints, and return the checkpoint's folder.

    Call it on rank 0 and, with sharded towers, on every rank that has a part (state.part). Rank 0 waits up to `wait`
    seconds for the parts of the other ranks, moves them into the checkpoint and writes the manifest. The other ranks
    return when their part is written; the checkpoint is not complete by then.

    The newest `keep` checkpoints up to this step stay, those of multiples of `keep_every` steps (None: no others), and
    the one that the entry "best" of `state.metadata` names; the others up to this step are deleted, by rank 0.
    before_save: called first on rank 0, to flush the logs, so that the logs on the disk never end before the step of a
    checkpoint. Raises HardwareError when logs or checkpoint cannot be written, as a DiskFullError on a full disk; older
    checkpoints then stay as they are.
    """
    assert keep >= 1
    final = folder_of(run_dir, state.step)
    try:
        if state.part and state.part[0] > 0:
            parts = parts_folder(final, state.part)
            parts.mkdir(parents=True, exist_ok=True)
            write_json(parts / f"{state.part[0]}.json", _write(parts, state))
            return final
        before_save()
        # The folder may exist: damaged, so that the run went on from an older one, or this step was saved before.
        with whole_folder(final, replace=True) as partial:
            entries = _write(partial, state)
            if state.part:
                entries |= collect(partial, final, state.part, wait)
            version = 5 if state.part else 4 if state.target else 3 if state.scalars or state.average else OLDEST
            write_json(partial / MANIFEST, {"format": version, "files": entries})
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        if state.part:
            give_up(final, state.part, error)
        own = sum(t.nbytes for tensors in state.tensors.values() for t in tensors.values())
        needed, free = own * (state.part[1] if state.part else 1), free_bytes(run_dir)  # parts have about one size
        newest = f"the newest is of step {max(steps(run_dir))}" if steps(run_dir) else "the run has none"
        reason = f"cannot write checkpoint {final}: {error} (it needs {needed:,} bytes, {free:,} are free; {newest})"
        if free < needed or getattr(error, "errno", None) in FULL:
            raise DiskFullError(f"{reason}. Make room, or set checkpoint.keep=1") from error
        raise HardwareError(reason) from error
    _delete_old(run_dir, state, [step for step in steps(run_dir) if step <= state.step][:keep], keep_every)
    return final


def _write(folder: Path, state: CheckpointState) -> dict[str, dict[str, Any]]:
    """Write this rank's files of a checkpoint to `folder`; return file name → size and SHA-256, for the manifest."""
    number, count, _ = state.part or (0, 1, "")
    entries: dict[str, dict[str, Any]] = {}

    def written(name: str, sha256: str) -> None:
        entries[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256}
        synced.append(pool.submit(sync, folder / name))

    synced: list[Future[None]] = []
    with ThreadPoolExecutor() as pool:  # writing one file overlaps with waiting for the disk to take another
        for name, tensors in state.tensors.items():
            cut = {key: own.start for key, tensor in tensors.items() if (own := _rows(state, key, tensor)) is not None}
            own = {key: tensor for key, tensor in tensors.items() if key in cut or number == 0}
            if not own and number:
                continue
            file = name if state.part is None else f"{Path(name).stem}-{number + 1:05}-of-{count:05}.safetensors"
            written(file, save_tensors(folder / file, own, cut))
        if number == 0:
            metadata = {"step": state.step, **state.metadata, SCALARS: state.scalars}
            (folder / STATE).write_text(json.dumps(metadata, indent=1))
            written(STATE, sha256_of(folder / STATE))
    for done in synced:
        done.result()
    return entries


def _rows(state: CheckpointState, key: str, tensor: Tensor) -> slice | None:
    """Return which rows of a sharded weight, or of its optimiser state, `tensor` has; None: it has all rows.

    key: "<parameter name>" or "<parameter name>/<key of the optimiser state>".
    """
    own = state.rows.get(key) or state.rows.get(key.rpartition("/")[0])
    return own if own and tensor.dim() and len(tensor) == own.stop - own.start else None


def make_room(run_dir: Path, state: CheckpointState, keep_every: int | None) -> list[int]:
    """Delete checkpoints, because the disk has no room for `state`, and return their steps, newest first.

    The newest undamaged checkpoint stays, the best that it names, and what `keep_every` and `state` let stay. Without
    an undamaged one, nothing is deleted.
    """
    try:
        newest = find_undamaged(run_dir, lambda _: None)
        kept = [Checkpoint(newest).step, (Checkpoint(newest).best or {}).get("step", 0)] if newest else []
    except (DataError, ConfigError):
        return []
    return _delete_old(run_dir, state, kept, keep_every)


def _delete_old(run_dir: Path, state: CheckpointState, kept: Sequence[int], keep_every: int | None) -> list[int]:
    """Delete checkpoints up to state.step, and return their steps; an error leaves a checkpoint where it is.

    There stay those of the steps `kept`, of multiples of `keep_every`, and the best that state.metadata names.
    """
    stays = {*kept, (state.metadata.get(BEST) or {}).get("step")}
    older = [step for step in steps(run_dir) if step <= state.step and step not in stays]
    deleted = [step for step in older if keep_every is None or step % keep_every]
    for folder in (folder_of(run_dir, step) for step in deleted):
        with suppress(OSError):  # a folder that cannot be deleted is no reason to stop
            leaving = folder.with_name(f".{folder.name}.partial")
            os.rename(folder, leaving)  # first: a half deleted one must not look whole
            remove(leaving)
    return deleted

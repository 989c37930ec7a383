"""The format of a checkpoint, a folder with everything that a run needs to resume, and its reader.

`<run>/checkpoints/step_XXXXXXXX/`, XXXXXXXX = finished optimiser steps:
    model.safetensors      weights and buffers of the towers and the objective, by name
    optimizer.safetensors  "<parameter name>/exp_avg" and so on: by name, so the order of parameters may change
    memory.safetensors     per-sample state of the objective, one entry per training sample; only if it has such state
    average.safetensors    moving average of the trained weights, by name; only with optim.ema
    target.safetensors     weights of the target network, by the names of the trained weights; not with target.kind=none
    state.json             step, numbers of the optimiser that are no tensors, and further entries that the caller
                           chooses (samples seen, data, scaler, tracker id)
    manifest.json          format version, size and SHA-256 of the others; written last, checked before loading

With sharded towers each rank that has a part of the first copy of the weights writes files of its own,
model-00001-of-00008.safetensors and so on. A tensor is cut by rows; the metadata of a file says where its rows begin
(tensor_files.py). So a checkpoint can be read with any number of ranks, sharded or not. Ranks other than 0 write into a
folder beside the checkpoint (checkpoint_parts.py); rank 0 moves their files into it and writes the manifest.

No folder depends on another, so damage to one leaves the others usable. Nothing is pickled.

The format number (also of the run folder: FORMAT in folder.py) goes up when an older program would read a new file
wrongly. A program reads the numbers from OLDEST to its own, refuses others in one line, and writes the lowest number
that describes what it writes: 2; 3 with an average of the weights or numbers of the optimiser that are no tensors; 4
with a target network; 5 in parts.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import remove
from dyad.data.base.json_text import read_json
from dyad.data.base.limits import whole_number
from dyad.train.run_folder.checkpoint_parts import PARTS
from dyad.train.run_folder.checkpoint_state import (
    AVERAGE,
    BEST,
    MANIFEST,
    MODEL,
    OPTIONAL,
    SCALARS,
    STATE,
    TENSORS,
    CheckpointState,
)
from dyad.train.run_folder.digests import digest_of
from dyad.train.run_folder.folder import folder_of, steps
from dyad.train.run_folder.tensor_files import SavedTensors

if TYPE_CHECKING:
    from dyad.train.run_folder.best_record import Best

OLDEST, FORMAT = 2, 5
FILES = (*TENSORS.values(), STATE)
OF_WEIGHTS = (MODEL, AVERAGE)
# errors of reading JSON that has another structure than ours
OTHER_SHAPE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)


class Checkpoint:
    """A reader of one checkpoint folder. The constructor reads the manifest, the methods verify each file against it.

    The constructor raises DataError when the manifest cannot be read, ConfigError for a format version that this
    program does not read. Properties and methods raise DataError for a file that is missing, truncated or changed, or
    that cannot be read or parsed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, manifest = folder, folder / MANIFEST
        try:
            content = read_json(manifest)
            version, files = int(content["format"]), {name: dict(file) for name, file in content["files"].items()}
        except (OSError, *OTHER_SHAPE) as error:
            raise DataError(f"{manifest} cannot be read: {error}") from error
        if not OLDEST <= version <= FORMAT:
            newer, older = ("a newer", "update Dyad"), ("an older", "use that one, or begin anew")
            age, way_out = newer if version > FORMAT else older
            raise ConfigError(f"{folder} is of {age} Dyad (format {version}, this one reads {FORMAT}): {way_out}")
        self._entries: dict[str, dict[str, Any]] = files  # file name → its size and SHA-256

    @property
    def step(self) -> int:
        """The number of optimiser steps that were finished when the checkpoint was written."""
        with self._verified(STATE):
            return whole_number("step", self._state["step"])

    @property
    def best(self) -> "Best | None":
        """The best evaluation of the run up to this checkpoint; None if there is none."""
        with self._verified(STATE):
            from dyad.train.run_folder.best_record import read_best  # imports pydantic, which a bare GPU image lacks

            return read_best(self._state.get(BEST))

    def weights(self) -> SavedTensors:
        """Return the weights by name ("towers.x_tower.…", "objective.logit_scale"), as tensors on the CPU.

        The files are verified in this call; a tensor is read when it is looked up, so the files must stay until then.
        If the run had optim.ema, the value of each trained weight is its moving average.
        """
        with self._verified(*OF_WEIGHTS):
            return self._tensors(MODEL) | self._tensors(AVERAGE)

    def read(self) -> CheckpointState:
        """Return the whole content of the checkpoint, with the weights themselves, not their moving average, as model.

        All files are verified in this call; a tensor, on the CPU, is read when it is looked up by name. Parts that the
        ranks have written are put together, so `part` is None and `rows` is empty.
        """
        with self._verified(*FILES):
            metadata = dict(self._state)
            step, scalars = whole_number("step", metadata.pop("step")), dict(metadata.pop(SCALARS))
            tensors: dict[str, Any] = {part: self._tensors(name) for part, name in TENSORS.items()}
            return CheckpointState(step=step, metadata=metadata, scalars=scalars, **tensors)

    def verify(self, *names: str) -> None:
        """Compare files with the sizes and SHA-256 in the manifest.

        names: members of FILES; without names, all of FILES are compared. Of a file in parts, all parts are compared.
        Files whose SHA-256 this process knows are not read again (`digest_of`). Raises DataError, naming the file, for
        the first one that is missing, truncated, changed or unreadable. A file of OPTIONAL may be missing if the
        manifest does not list it.
        """
        for name in names or FILES:
            files = self._files(name)
            if files or name not in OPTIONAL or (self.folder / name).exists():
                for file in files or [name]:
                    self._verify_file(self.folder / file, self._entries.get(file) or {})

    def _verify_file(self, path: Path, expected: dict[str, Any]) -> None:
        """Raise DataError unless the file has the size ("bytes") and the digest ("sha256") of its entry `expected`."""
        try:  # the run may go on, and remove this checkpoint at any moment
            if (size := path.stat().st_size) != expected.get("bytes"):
                raise DataError(f"{path} has {size} bytes, not {expected.get('bytes')}")
            if digest_of(path) != expected.get("sha256"):
                raise DataError(f"{path} has changed since it was written (SHA-256 differs)")
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    @contextmanager
    def _verified(self, *names: str) -> Iterator[None]:
        """Context manager: verify the files `names`, which the block reads; turn errors of reading into DataError."""
        self.verify(*names)
        try:
            yield
        except (SafetensorError, OSError, *OTHER_SHAPE) as error:
            reason = str(error)[:200] or type(error).__name__
            raise DataError(f"{self.folder} is no checkpoint of ours: {reason}") from error

    @cached_property
    def _state(self) -> dict[str, Any]:
        return read_json(self.folder / STATE)

    def _tensors(self, name: str) -> SavedTensors:
        """Return the tensors of `name`, a member of FILES that may be split into parts; empty if there is no file."""
        return SavedTensors(self.folder / file for file in self._files(name))

    def _files(self, name: str) -> list[str]:
        """Return which files of the manifest hold the content of `name`, a member of FILES: that file, or its parts."""
        parts = re.compile(re.escape(Path(name).stem) + r"-\d+-of-\d+\.safetensors")
        return [file for file in self._entries if file == name or parts.fullmatch(file)]


def find_undamaged(run_dir: Path, log: Callable[[str], None]) -> Path | None:
    """Return the folder of the run's newest undamaged checkpoint, or None when the run has no checkpoints.

    All files of a checkpoint are verified, from the newest checkpoint on. log: called with one line for each damaged
    checkpoint that is passed over. Raises DataError when there are checkpoints and all are damaged; ConfigError when it
    comes to one of a format version that this program does not read, even if an older one is whole.
    """
    found = [folder_of(run_dir, step) for step in steps(run_dir)]
    for folder in found:
        try:
            Checkpoint(folder).verify()
            return folder
        except DataError as error:
            log(f"passing over a damaged checkpoint: {error}")
    if found:
        parent = found[0].parent
        raise DataError(f"none of the {len(found)} checkpoints in {parent} is whole. resume=never begins again")
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint folder, not a run folder.

    A path whose last part is step_ and 8 or more digits counts as one, whether it exists or not; any other must be a
    folder with a manifest.json. Links are resolved first.
    """
    return bool(re.fullmatch(r"step_\d{8,}", path.resolve().name)) or (path / MANIFEST).exists()


def tidy(run_dir: Path) -> None:
    """Clean up after saves that were killed half-way. Call on rank 0 when a run starts, before `find_undamaged`.

    No process may be writing checkpoints meanwhile: hold the lock of the run folder (run_state.py). Deletes .partial
    and .parts folders (half written) and .old folders (a replaced checkpoint; earlier versions called them .aside). If
    only the .old folder of a checkpoint is left, it is renamed back. Raises OSError when the renaming fails.
    """
    for left in sorted((run_dir / "checkpoints").glob(".step_*.*")):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix in (".partial", PARTS) or final.exists():
            remove(left)
        else:  # killed between the two renames of whole_folder: restore the old checkpoint
            os.rename(left, final)

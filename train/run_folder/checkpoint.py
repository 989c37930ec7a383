"""Checkpoints: everything a run needs to resume, in one folder that is written whole or not at all.

`<run>/checkpoints/step_XXXXXXXX/`, XXXXXXXX = finished optimiser steps:
    model.safetensors      weights and buffers of the towers and the objective, by name
    optimizer.safetensors  "<parameter name>/exp_avg" and so on: by name, so the order of parameters may change
    memory.safetensors     per-sample state of the objective, one entry per training sample; only if it has such state
    average.safetensors    moving average of the trained weights, by name; only with optim.ema
    target.safetensors     weights of the target network, by the names of the trained weights; only with target.kind
    state.json             step, numbers of the optimiser that are no tensors, and further entries that the caller
                           chooses (samples seen, data, scaler, tracker id)
    manifest.json          format version, size and SHA-256 of the others; written last, checked before loading

With sharded towers each rank that has a part of the weights writes files of its own, model-00001-of-00008.safetensors
and so on. A tensor is cut by rows; the metadata of a file says where its rows begin (tensor_files.py). So any layout of
ranks reads any other. Ranks write into a folder beside; rank 0 moves their files to its own and writes the manifest.

No folder depends on another, so damage to one leaves the others usable. Nothing is pickled.

The format number (also of the run folder: FORMAT in folder.py) goes up when an older program would read a new file
wrongly. A program reads every number up to its own, refuses higher ones in one line, and writes the lowest number that
describes what it writes: 2; 3 with an average of the weights or numbers of the optimiser that are no tensors; 4 with
a target network; 5 in parts.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import free_bytes, remove, sync, whole_folder, write_json
from dyad.data.base.json_text import read_json
from dyad.data.base.limits import whole_number
from dyad.data.shards.storage import sha256_of
from dyad.train.distributed.sharding import local, own_rows
from dyad.train.run_folder.digests import digest_of
from dyad.train.run_folder.folder import folder_of, steps
from dyad.train.run_folder.moments import refuse_moments
from dyad.train.run_folder.named_tensors import filled, named_tensors, refuse_another_model, restore_weights, state_like
from dyad.train.run_folder.parts import PARTS, Part, collect, give_up, parts_folder
from dyad.train.run_folder.tensor_files import SavedTensors, save_tensors

if TYPE_CHECKING:
    from dyad.train.run_folder.best import Best

OLDEST, FORMAT = 2, 5
MODEL, OPTIMIZER, MEMORY = "model.safetensors", "optimizer.safetensors", "memory.safetensors"
AVERAGE, TARGET, STATE, MANIFEST = "average.safetensors", "target.safetensors", "state.json", "manifest.json"
OPTIONAL = (MEMORY, AVERAGE, TARGET)
FILES = (MODEL, OPTIMIZER, *OPTIONAL, STATE)
OF_WEIGHTS = (MODEL, AVERAGE)
SCALARS, BEST = "optimizer_scalars", "best"  # keys of state.json
# entries of an optimiser's groups that follow from the configuration
OF_CONFIG = {"params", "lr", "lr_scale", "initial_lr", "weight_decay"}
# errors of reading JSON that has another structure than ours
OTHER_SHAPE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass
class CheckpointState:
    """The content of a checkpoint.

    step: the number of finished optimiser steps. model: parameters and buffers by name. optimizer: the optimiser's
    state tensors by "<parameter name>/<key>". facts: further entries of state.json, chosen by the caller. memory: the
    objective's per-sample state, one entry per training sample; empty if it has none. scalars: numbers of the optimiser
    that are no tensors, by "<parameter name>/<key>" or "<number of the group>/<key>". average: the moving average of
    the trained weights by name; empty if there is none. target: the weights of the target network, likewise.
    part: of sharded towers, which of how many parts this rank writes, counted from 0, and a name of the attempt that
    all ranks share; None: everything is here. rows: of each sharded weight, by name, which of its rows are.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    facts: dict[str, Any]
    memory: Mapping[str, Tensor]
    scalars: dict[str, float | None] = field(default_factory=dict)
    average: Mapping[str, Tensor] = field(default_factory=dict)
    target: Mapping[str, Tensor] = field(default_factory=dict)
    part: Part | None = None
    rows: Mapping[str, slice] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of each file that is written, by the name of the file."""
        found: dict[str, Mapping[str, Tensor]] = {MODEL: self.model, OPTIMIZER: self.optimizer}
        found |= {MEMORY: self.memory, AVERAGE: self.average, TARGET: self.target}
        return {name: tensors for name, tensors in found.items() if tensors or name not in OPTIONAL}


def capture(
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    step: int,
    facts: dict[str, Any],
    memory: Mapping[str, Tensor] | None = None,
    average: Mapping[nn.Parameter, Tensor] | None = None,
    target: Mapping[nn.Parameter, Tensor] | None = None,
    part: Part | None = None,
) -> CheckpointState:
    """Collect the tensors and entries that `save` writes, as a CheckpointState.

    The tensors are references, not copies: save or copy them before the next optimiser step. modules: everything with
    weights, by the prefix of its names. facts: further entries of state.json. memory: the objective's per-sample state,
    one entry per training sample; None if it has none. average: the moving average of the weights by parameter. target:
    the weights of the target network by parameter. part: as in CheckpointState.
    Raises TypeError for an optimiser whose state is neither tensors nor numbers.
    """
    assert not {"step", SCALARS} & set(facts), "these keys of state.json are the checkpoint's own"
    model = named_tensors(modules)
    name_of = {id(tensor): name for name, tensor in model.items()}
    slots = {  # of AdamW they all are tensors, the step count too
        f"{name_of[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    slots |= {
        f"{i}/{key}": group[key]
        for i, group in enumerate(optimizer.param_groups)
        for key in sorted(group.keys() - optimizer.defaults.keys() - OF_CONFIG)
    }
    scalars = {key: value for key, value in slots.items() if not isinstance(value, Tensor)}
    if foreign := [key for key, value in scalars.items() if not isinstance(value, int | float | None)]:
        raise TypeError(f"no checkpoint holds what this optimiser keeps as '{foreign[0].rpartition('/')[2]}'")
    tensors = {key: local(value) for key, value in slots.items() if key not in scalars}
    copies = ({name_of[id(p)]: local(tensor) for p, tensor in (copy or {}).items()} for copy in (average, target))
    rows = {name: own for name, tensor in model.items() if (own := own_rows(tensor)) is not None}
    model = {name: local(tensor) for name, tensor in model.items()}
    return CheckpointState(step, model, tensors, facts, dict(memory or {}), scalars, *copies, part=part, rows=rows)


def restore(state: CheckpointState, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> list[dict[Any, Tensor]]:
    """Copy a checkpoint's weights into `modules` and its optimiser state into `optimizer`, bit for bit.

    Returns the moving average and the target network's weights, by parameter, empty if the checkpoint has none; of
    `state.memory` each rank loads its part elsewhere. Raises ConfigError, with nothing changed, for another model.
    """
    refuse_another_model(state.model, modules)
    named = named_tensors(modules)
    # torch numbers optimiser state by the position of its parameter; the checkpoint names it
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = {str(i): group for i, group in enumerate(optimizer.state_dict()["param_groups"])}
    slots: dict[int, dict[str, Any]] = {}
    for entry in (*state.optimizer, *state.scalars):
        name, _, key = entry.rpartition("/")
        if name in groups and key not in optimizer.defaults.keys() | OF_CONFIG:
            groups[name][key] = state.scalars[entry] if entry in state.scalars else state.optimizer[entry].clone()
            continue
        if name not in named or id(named[name]) not in position:
            raise ConfigError(f"the checkpoint has optimiser state of '{name}', which this model does not train")
        own = state_like(named[name], state.optimizer, entry) if entry in state.optimizer else state.scalars[entry]
        slots.setdefault(position[id(named[name])], {})[key] = own
    refuse_moments(slots, optimizer)
    copies = state.average, state.target
    if unknown := [n for n in chain(*copies) if n not in named or id(named[n]) not in position]:
        raise ConfigError(f"the checkpoint has an average or target of '{unknown[0]}', which this model does not train")
    restore_weights(state.model, modules)
    optimizer.load_state_dict({"state": slots, "param_groups": [*groups.values()]})
    return [{named[n]: filled(torch.empty_like(named[n]), copy, n) for n in copy} for copy in copies]


def save(
    run_dir: Path,
    state: CheckpointState,
    keep: int,
    before_save: Callable[[], None] = lambda: None,
    wait: float = 600.0,
) -> Path:
    """Write the checkpoint `state` into the run folder and return the checkpoint's folder. Call on rank 0,
    and on every rank with a part of sharded towers: those return when it is written; rank 0 waits for them, `wait` s.

    Of this checkpoint and all older ones the newest `keep` stay, and the best, which the entry "best" of `state.facts`
    names; the others are deleted. before_save: called first; it flushes the logs, so that the logs on the disk never
    end before the step of a checkpoint. Raises HardwareError when logs or checkpoint cannot be written; older
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
        needed = sum(t.nbytes for part in state.tensors.values() for t in part.values())
        reason = f"{error} (it needs {needed:,} bytes, {free_bytes(run_dir):,} are free)"
        raise HardwareError(f"cannot write checkpoint {final}: {reason}") from error
    best = state.facts.get(BEST) or {}
    older = [step for step in steps(run_dir) if step <= state.step][keep:]
    for folder in (folder_of(run_dir, step) for step in older if step != best.get("step")):
        with suppress(OSError):  # a folder that cannot be deleted is no reason to stop
            partial = folder.with_name(f".{folder.name}.partial")
            os.rename(folder, partial)  # first: a half deleted one must not look whole
            remove(partial)
    return final


def find(run_dir: Path, log: Callable[[str], None]) -> Path | None:
    """Return the folder of the run's newest checkpoint that passes `verify`, or None when the run has no checkpoints.

    log: called with one line for each damaged checkpoint that is passed over. Raises DataError when there are
    checkpoints and all are damaged, ConfigError when one is of another format version.
    """
    found = [folder_of(run_dir, step) for step in steps(run_dir)]
    for folder in found:
        try:
            verify(folder)
            return folder
        except DataError as error:
            log(f"passing over a damaged checkpoint: {error}")
    if found:
        parent = found[0].parent
        raise DataError(f"none of the {len(found)} checkpoints in {parent} is whole. resume=never begins again")
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint folder itself, judged by its name or its manifest."""
    return bool(re.fullmatch(r"step_\d{8,}", path.resolve().name)) or (path / MANIFEST).exists()


def load(folder: Path) -> CheckpointState:
    """Verify a checkpoint folder and read it into a CheckpointState with tensors on the CPU.

    Raises DataError naming the damaged file, ConfigError for another format version.
    """
    with _verified(folder):
        facts = read_json(folder / STATE)
        step = whole_number("step", facts.pop("step"))
        scalars = dict(facts.pop(SCALARS))
        names = {"model": MODEL, "optimizer": OPTIMIZER, "memory": MEMORY, "average": AVERAGE, "target": TARGET}
        tensors: dict[str, Any] = {part: _tensors(folder, name) for part, name in names.items()}
        return CheckpointState(step=step, facts=facts, scalars=scalars, **tensors)


def step_of(folder: Path) -> int:
    """Return how many optimiser steps were finished when the checkpoint in `folder` was written.

    Raises DataError for a damaged checkpoint, ConfigError for another format version.
    """
    with _verified(folder, STATE):
        return whole_number("step", read_json(folder / STATE)["step"])


def best_of(folder: Path) -> "Best | None":
    """Return which checkpoint was the best of its run when that in `folder` was written; None without checkpoint.best.

    Raises DataError for a damaged checkpoint, ConfigError for another format version.
    """
    with _verified(folder, STATE):
        from dyad.train.run_folder.best import read_best  # imports pydantic, which a bare GPU image lacks

        return read_best(read_json(folder / STATE).get(BEST))


def load_weights(folder: Path) -> SavedTensors:
    """Verify and read the weights of a checkpoint: tensors by name ("towers.x_tower.…", "objective.logit_scale").

    With optim.ema those that train are their moving average. Raises DataError naming the damaged file, ConfigError
    for another format version.
    """
    with _verified(folder, *OF_WEIGHTS):
        return _tensors(folder, MODEL) | _tensors(folder, AVERAGE)


def _tensors(folder: Path, name: str) -> SavedTensors:
    """Return the tensors of one of FILES, whole or in parts; none if it is an optional file, which is not there."""
    return SavedTensors(folder / file for file in _files(_listed(folder), name))


def _files(listed: Iterable[str], name: str) -> list[str]:
    """Return which files of a checkpoint hold the content of `name`, one of FILES: itself, or its parts."""
    parts = re.compile(re.escape(Path(name).stem) + r"-\d+-of-\d+\.safetensors")
    return [file for file in listed if file == name or parts.fullmatch(file)]


@contextmanager
def _verified(folder: Path, *names: str) -> Iterator[None]:
    """Context manager: verify the files `names` of a checkpoint (default: all files); the with block reads them.

    Raises the errors of `verify`, and DataError if the block cannot parse a file although its checksum is right.
    """
    verify(folder, names or FILES)
    try:
        yield
    except (SafetensorError, FileNotFoundError, *OTHER_SHAPE) as error:
        raise DataError(f"{folder} is no checkpoint of ours: {str(error)[:200] or type(error).__name__}") from error


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compare the files `names` of a checkpoint with the sizes and SHA-256 in its manifest.json.

    Raises DataError naming the first file that is missing, truncated or changed; ConfigError for another format
    version.
    """
    files = _listed(folder)
    absent = [name for name in OPTIONAL if not _files(files, name) and not (folder / name).exists()]
    for name in chain.from_iterable(_files(files, name) or [name] for name in names if name not in absent):
        path, expected = folder / name, files.get(name) or {}
        try:  # the run may go on, and remove this checkpoint at any moment
            if (size := path.stat().st_size) != expected.get("bytes"):
                raise DataError(f"{path} has {size} bytes, not {expected.get('bytes')}")
            if digest_of(path) != expected.get("sha256"):
                raise DataError(f"{path} has changed since it was written (SHA-256 differs)")
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing") from error


def tidy(run_dir: Path) -> None:
    """Clean up after saves that were killed half-way. Call on rank 0 when a run starts, before `find`.

    Deletes .partial and .parts folders (half written) and .old folders (a replaced checkpoint; earlier versions called
    them .aside). If only the .old folder of a checkpoint is left, it is renamed back.
    """
    for left in sorted((run_dir / "checkpoints").glob(".step_*.*")):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix in (".partial", PARTS) or final.exists():
            remove(left)
        else:  # killed between the two renames of whole_folder: the old checkpoint counts
            os.rename(left, final)


def _listed(folder: Path) -> dict[str, Any]:
    """Read manifest.json of a checkpoint: file name → its entry (size and SHA-256).

    Raises DataError when the manifest cannot be read, ConfigError for another format version.
    """
    manifest = folder / MANIFEST
    try:
        content = read_json(manifest)
        version, files = int(content["format"]), {name: dict(file) for name, file in content["files"].items()}
    except (OSError, *OTHER_SHAPE) as error:
        raise DataError(f"{manifest} cannot be read: {error}") from error
    if not OLDEST <= version <= FORMAT:
        age, way_out = ("a newer", "update Dyad") if version > FORMAT else ("an older", "use that one, or begin anew")
        raise ConfigError(f"{folder} is of {age} Dyad (format {version}, this one reads {FORMAT}): {way_out}")
    return files


def _write(folder: Path, state: CheckpointState) -> dict[str, dict[str, Any]]:
    """Write the files of a checkpoint that this rank has; return the manifest's entries of them."""
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
            facts = {"step": state.step, **state.facts, SCALARS: state.scalars}
            (folder / STATE).write_text(json.dumps(facts, indent=1))
            written(STATE, sha256_of(folder / STATE))
    for done in synced:
        done.result()
    return entries


def _rows(state: CheckpointState, key: str, tensor: Tensor) -> slice | None:
    """Return which rows of the whole a tensor has, "<parameter name>" or "<parameter name>/<key>"; None: all."""
    own = state.rows.get(key) or state.rows.get(key.rpartition("/")[0])
    return own if own and tensor.dim() and len(tensor) == own.stop - own.start else None

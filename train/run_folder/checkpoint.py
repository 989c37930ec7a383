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

No folder depends on another, so damage to one leaves the others usable. Nothing is pickled.

The format number (also of the run folder: FORMAT in folder.py) goes up when an older program would read a new file
wrongly. A program reads every number up to its own, refuses higher ones in one line, and writes the lowest number that
describes what it writes: 2; 3 with an average of the weights or numbers of the optimiser that are no tensors; 4 with
a target network.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import remove, sync, whole_folder, write_json
from dyad.data.shards.storage import sha256_of

OLDEST, FORMAT = 2, 4
MODEL, OPTIMIZER, MEMORY = "model.safetensors", "optimizer.safetensors", "memory.safetensors"
AVERAGE, TARGET, STATE, MANIFEST = "average.safetensors", "target.safetensors", "state.json", "manifest.json"
OPTIONAL = (MEMORY, AVERAGE, TARGET)
FILES = (MODEL, OPTIMIZER, *OPTIONAL, STATE)
SCALARS = "optimizer_scalars"  # key of state.json
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
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    facts: dict[str, Any]
    memory: dict[str, Tensor]
    scalars: dict[str, float | None] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    target: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each file that is written, by the name of the file."""
        found = {MODEL: self.model, OPTIMIZER: self.optimizer}
        found |= {MEMORY: self.memory, AVERAGE: self.average, TARGET: self.target}
        return {name: tensors for name, tensors in found.items() if tensors or name not in OPTIONAL}


def named_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of `modules` by name, "<key of the module>.<path in it>".

    A tensor that is shared is returned once, under its first name. Pass the modules without their
    DistributedDataParallel wrappers, so that the names are the same for any number of ranks.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for part, module in modules.items():
        # keep_vars: the tensors themselves. Detached ones would be other objects, which do not show what is shared.
        for name, tensor in module.state_dict(prefix=f"{part}.", keep_vars=True).items():
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def capture(
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    step: int,
    facts: dict[str, Any],
    memory: Mapping[str, Tensor] | None = None,
    average: Mapping[nn.Parameter, Tensor] | None = None,
    target: Mapping[nn.Parameter, Tensor] | None = None,
) -> CheckpointState:
    """Collect the tensors and entries that `save` writes, as a CheckpointState.

    The tensors are references, not copies: save or copy them before the next optimiser step. modules: everything with
    weights, by the prefix of its names. facts: further entries of state.json. memory: the objective's per-sample state,
    one entry per training sample; None if it has none. average: the moving average of the weights by parameter. target:
    the weights of the target network by parameter. Raises TypeError for an optimiser whose state is neither tensors
    nor numbers.
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
        for key in group.keys() - optimizer.defaults.keys() - OF_CONFIG
    }
    scalars = {key: value for key, value in slots.items() if not isinstance(value, Tensor)}
    if foreign := [key for key, value in scalars.items() if not isinstance(value, int | float | None)]:
        raise TypeError(f"no checkpoint holds what this optimiser keeps as '{foreign[0].rpartition('/')[2]}'")
    tensors = {key: value for key, value in slots.items() if key not in scalars}
    copies = ({name_of[id(p)]: tensor for p, tensor in (copy or {}).items()} for copy in (average, target))
    return CheckpointState(step, model, tensors, facts, dict(memory or {}), scalars, *copies)


def restore(state: CheckpointState, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> list[dict[Any, Tensor]]:
    """Copy a checkpoint's weights into `modules` and its optimiser state into `optimizer`, bit for bit.

    Returns the moving average of the weights and the weights of the target network by parameter, each empty if the
    checkpoint has none. `state.memory` (per-sample state of the objective) is not restored here: each rank loads its
    own part. Raises ConfigError, with nothing changed, for a checkpoint of another model.
    """
    _refuse_another_model(state.model, modules)
    named = named_tensors(modules)
    # torch numbers optimiser state by the position of its parameter; the checkpoint names it
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = optimizer.state_dict()["param_groups"]
    slots: dict[int, dict[str, Any]] = {}
    for entry, value in {**state.optimizer, **state.scalars}.items():
        name, _, key = entry.rpartition("/")
        if name.isdecimal() and int(name) < len(groups):
            groups[int(name)][key] = value
            continue
        if name not in named or id(named[name]) not in position:
            raise ConfigError(f"the checkpoint has optimiser state of '{name}', which this model does not train")
        own = _like(named[name], value) if isinstance(value, Tensor) else value
        slots.setdefault(position[id(named[name])], {})[key] = own
    copies = state.average, state.target
    if unknown := [n for n in chain(*copies) if n not in named or id(named[n]) not in position]:
        raise ConfigError(f"the checkpoint has an average or target of '{unknown[0]}', which this model does not train")
    restore_weights(state.model, modules)
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
    return [{named[n]: torch.empty_like(named[n]).copy_(value) for n, value in copy.items()} for copy in copies]


def restore_weights(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Copy `weights` (name → tensor) into `modules` (prefix of the names → module).

    Weights whose prefix is not among `modules` are ignored. Raises ConfigError with the names that are missing,
    unexpected or of another shape, before anything is changed.
    """
    _refuse_another_model(weights, modules)
    with torch.no_grad():
        for name, tensor in named_tensors(modules).items():
            tensor.copy_(weights[name])


def save(run_dir: Path, state: CheckpointState, keep: int, before_save: Callable[[], None] = lambda: None) -> Path:
    """Write the checkpoint `state` into the run folder and return the checkpoint's folder. Call on rank 0.

    Of this checkpoint and all older ones the newest `keep` stay, the others are deleted. before_save: called first; it
    flushes the logs, so that the logs on the disk never end before the step of a checkpoint. Raises HardwareError when
    logs or checkpoint cannot be written; older checkpoints then stay as they are.
    """
    assert keep >= 1
    final = folder_of(run_dir, state.step)
    try:
        before_save()
        # The folder may exist: damaged, so that the run went on from an older one, or this step was saved before.
        with whole_folder(final, replace=True) as partial:
            _write(partial, state)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        needed = sum(t.nbytes for part in state.tensors.values() for t in part.values())
        free = shutil.disk_usage(next(p for p in (run_dir, *run_dir.parents) if p.exists())).free
        reason = f"{error} (it needs {needed:,} bytes, {free:,} are free)"
        raise HardwareError(f"cannot write checkpoint {final}: {reason}") from error
    not_newer = [folder_of(run_dir, step) for step in steps(run_dir) if step <= state.step]
    for folder in not_newer[keep:]:
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


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the path of the checkpoint that a run writes after `step` optimiser steps."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def steps(run_dir: Path) -> list[int]:
    """Return the step numbers of all checkpoints in the run folder, newest first; damaged checkpoints count too."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()]
    return sorted((int(p.name[5:]) for p in folders if re.fullmatch(r"step_\d{8,}", p.name)), reverse=True)


def locate(path: Path, log: Callable[[str], None]) -> Path:
    """Return the checkpoint folder that a user means by `path`.

    A checkpoint folder is returned unchecked; for a run folder it is the run's newest whole checkpoint. log: called
    with one line for each damaged checkpoint that is passed over. Raises ConfigError when there is no checkpoint,
    DataError when a run has checkpoints and all are damaged.
    """
    itself = re.fullmatch(r"step_\d{8,}", path.resolve().name) or (path / MANIFEST).exists()
    folder = path if itself else find(path, log)
    if folder is None:
        raise ConfigError(f"'{path}' is neither a checkpoint (a step_… folder) nor a run folder that has one")
    return folder


def load(folder: Path) -> CheckpointState:
    """Verify a checkpoint folder and read it into a CheckpointState with tensors on the CPU.

    Raises DataError naming the damaged file, ConfigError for another format version.
    """
    with _verified(folder):
        facts = json.loads((folder / STATE).read_text())
        step = int(facts.pop("step"))
        scalars = dict(facts.pop(SCALARS))
        model, optimizer, memory, *copies = (_tensors(folder, name) for name in (MODEL, OPTIMIZER, *OPTIONAL))
        return CheckpointState(step, model, optimizer, facts, memory, scalars, *copies)


def step_of(folder: Path) -> int:
    """Return how many optimiser steps were finished when the checkpoint in `folder` was written.

    Raises DataError for a damaged checkpoint, ConfigError for another format version.
    """
    with _verified(folder, STATE):
        return int(json.loads((folder / STATE).read_text())["step"])


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Verify and read the weights of a checkpoint: tensors by name ("towers.x_tower.…", "objective.logit_scale").

    With optim.ema those that train are their moving average. Raises DataError naming the damaged file, ConfigError
    for another format version.
    """
    with _verified(folder, MODEL, AVERAGE):
        return {**_tensors(folder, MODEL), **_tensors(folder, AVERAGE)}


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the tensors of one file of a checkpoint; {} if it is an optional file, which this checkpoint lacks."""
    return load_file(folder / name) if name not in OPTIONAL or name in _listed(folder) else {}


@contextmanager
def _verified(folder: Path, *names: str) -> Iterator[None]:
    """Context manager: verify the files `names` of a checkpoint (default: all files), then run the with block.

    The block reads these files. Raises DataError for a damaged file, or if the block cannot parse a file although its
    checksum is right; ConfigError for another format version.
    """
    verify(folder, names or FILES)
    try:
        yield
    except (SafetensorError, *OTHER_SHAPE) as error:
        raise DataError(f"{folder} is no checkpoint of ours: {str(error)[:200] or type(error).__name__}") from error


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compare the files `names` of a checkpoint with the sizes and SHA-256 in its manifest.json.

    Raises DataError naming the first file that is missing, truncated or changed; ConfigError for another format
    version.
    """
    files = _listed(folder)
    for name in names:
        if name in OPTIONAL and name not in files and not (folder / name).exists():
            continue
        path, expected = folder / name, files.get(name) or {}
        if not path.is_file():
            raise DataError(f"{path} is missing")
        if path.stat().st_size != expected.get("bytes"):
            raise DataError(f"{path} has {path.stat().st_size} bytes, not {expected.get('bytes')}")
        if sha256_of(path) != expected.get("sha256"):
            raise DataError(f"{path} has changed since it was written (SHA-256 differs)")


def tidy(run_dir: Path) -> None:
    """Clean up after saves that were killed half-way. Call on rank 0 when a run starts, before `find`.

    Deletes .partial folders (half written) and .old folders (a replaced checkpoint; earlier versions called them
    .aside). If only the .old folder of a checkpoint is left, it is renamed back.
    """
    for left in sorted((run_dir / "checkpoints").glob(".step_*.*")):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".partial" or final.exists():
            remove(left)
        else:  # killed between the two renames of whole_folder: the old checkpoint counts
            os.rename(left, final)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy `value` to the CPU, with the memory format (for example channels last) of `parameter` if shapes are equal.

    A copy is needed, because `value` is memory-mapped from a file that may be deleted. The memory format is needed,
    because the fused AdamW ignores strides.
    """
    same = value.shape == parameter.shape
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value) if same else value.clone()


def _listed(folder: Path) -> dict[str, Any]:
    """Read manifest.json of a checkpoint: file name → its entry (size and SHA-256).

    Raises DataError when the manifest cannot be read, ConfigError for another format version.
    """
    manifest = folder / MANIFEST
    try:
        content = json.loads(manifest.read_text())
        version, files = int(content["format"]), {name: dict(file) for name, file in content["files"].items()}
    except (OSError, *OTHER_SHAPE) as error:
        raise DataError(f"{manifest} cannot be read: {error}") from error
    if not OLDEST <= version <= FORMAT:
        age, way_out = ("a newer", "update Dyad") if version > FORMAT else ("an older", "use that one, or begin anew")
        raise ConfigError(f"{folder} is of {age} Dyad (format {version}, this one reads {FORMAT}): {way_out}")
    return files


def _refuse_another_model(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError unless `weights` have the names and shapes of the tensors of `modules`.

    Weights whose prefix is not a key of `modules` are ignored.
    """
    own, ours = named_tensors(modules), tuple(f"{key}." for key in modules)
    given = {name: tensor for name, tensor in weights.items() if name.startswith(ours)}
    problems = {
        "not in the checkpoint": [n for n in own if n not in given],
        "not in this model": [n for n in given if n not in own],
        "of another shape": [
            f"{n} {tuple(given[n].shape)} there, {tuple(own[n].shape)} here"
            for n in own
            if n in given and given[n].shape != own[n].shape
        ],
    }
    if shown := "".join(
        f"\n  {what}: {', '.join(names[:4])}" + f" and {len(names) - 4} more" * (len(names) > 4)
        for what, names in problems.items()
        if names
    ):
        raise ConfigError(f"the checkpoint is of another model:{shown}")


def _write(folder: Path, state: CheckpointState) -> None:
    files = state.tensors
    for name, tensors in files.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
    (folder / STATE).write_text(json.dumps({"step": state.step, **state.facts, SCALARS: state.scalars}, indent=1))
    names = (*files, STATE)

    def described(name: str) -> dict[str, Any]:
        path = folder / name
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}

    with ThreadPoolExecutor() as pool:  # hashing one file overlaps with waiting for the disk to take another
        entries = dict(zip(names, pool.map(described, names), strict=True))
    version = 4 if state.target else 3 if state.scalars or state.average else OLDEST
    write_json(folder / MANIFEST, {"format": version, "files": entries})

"""Checkpoints: everything a run needs to resume, in one folder that exists whole or not at all.

`<run>/checkpoints/step_XXXXXXXX/`, XXXXXXXX = finished optimiser steps:
    model.safetensors      weights and buffers of the towers and the objective, by name
    optimizer.safetensors  "<parameter name>/exp_avg" and so on: by name, so the order of parameters may change
    memory.safetensors     per-sample state of the objective, one entry per training sample; only if it has such state
    state.json             step, and the caller's facts (samples seen, data state, scaler, tracker id)
    manifest.json          format version, size and SHA-256 of the others; written last, checked before loading
No folder depends on another, so damage to one leaves the others usable. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, empty_like, nn, no_grad
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import remove, sync, whole_folder, write_json
from dyad.data.shards.storage import sha256_of

FORMAT = 2
MODEL, OPTIMIZER, MEMORY = "model.safetensors", "optimizer.safetensors", "memory.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
FILES = (MODEL, OPTIMIZER, MEMORY, STATE)
# errors of reading JSON that has another structure than ours
OTHER_SHAPE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass
class CheckpointState:
    """The content of a checkpoint: tensors by name.

    step: finished optimiser steps; facts: JSON of the caller's choice; memory: per-sample state of all samples.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    facts: dict[str, Any]
    memory: dict[str, Tensor]


def named_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers as "<module>.<path>", each once (shared ones under their first name).

    The modules are those without wrappers of data parallelism, so the names are the same for any number of ranks.
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
) -> CheckpointState:
    """Collect what `save` writes. The result holds references, not copies: save or copy it before the next step."""
    assert not {"step", "optimizer_scalars"} & set(facts), "these keys of state.json are the checkpoint's own"
    model = named_tensors(modules)
    name_of = {id(tensor): name for name, tensor in model.items()}
    slots = {  # of AdamW they all are tensors, the step count too
        f"{name_of[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return CheckpointState(step, model, slots, facts, dict(memory or {}))


def restore(state: CheckpointState, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Restore weights and optimiser, bit for bit. Each rank loads its part of state.memory by itself.

    Raises ConfigError, with nothing changed, for a checkpoint of another model.
    """
    _refuse_another_model(state.model, modules)
    named = named_tensors(modules)
    # torch numbers optimiser state by the position of its parameter; the checkpoint names it
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    slots: dict[int, dict[str, Any]] = {}
    for entry, value in state.optimizer.items():
        name, _, key = entry.rpartition("/")
        if name not in named or id(named[name]) not in position:
            raise ConfigError(f"the checkpoint has optimiser state of '{name}', which this model does not train")
        slots.setdefault(position[id(named[name])], {})[key] = _like(named[name], value)
    restore_weights(state.model, modules)
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def restore_weights(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Copy weights into the given modules; weights of other modules are left out.

    Raises ConfigError with the names that are missing, unexpected or of another shape, before anything is changed.
    """
    _refuse_another_model(weights, modules)
    with no_grad():
        for name, tensor in named_tensors(modules).items():
            tensor.copy_(weights[name])


def save(run_dir: Path, state: CheckpointState, keep: int, before_save: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint of the run and remove all but the newest `keep` of those not newer than it.

    Call on rank 0. before_save: brings to the disk what must be there before. Raises HardwareError when either cannot
    be written; older checkpoints stay as they are.
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
        needed = sum(t.nbytes for part in (state.model, state.optimizer, state.memory) for t in part.values())
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
    """The run's newest checkpoint that verifies, None when it has no checkpoints. log: prints each damaged one.

    Raises DataError when there are checkpoints and none verifies, ConfigError when one is from a newer Dyad.
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
    """The folder of the checkpoint that a run writes after `step` steps."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def steps(run_dir: Path) -> list[int]:
    """The steps of the run's checkpoints, newest first."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()]
    return sorted((int(p.name[5:]) for p in folders if re.fullmatch(r"step_\d{8,}", p.name)), reverse=True)


def locate(path: Path, log: Callable[[str], None]) -> Path:
    """The checkpoint that a user means by `path`: a checkpoint, whole or not, or a run folder: its newest whole one.

    Raises ConfigError when there is none, DataError when a run has some and none is whole. log: as in `find`.
    """
    itself = re.fullmatch(r"step_\d{8,}", path.resolve().name) or (path / MANIFEST).exists()
    folder = path if itself else find(path, log)
    if folder is None:
        raise ConfigError(f"'{path}' is neither a checkpoint (a step_… folder) nor a run folder that has one")
    return folder


def load(folder: Path) -> CheckpointState:
    """Verify and read a checkpoint; tensors are on the CPU. Raises DataError naming the damaged file."""
    with _verified(folder):
        facts = json.loads((folder / STATE).read_text())
        step = int(facts.pop("step"))
        facts.pop("optimizer_scalars")
        memory = load_file(folder / MEMORY) if MEMORY in _listed(folder) else {}
        return CheckpointState(step, load_file(folder / MODEL), load_file(folder / OPTIMIZER), facts, memory)


def step_of(folder: Path) -> int:
    """Finished optimiser steps of a checkpoint. Raises DataError as `load`."""
    with _verified(folder, STATE):
        return int(json.loads((folder / STATE).read_text())["step"])


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Verify and read the weights alone, by name ("towers.x_tower.…", "objective.logit_scale")."""
    with _verified(folder, MODEL):
        return load_file(folder / MODEL)


@contextmanager
def _verified(folder: Path, *names: str) -> Iterator[None]:
    """Verify these files, or all, before the block reads them.

    Raises DataError, also for files that are as the manifest says and yet no checkpoint.
    """
    verify(folder, names or FILES)
    try:
        yield
    except (SafetensorError, *OTHER_SHAPE) as error:
        raise DataError(f"{folder} is no checkpoint of ours: {str(error)[:200] or type(error).__name__}") from error


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compare these files with the manifest.

    Raises DataError naming the first one that is missing, cut short or changed; ConfigError for another format.
    """
    files = _listed(folder)
    for name in names:
        if name == MEMORY and name not in files and not (folder / name).exists():
            continue
        path, expected = folder / name, files.get(name) or {}
        if not path.is_file():
            raise DataError(f"{path} is missing")
        if path.stat().st_size != expected.get("bytes"):
            raise DataError(f"{path} has {path.stat().st_size} bytes, not {expected.get('bytes')}")
        if sha256_of(path) != expected.get("sha256"):
            raise DataError(f"{path} has changed since it was written (SHA-256 differs)")


def tidy(run_dir: Path) -> None:
    """Remove what a killed save left: .partial and .old folders, the latter called .aside by earlier versions.

    Call on rank 0 when a run starts, before `find`.
    """
    for left in sorted((run_dir / "checkpoints").glob(".step_*.*")):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".partial" or final.exists():
            remove(left)
        else:  # killed between the two renames of whole_folder: the old checkpoint counts
            os.rename(left, final)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` in the memory layout of `parameter` (channels last, for example).

    It is a copy because `value` is mapped from a file that may be deleted. It has that layout because the fused AdamW
    ignores strides.
    """
    same = value.shape == parameter.shape
    return empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value) if same else value.clone()


def _listed(folder: Path) -> dict[str, Any]:
    """The manifest's entry of each file. Raises DataError when it cannot be read, ConfigError for another format."""
    manifest = folder / MANIFEST
    try:
        content = json.loads(manifest.read_text())
        version, files = int(content["format"]), {name: dict(file) for name, file in content["files"].items()}
    except (OSError, *OTHER_SHAPE) as error:
        raise DataError(f"{manifest} cannot be read: {error}") from error
    if version != FORMAT:
        age, way_out = ("a newer", "update Dyad") if version > FORMAT else ("an older", "use that one, or begin anew")
        raise ConfigError(f"{folder} is of {age} Dyad (format {version}, this one reads {FORMAT}): {way_out}")
    return files


def _refuse_another_model(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError unless the names and shapes of `weights` are those of `modules`."""
    own = named_tensors(modules)
    given = {name: tensor for name, tensor in weights.items() if name.partition(".")[0] in modules}
    problems = {
        "not in the checkpoint": [n for n in own if n not in given],
        "not in this model": [n for n in given if n not in own],
        "of another shape": [
            f"{n} {tuple(given[n].shape)} there, {tuple(own[n].shape)} here"
            for n in own
            if n in given and given[n].shape != own[n].shape
        ],
    }
    shown = "".join(
        f"\n  {what}: {', '.join(names[:4])}" + f" and {len(names) - 4} more" * (len(names) > 4)
        for what, names in problems.items()
        if names
    )
    if shown:
        raise ConfigError(f"the checkpoint is of another model:{shown}")


def _write(folder: Path, state: CheckpointState) -> None:
    files = {MODEL: state.model, OPTIMIZER: state.optimizer, **({MEMORY: state.memory} if state.memory else {})}
    for name, tensors in files.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
    # optimizer_scalars: format 2 has this key for optimiser state that is no tensor. AdamW has none.
    facts = {"step": state.step, **state.facts, "optimizer_scalars": {}}
    (folder / STATE).write_text(json.dumps(facts, indent=1))
    names = (*files, STATE)

    def described(name: str) -> dict[str, Any]:
        path = folder / name
        digest = sha256_of(path)
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": digest}

    with ThreadPoolExecutor() as pool:  # hashing one file overlaps with waiting for the disk to take another
        entries = dict(zip(names, pool.map(described, names), strict=True))
    write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})

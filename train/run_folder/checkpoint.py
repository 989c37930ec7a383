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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, empty_like, nn, no_grad
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import remove, sync, write_json
from dyad.data.shards.storage import sha256_of

FORMAT = 2
MODEL, OPTIMIZER, MEMORY = "model.safetensors", "optimizer.safetensors", "memory.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}  # class → attribute of the real module
# errors of reading JSON that has another structure than ours
OTHER_SHAPE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass
class CheckpointState:
    """The content of a checkpoint: tensors by name.

    step: finished optimiser steps; facts: JSON of the caller's choice; optimizer_scalars: optimiser state that is no
    tensor; memory: per-sample state of all samples.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    optimizer_scalars: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)


def named_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers as "<module>.<path>", each once (shared ones under their first name).

    Wrappers for data parallelism and compilation leave no trace in the names: they may change between two starts.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for part, module in modules.items():
        for name, tensor in _walk(module, f"{part}."):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def capture(
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    step: int,
    facts: dict[str, Any],
    memory: Mapping[str, Tensor] | None = None,
) -> CheckpointState:
    """What `save` writes. It holds references, not copies: save or copy it before the next step."""
    assert not {"step", "optimizer_scalars"} & set(facts), "these keys of state.json are the checkpoint's own"
    model = named_tensors(modules)
    name_of = {id(tensor): name for name, tensor in model.items()}
    entries = {
        f"{name_of[id(parameter)]}/{key}": value
        for parameter, slots in optimizer.state.items()
        for key, value in slots.items()
        if value is not None
    }
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in entries.items() if name not in tensors}
    return CheckpointState(step, model, tensors, facts, scalars, dict(memory or {}))


def restore(state: CheckpointState, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Restore weights and optimiser, bit for bit. The memory is the caller's: each rank loads its own part of it.

    Raises ConfigError, with nothing changed, for a checkpoint of another model.
    """
    _refuse_another_model(state.model, modules)
    named = named_tensors(modules)
    # torch numbers optimiser state by the position of its parameter; the checkpoint names it
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    slots: dict[int, dict[str, Any]] = {}
    for entry, value in {**state.optimizer, **state.optimizer_scalars}.items():
        name, _, key = entry.rpartition("/")
        if name not in named or id(named[name]) not in position:
            raise ConfigError(f"the checkpoint has optimiser state of '{name}', which this model does not train")
        own = _like(named[name], value) if isinstance(value, Tensor) else value
        slots.setdefault(position[id(named[name])], {})[key] = own
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
    final = run_dir / "checkpoints" / name(state.step)
    partial, aside = _beside(final, "partial"), _beside(final, "aside")
    try:
        before_save()
        remove(partial)
        partial.mkdir(parents=True)
        _write(partial, state)
        if final.exists():  # damaged, so that the run went on from an older one; or this step was saved before
            os.rename(final, aside)  # tidy() undoes this after a kill before the next line
        os.rename(partial, final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        remove(partial)
        needed = sum(t.nbytes for part in (state.model, state.optimizer, state.memory) for t in part.values())
        free = shutil.disk_usage(next(p for p in (run_dir, *run_dir.parents) if p.exists())).free
        reason = f"{error} (it needs {needed:,} bytes, {free:,} are free)"
        raise HardwareError(f"cannot write checkpoint {final}: {reason}") from error
    remove(aside)
    not_newer = [folder for step, folder in _checkpoints(run_dir) if step <= state.step]
    for folder in not_newer[keep:]:
        with suppress(OSError):  # a folder that cannot be deleted is no reason to stop
            os.rename(folder, _beside(folder, "partial"))  # first: a half deleted one must not look whole
            remove(_beside(folder, "partial"))
    return final


def find(run_dir: Path, log: Callable[[str], None]) -> Path | None:
    """The run's newest checkpoint that verifies, None when it has no checkpoints. log: prints which are passed over.

    Raises DataError when there are checkpoints and none verifies, ConfigError when one is from a newer Dyad.
    """
    found = _checkpoints(run_dir)
    for _, folder in found:
        try:
            verify(folder)
            return folder
        except DataError as error:
            log(f"passing over a damaged checkpoint: {error}")
    if found:
        parent = found[0][1].parent
        raise DataError(f"none of the {len(found)} checkpoints in {parent} is whole. resume=never begins again")
    return None


def name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def steps(run_dir: Path) -> list[int]:
    """The steps of the run's checkpoints, newest first."""
    return [step for step, _ in _checkpoints(run_dir)]


def locate(path: Path, log: Callable[[str], None]) -> Path:
    """The checkpoint that `path` means: itself, whole or not, or the newest whole one of a run folder.

    Raises ConfigError when there is none, DataError when a run has some and none is whole. log: as in `find`.
    """
    itself = re.fullmatch(r"step_\d{8,}", path.resolve().name) or (path / MANIFEST).exists()
    folder = path if itself else find(path, log)
    if folder is None:
        raise ConfigError(f"'{path}' is neither a checkpoint (a step_… folder) nor a run folder that has one")
    return folder


def load(folder: Path) -> CheckpointState:
    """Verify and read a checkpoint; tensors are on the CPU. Raises DataError naming the damaged file."""
    verify(folder)
    with _reading(folder):
        facts = json.loads((folder / STATE).read_text())
        step, scalars = facts.pop("step"), dict(facts.pop("optimizer_scalars"))
        model, optimizer = load_file(folder / MODEL), load_file(folder / OPTIMIZER)
        memory = load_file(folder / MEMORY) if MEMORY in _listed(folder) else {}
        return CheckpointState(int(step), model, optimizer, facts, scalars, memory)


def step_of(folder: Path) -> int:
    """Finished optimiser steps of a checkpoint. Raises DataError as `load`."""
    verify(folder, only=(STATE,))
    with _reading(folder):
        return int(json.loads((folder / STATE).read_text())["step"])


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights alone, by name ("towers.x_tower.…", "objective.logit_scale"), verified."""
    verify(folder, only=(MODEL,))
    with _reading(folder):
        return load_file(folder / MODEL)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises DataError for files that are as the manifest says and yet no checkpoint."""
    try:
        yield
    except (SafetensorError, *OTHER_SHAPE) as error:
        raise DataError(f"{folder} is no checkpoint of ours: {str(error)[:200] or type(error).__name__}") from error


def verify(folder: Path, only: tuple[str, ...] = (MODEL, OPTIMIZER, MEMORY, STATE)) -> None:
    """Raises DataError naming the first file that is missing, cut short or changed; ConfigError for another format."""
    files = _listed(folder)
    for name in only:
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
    """Remove what a killed save left. Call on rank 0 when a run starts, before `find`."""
    folder = run_dir / "checkpoints"
    for aside in folder.glob(".step_*.aside"):  # killed between the two renames: the old checkpoint counts
        final = folder / aside.name.removeprefix(".").removesuffix(".aside")
        if final.exists():
            remove(aside)
        else:
            os.rename(aside, final)
    for partial in folder.glob(".step_*.partial"):
        remove(partial)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` in the memory layout of `parameter` (channels last, for example).

    A copy, as `value` is mapped from a file that may be deleted. In that layout, as the fused AdamW ignores strides.
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
    if any(problems.values()):
        shown = "".join(
            f"\n  {what}: {', '.join(names[:4])}" + f" and {len(names) - 4} more" * (len(names) > 4)
            for what, names in problems.items()
            if names
        )
        raise ConfigError(f"the checkpoint is of another model:{shown}")


def _write(folder: Path, state: CheckpointState) -> None:
    files = {MODEL: state.model, OPTIMIZER: state.optimizer, **({MEMORY: state.memory} if state.memory else {})}
    for name, tensors in files.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
    facts = {"step": state.step, **state.facts, "optimizer_scalars": state.optimizer_scalars}
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


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every parameter and persistent buffer below a module, wrapped or not."""
    while attribute := WRAPPERS.get(type(module).__name__):
        module = getattr(module, attribute)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder), newest first."""
    named = ((re.fullmatch(r"step_(\d{8,})", p.name), p) for p in (run_dir / "checkpoints").glob("step_*"))
    return sorted(((int(match[1]), path) for match, path in named if match and path.is_dir()), reverse=True)


def _beside(folder: Path, role: str) -> Path:
    return folder.with_name(f".{folder.name}.{role}")

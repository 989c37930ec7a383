"""The run folder: its name, its config.yaml, and what may change when the run goes on. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.errors import ConfigError
from train.config import TrainConfig

# Keys that leave the maths alone: they may differ between two starts of one run and do not enter its name.
FREE = (
    "run.",
    "tracking.",
    "eval.",
    "checkpoint.",
    "dist.",
    "resume",
    "compile",
    "data.workers",
    "data.val",
    "model.memo_mb",
)


def run_folder(config: TrainConfig) -> Path:
    """`<run.dir>/<run.name>`; the name defaults to `<experiment>-<8 hex of what matters to the maths>`."""
    matter = json.dumps(what_matters(config), sort_keys=True)
    digest = hashlib.sha256(matter.encode()).hexdigest()[:8]
    return Path(config.run.dir) / (config.run.name or f"{config.experiment or config.task.value}-{digest}")


def what_matters(config: TrainConfig) -> dict[str, Any]:
    """The keys that change the trained weights, flat."""
    return {k: v for k, v in _flat(_plain(config)).items() if not k.startswith(FREE)}


def open_run(config: TrainConfig) -> Path:
    """The run folder with this configuration in its config.yaml.

    Raises ConfigError when the folder belongs to a run that differs in a key that changes the weights.
    """
    folder = run_folder(config)
    saved = folder / "config.yaml"
    if saved.exists():
        _refuse_changes(
            folder, _flat(OmegaConf.to_container(OmegaConf.load(saved), enum_to_str=True)), _flat(_plain(config))
        )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = saved.with_suffix(".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    os.replace(temporary, saved)
    return folder


def _refuse_changes(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = [k for k in sorted({*old, *new}) if not k.startswith(FREE) and old.get(k) != new.get(k)]
    if changed:
        shown = "\n".join(f"  {k}: {old.get(k)} there, {new.get(k)} now" for k in changed[:3])
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise ConfigError(
            f"{folder} is a run with another configuration{more}:\n{shown}\nChoose another run.name, or the old values."
        )


def _plain(config: TrainConfig) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {k: v for name, branch in tree.items() for k, v in _flat(branch, f"{prefix}{name}.").items()}

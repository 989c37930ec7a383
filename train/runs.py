"""The run folder: its name, its config.yaml, and what may change when the run goes on. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.errors import ConfigError
from train.config import TrainConfig

CONFIG = "config.yaml"
CONTENT = (CONFIG, "checkpoints", "metrics.jsonl", "eval", "negatives")  # what one training leaves

# Keys that leave the maths alone: they may differ between two starts of one run and do not enter its name.
FREE = (
    "run.",
    "tracking.",
    "eval.",
    "checkpoint.",
    "dist.",
    "resume",
    "compile",
    "keep_graphs",
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


def check_run(config: TrainConfig) -> None:
    """Raise ConfigError when the run has a checkpoint of another configuration, by the keys that change the weights."""
    folder = run_folder(config)
    if config.resume == "never" or not _has_checkpoint(folder) or not (folder / CONFIG).exists():
        return
    old, new = _flat(OmegaConf.to_container(OmegaConf.load(folder / CONFIG), enum_to_str=True)), _flat(_plain(config))
    changed = [k for k in sorted({*old, *new}) if not k.startswith(FREE) and old.get(k) != new.get(k)]
    if changed:
        shown = "\n".join(f"  {k}: {old.get(k)} there, {new.get(k)} now" for k in changed[:3])
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise ConfigError(
            f"{folder} is a run with another configuration:\n{shown}{more}\n"
            "Choose another run.name, or the old values; resume=never begins again and puts the old run aside"
        )


def open_run(config: TrainConfig) -> Path:
    """The run folder with this configuration in its config.yaml. With resume=never what it had is put aside.

    Call while it is locked. Raises ConfigError as `check_run`.
    """
    check_run(config)
    folder = run_folder(config)
    if config.resume == "never" and _has_checkpoint(folder):
        aside = folder / f"before-{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside.mkdir()
        for name in CONTENT:
            if (folder / name).exists():
                os.rename(folder / name, aside / name)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{CONFIG}.partial"
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    os.replace(temporary, folder / CONFIG)
    return folder


def is_finished(config: TrainConfig) -> bool:
    """Whether this command has nothing left to do."""
    folder = run_folder(config)
    try:
        state = json.loads((folder / "run_state.json").read_text())
    except (OSError, ValueError):
        return False
    return config.resume == "auto" and state["status"] == "finished" and _has_checkpoint(folder, state["step"])


def _has_checkpoint(folder: Path, step: int | None = None) -> bool:
    return any((folder / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}"))


def _plain(config: TrainConfig) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {k: v for name, branch in tree.items() for k, v in _flat(branch, f"{prefix}{name}.").items()}

"""The run folder: its name, its config.yaml, and what may change when the run goes on. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.errors import ConfigError
from data.secrets import without_secrets
from train.config import TrainConfig
from train.files import replace

CONFIG = "config.yaml"
CONTENT = (CONFIG, "checkpoints", "metrics.jsonl", "ledger.jsonl", "eval", "negatives")  # what one training leaves
COUNTED = ("metrics.jsonl", "ledger.jsonl", "eval", "negatives")  # of it, what counts steps; and the checkpoints

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
    "optim.patience",
    "data.workers",
    "data.timeout",
    "data.bad_",
    "data.val",
    "model.memo_mb",
)

# Keys that may change with another batch, or with more data: what counts steps, and how long the run is
WITH_BATCH = (
    *("global_batch_size", "steps", "epochs", "optim.warmup", "optim.cooldown"),
    "data.negatives.refresh_every",
)
WITH_DATA = ("data.train", "data.passage.corpus", "steps", "epochs")


def run_folder(config: TrainConfig) -> Path:
    """`<run.dir>/<run.name>`; the name defaults to `<experiment>-<8 hex of what matters to the maths>`."""
    matter = json.dumps(what_matters(config), sort_keys=True)
    digest = hashlib.sha256(matter.encode()).hexdigest()[:8]
    return Path(config.run.dir) / (config.run.name or f"{config.experiment or config.task.value}-{digest}")


def all_keys(config: TrainConfig) -> dict[str, Any]:
    """Every key, dotted, with its value."""
    return _flat(_plain(config))


def what_matters(config: TrainConfig) -> dict[str, Any]:
    """The keys that change the trained weights, flat."""
    return {k: v for k, v in all_keys(config).items() if not k.startswith(FREE)}


def check_run(config: TrainConfig) -> None:
    """Raise ConfigError when the run has a checkpoint of another configuration, by the keys that change the weights.

    What `resume` allows may change; whether the data then fit shows when they are opened.
    """
    folder, resume = run_folder(config), config.resume
    if resume.mode == "never" or not _has_checkpoint(folder) or not (folder / CONFIG).exists():
        return
    old, new = _flat(OmegaConf.to_container(OmegaConf.load(folder / CONFIG), enum_to_str=True)), _flat(_plain(config))
    allowed = (*WITH_BATCH * resume.allow_batch_change, *WITH_DATA * resume.allow_more_data)
    fixed = sorted({*old, *new} - {*allowed})
    changed = [k for k in fixed if not k.startswith(FREE) and old.get(k) != new.get(k)]
    if changed:
        shown = "\n".join(f"  {k}: {old.get(k)} there, {new.get(k)} now" for k in changed[:3])
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise ConfigError(
            f"{folder} is a run with another configuration:\n{shown}{more}\n"
            "Choose another run.name, or the old values; resume=never begins again and puts the old run aside"
            f"{_way_out(changed)}"
        )


def open_run(config: TrainConfig) -> Path:
    """The run folder with this configuration in its config.yaml. With resume=never what it had is put aside.

    Call while it is locked. Raises ConfigError as `check_run`.
    """
    check_run(config)
    folder = run_folder(config)
    if config.resume.mode == "never" and _has_checkpoint(folder):
        put_aside(folder, CONTENT)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(_plain(config))).encode())
    return folder


def put_aside(folder: Path, names: Iterable[str]) -> None:
    """Move files and folders of a run, by name and in this order, to before-<date>/ inside it."""
    aside = folder / f"before-{datetime.now():%Y%m%d-%H%M%S-%f}"
    for name in names:
        if (folder / name).exists():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / name, aside / name)


def is_finished(config: TrainConfig) -> bool:
    """Whether this command has nothing left to do. More data or another batch may have made the run longer."""
    folder, resume = run_folder(config), config.resume
    try:
        state = json.loads((folder / "run_state.json").read_text())
    except (OSError, ValueError):
        return False
    as_it_was = resume.mode == "auto" and not (resume.allow_batch_change or resume.allow_more_data)
    return as_it_was and state["status"] == "finished" and _has_checkpoint(folder, state["step"])


def _way_out(changed: Iterable[str]) -> str:
    """What allows these changes, if anything does."""
    ways = {
        "\nresume.allow_batch_change=true goes on at the same number of samples": WITH_BATCH,
        "\nresume.allow_more_data=true goes on where files were only added behind the old ones": WITH_DATA,
    }
    return next((way for way, keys in ways.items() if set(changed) <= set(keys)), "")


def _has_checkpoint(folder: Path, step: int | None = None) -> bool:
    return any((folder / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}"))


def _plain(config: TrainConfig) -> Any:
    """As config.yaml has it: a signed URL is the same data when it is signed anew, and nobody reads the signature."""
    return without_secrets(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {k: v for name, branch in tree.items() for k, v in _flat(branch, f"{prefix}{name}.").items()}

"""The run folder: its name, its config.yaml, and what may change when the run goes on. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.tokens import (
    AliasToken,
    BlockEndToken,
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingEndToken,
    FlowMappingStartToken,
    FlowSequenceEndToken,
    FlowSequenceStartToken,
    Token,
)

from data.errors import ConfigError, first_line
from data.foreign import own_file
from data.json_text import read_json
from data.secrets import public_path, without_secrets
from train.config import TrainConfig
from train.files import replace

CONFIG = "config.yaml"
LARGEST, DEEPEST = 1 << 20, 64  # bytes and levels of it
STARTS = (BlockMappingStartToken, BlockSequenceStartToken, FlowMappingStartToken, FlowSequenceStartToken)
ENDS = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)
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

# Keys that older runs do not have, with the value that leaves the default name of a run as it was
ADDED = {"model.batch_norm": "global", "model.text.lower_case": False, "model.text.dense": False}

# Keys that may change with another batch, or with more data: what counts steps, and how long the run is
WITH_BATCH = (
    *("global_batch_size", "steps", "epochs", "optim.warmup", "optim.cooldown"),
    "data.negatives.refresh_every",
)
WITH_DATA = ("data.train", "data.passage.corpus", "steps", "epochs")


def run_folder(config: TrainConfig) -> Path:
    """`<run.dir>/<run.name>`; the name defaults to `<experiment>-<8 hex of what matters to the maths>`."""
    keys = {key: value for key, value in what_matters(config).items() if ADDED.get(key, ...) != value}
    matter = json.dumps(keys, sort_keys=True)
    digest = hashlib.sha256(matter.encode()).hexdigest()[:8]
    return Path(config.run.dir) / (config.run.name or f"{config.experiment or config.task.value}-{digest}")


def all_keys(config: Any) -> dict[str, Any]:
    """Every key of a configuration, an instance or a class with its defaults, as dotted key → value."""
    return flat(_plain(config))


def what_matters(config: TrainConfig) -> dict[str, Any]:
    """The keys that change the trained weights, flat."""
    return {k: v for k, v in all_keys(config).items() if not k.startswith(FREE)}


def by_section(keys: Mapping[str, Any]) -> dict[str, str]:
    """Section → "key=value, …" for people, of dotted keys; keys outside sections are in "training"."""
    found: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, dot, _ = key.partition(".")
        found.setdefault(section if dot else "training", []).append(
            f"{key.removeprefix(f'{section}.')}={_public(value)}"
        )
    return {section: ", ".join(values) for section, values in found.items()}


def _public(value: Any) -> Any:
    """A value without the path of a home folder."""
    if isinstance(value, list):
        return [_public(item) for item in value]
    if value is None:
        return "null"
    return "::".join(map(public_path, value.split("::"))) if isinstance(value, str) else value


def saved_config(folder: Path) -> dict[str, Any]:
    """The tree in config.yaml of a run folder, with ${…} as it stands there. Raises ConfigError when it has none."""
    path = folder / CONFIG
    if own_file(folder, CONFIG) is None:
        raise ConfigError(f"'{folder}' is no run folder: it has no {CONFIG} of its own. Give one, e.g. runs/NAME")
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8")
        _check_tokens(yaml.scan(text))
        tree = OmegaConf.to_container(OmegaConf.create(text), enum_to_str=True)
        OmegaConf.to_yaml(tree)  # whole numbers of 5,000 digits can be read, and not written
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is no configuration: it has no keys")
    return {str(key): value for key, value in tree.items()}


def _check_tokens(tokens: Iterable[Token]) -> None:
    """Raises ValueError for YAML of a few kilobytes that would take gigabytes or hours: Dyad writes no such thing."""
    depth = 0
    for token in tokens:
        depth += isinstance(token, STARTS) - isinstance(token, ENDS)
        if isinstance(token, AliasToken) or depth > DEEPEST:
            raise ValueError("it has aliases (*name), which unfold" if depth <= DEEPEST else "it is nested too deep")


def check_run(config: TrainConfig) -> None:
    """Raise ConfigError when the run has a checkpoint of another configuration, by the keys that change the weights.

    What `resume` allows may change; whether the data then fit shows when they are opened. A run that began before a key
    was added takes any value of it.
    """
    folder, resume = run_folder(config), config.resume
    if resume.mode == "never" or not _has_checkpoint(folder) or not (folder / CONFIG).exists():
        return
    old, new = flat(saved_config(folder)), flat(_plain(config))
    allowed = (*WITH_BATCH * resume.allow_batch_change, *WITH_DATA * resume.allow_more_data)
    unknown = {key for key in ADDED if key not in old}
    fixed = sorted({*old, *new} - {*allowed} - unknown)
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
    as_it_was = resume.mode == "auto" and not (resume.allow_batch_change or resume.allow_more_data)
    try:
        state = read_json(folder / "run_state.json")
    except (OSError, ValueError):
        return False
    match state:
        case {"status": "finished", "step": int(step)}:
            return as_it_was and _has_checkpoint(folder, step)
    return False


def _way_out(changed: Iterable[str]) -> str:
    """What allows these changes, if anything does."""
    ways = {
        "\nresume.allow_batch_change=true goes on at the same number of samples": WITH_BATCH,
        "\nresume.allow_more_data=true goes on where files were only added behind the old ones": WITH_DATA,
    }
    return next((way for way, keys in ways.items() if set(changed) <= set(keys)), "")


def _has_checkpoint(folder: Path, step: int | None = None) -> bool:
    return any((folder / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}"))


def _plain(config: Any) -> Any:
    """As config.yaml has it: a signed URL is the same data when it is signed anew, and nobody reads the signature."""
    return without_secrets(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of a tree of mappings."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {k: v for name, branch in tree.items() for k, v in flat(branch, f"{prefix}{name}.").items()}

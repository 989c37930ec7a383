"""The run folder: its name, its config.yaml, and the keys that may change when the run resumes. Needs no torch."""

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.files import file_inside, open_foreign, read_lines, remove, write_bytes, write_errors
from dyad.data.base.json_text import read_json
from dyad.data.base.secrets import public_path, without_secrets
from dyad.data.config import CaptionPer
from dyad.train.arguments import as_argument
from dyad.train.config import Activation, Precision, TrainConfig
from dyad.train.run_folder.older_runs import ADDED, UNNAMED, UNRECORDED, in_first_terms, in_present_terms
from dyad.train.towers.libraries.kept_files import KEPT, keep_files, refuse_changed_files

CONFIG, STATE, REPORT = "config.yaml", "run_state.json", "report.html"
RESUMED_FROM = "resumed_from"  # key of run_state.json: the checkpoint that resume= named when the run began there
FIRST_STEP = "first_step"  # key of run_state.json: the step at which the last start began
SINCE_BEST = "evaluations_since_best"  # key of run_state.json, of a run that checkpoint.patience has ended early
BEST_SUFFIX = "@best"
FORMAT = 1  # version of the run folder, in run_state.json (1 if it has none); raised by the rule in checkpoint.py
LARGEST, DEEPEST = 1 << 20, 64  # the most bytes, and the most levels of nesting, of a config.yaml that is read
# files and folders whose content depends on the step that was reached, besides the checkpoints
STEP_FILES = ("metrics.jsonl", "ledger.jsonl", "restarts.jsonl", "eval", "negatives", "profile")
RECORDS = ("metrics.jsonl", "ledger.jsonl")  # those that a run which begins anew would cut
# what a training leaves in its folder, in the order of being put aside. After a kill between two moves, checkpoints
# stand beside their own configuration, and what a new run would write over has been moved.
RUN_FILES = (*STEP_FILES, "checkpoints", KEPT, CONFIG)

# Keys, or beginnings of keys, that do not change the weights: they may change on resume and are not in the run's name
NOT_MATHS = tuple(
    """run. tracking. eval. checkpoint. dist. resume compile deterministic profile keep_graphs optim.max_skipped
    data.workers data.timeout data.bad_ data.val model.frozen_cache_mb plugins plan.""".split()
)

# Keys that may always change: how long the run is; the recipe, whose keys are compared, and what changes memory alone
LENGTH, FREE = ("steps", "epochs"), ("experiment", "model.grad_checkpointing")
# Keys that may change with another batch size, or with more data
WITH_BATCH = "global_batch_size optim.warmup optim.cooldown data.negatives.refresh_every".split()
WITH_DATA = ("data.train", "data.passage.corpus")


def without_best(path: Path) -> Path:
    """Return `path` without the suffix "@best"; unchanged if it has none, or if `path` itself exists."""
    return path if path.exists() else Path(str(path).removesuffix(BEST_SUFFIX))


def run_folder(config: TrainConfig) -> Path:
    """Return the path of a run's folder, `<run.dir>/<run.name>`.

    Without run.name, the name is `<experiment>-<8 hex digits>`, or `<task>-<8 hex digits>` without an experiment. If
    the experiment is a recipe file, `<experiment>` is the name of the file without folder and suffix. The digits are a
    hash of the keys that change the trained weights (see maths_keys). Keys of UNNAMED, and keys of ADDED that have the
    value listed there, are left out of the hash; precision=auto counts as fp32.
    """
    named = {key: value for key, value in in_first_terms(maths_keys(config)).items() if key not in UNNAMED}
    keys = {key: value for key, value in named.items() if ADDED.get(key, ...) != value}
    keys["precision"] = keys["precision"].replace("auto", "fp32")  # one name on all machines, that of older runs
    recipe = keys["experiment"] = re.sub(r"(.*/)?(.*)\.ya?ml", r"\2", config.experiment or "") or None
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
    return Path(config.run.dir) / (config.run.name or f"{recipe or config.task.value}-{digest}")


def all_keys(config: Any) -> dict[str, Any]:
    """Convert a nested configuration to one dictionary: dotted key ("optim.lr") → value, with secrets redacted.

    config: a dataclass instance, or a dataclass type, which gives its defaults.
    """
    return flat(plain(config))


def maths_keys(config: TrainConfig) -> dict[str, Any]:
    """Return the keys of a configuration that may change the trained weights, all but NOT_MATHS: dotted key → value."""
    return {k: v for k, v in all_keys(config).items() if not k.startswith(NOT_MATHS)}


def by_section(keys: Mapping[str, Any]) -> dict[str, str]:
    """Group dotted keys by section (the part before the first dot), as text for people: section → "key=value, …".

    Keys without a dot are in the section "training". Paths are shortened, so that they show no private folders.
    """
    found: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, dot, _ = key.partition(".")
        shown = f"{key.removeprefix(f'{section}.')}={as_argument(_public(value))}"
        found.setdefault(section if dot else "training", []).append(shown)
    return {section: ", ".join(values) for section, values in found.items()}


def _public(value: Any) -> Any:
    """Return a configuration value for display: texts, also those in lists and mappings, by `public_path`."""
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _public(item) for name, item in value.items()}
    return "::".join(map(public_path, value.split("::"))) if isinstance(value, str) else value


def saved_config(folder: Path) -> dict[str, Any]:
    """Read config.yaml of a run folder, as nested dictionaries.

    Interpolations (${…}) stay unresolved; keys and values of older versions are changed to those of this version.
    Raises ConfigError when the folder has no config.yaml, when config.yaml is a symbolic link out of the folder or
    cannot be read, and when the folder's format version is newer than FORMAT.
    """
    version = recorded_state(folder).get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise ConfigError(f"{folder} is of a newer Dyad (format {version}, this one reads {FORMAT}): update Dyad")
    if file_inside(folder, CONFIG) is None:
        raise ConfigError(f"'{folder}' is no run folder: it has no {CONFIG} of its own. Give one, e.g. runs/NAME")
    return in_present_terms(read_yaml(folder / CONFIG))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file that a stranger may have written, as nested dictionaries; ${…} stays unresolved.

    Raises ConfigError when it cannot be read, has more than LARGEST bytes, has YAML aliases (*name), is nested deeper
    than DEEPEST, or is a list, a number or a bool.
    """
    try:
        tree = copy.deepcopy(_parsed(config_text(path)))
    except AssertionError:  # of OmegaConf, for a number or a bool
        tree = None
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is no configuration: it has no keys")
    return {str(key): value for key, value in tree.items()}


@lru_cache(maxsize=4)
def _parsed(text: str) -> Any:
    """Parse YAML text that a stranger may have written, without resolving ${…}. Raises ValueError as `_check_nesting`.

    Results are cached, so a caller must not change them: a start that resumes parses the same text a dozen times, at
    0.1 s each.
    """
    _check_nesting(text)
    tree = OmegaConf.to_container(OmegaConf.create(text), enum_to_str=True)
    OmegaConf.to_yaml(tree)  # whole numbers of 5,000 digits can be read, and not written
    return tree


def config_text(path: Path) -> str:
    """Return the text of a YAML file that a stranger may have written.

    Raises OSError if the file cannot be read, ValueError if it has more than LARGEST bytes or is not UTF-8.
    """
    with open_foreign(path, LARGEST) as file:
        return file.read().decode()


def _check_nesting(text: str) -> None:
    """Raise ValueError for YAML text with aliases (*name) or more than DEEPEST levels, which Dyad never writes.

    A few kilobytes of such text could take gigabytes or hours to load.
    """
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent) or depth > DEEPEST:
            raise ValueError("it has aliases (*name), which unfold" if depth <= DEEPEST else "it is nested too deep")


def check_run(config: TrainConfig) -> None:
    """Raise ConfigError if the run folder has a checkpoint of a configuration that trains other weights than `config`.

    Compared are the keys that change the trained weights (see maths_keys), with those in the folder's config.yaml; keys
    that it lacks count as having the value in ADDED, or None. Not compared are LENGTH, FREE, chunk_size (except with
    batch norms per chunk), keys that `resume` lets change, keys of UNRECORDED that it lacks, and what a resume keeps:
    model.activation, precision=auto, a recorded data.caption_per=line. With resume=never no key is compared. Files
    that describe the model are, by `refuse_changed_files`, with those of the run from which the weights come.
    """
    refuse_changed_files(config, origin_run(config))
    if (old := resumed_keys(config)) is None:
        return
    folder, resume = run_folder(config), config.resume
    new = {**all_keys(config), "precision": recorded_precision(config).value}
    new["model.activation"] = recorded_activation(config).value
    new["data.caption_per"] = recorded_caption_per(config).value
    free = {*LENGTH, *FREE, *(set(UNRECORDED) - {*old})}
    free |= {*["chunk_size"] * (not config.learns_by_chunks)}
    free |= {*WITH_BATCH * resume.allow_batch_change, *WITH_DATA * resume.allow_more_data}
    old = {**{key: ADDED[key] for key in ADDED.keys() & new.keys() - UNRECORDED}, **old}
    changed = [k for k in {*old, *new} - free if not k.startswith(NOT_MATHS) and old.get(k) != new.get(k)]
    changed.sort(key=lambda key: (not key.endswith("name"), key))  # another objective has other options, too
    if changed:
        typed = [key for key in changed if key != "from_weights"] or changed  # it follows from what was typed
        values = ((k, as_argument(old.get(k)), as_argument(new.get(k))) for k in typed[:3])
        shown = "\n".join(f"  {key}: {there} there, {now} now" for key, there, now in values)
        more = f" (and {len(typed) - 3} more)" if len(typed) > 3 else ""
        allowing = f"\nrun.name=NEW resume={folder} goes on from its newest checkpoint, with the same model"
        if {*changed} <= {*WITH_BATCH}:
            allowing = "\nresume.allow_batch_change=true goes on at the same number of samples"
        elif {*changed} <= {*WITH_DATA}:
            allowing = "\nresume.allow_more_data=true goes on if the old files are moved, weighted anew or added to"
        elif "seed" in changed:  # a resume keeps the order of samples
            allowing = ""
        raise ConfigError(
            f"{folder} is a run with another configuration:\n{shown}{more}\n"
            "Choose another run.name, or the old values; resume=never begins again and puts the old run aside"
            f"{allowing}"
        )


def run_of(path: Path) -> Path | None:
    """Return the run folder RUN for RUN, RUN@best and RUN/checkpoints/step_…; None if RUN has no config.yaml."""
    path = without_best(path.expanduser())
    return next((folder for folder in (path, path.parent.parent) if (folder / CONFIG).is_file()), None)


def recorded_precision(config: TrainConfig) -> Precision:
    """Return config.precision; but if it is auto and a run is resumed, the precision in the config.yaml of that run."""
    used = _begun_keys(config).get("precision")
    return Precision(used) if config.precision is Precision.auto and used in list(Precision) else config.precision


def recorded_activation(config: TrainConfig) -> Activation:
    """Return model.activation in the config.yaml of the run that is resumed; for a new run, that of `config`."""
    used = _begun_keys(config).get("model.activation")
    return Activation(used) if used in list(Activation) else config.model.activation


def recorded_caption_per(config: TrainConfig) -> CaptionPer:
    """Return `line` if the resumed run has data.caption_per=line or is older than this key, else that of `config`."""
    used = _begun_keys(config).get("data.caption_per")
    return CaptionPer.line if used == CaptionPer.line else config.data.caption_per


def resume_mode(config: TrainConfig) -> str:
    """Return resume.mode: "auto", "never", or what names a checkpoint: its path, a run folder, or RUN@best.

    Returns "auto" too if the run in the run folder began at that checkpoint and has written checkpoints of its own:
    the same command then resumes this run.
    """
    folder, mode = run_folder(config), config.resume.mode
    begun = recorded_state(folder).get(RESUMED_FROM) == str(Path(mode)) and steps(folder)
    return "auto" if begun else mode


def origin_run(config: TrainConfig) -> Path | None:
    """Return the run folder whose weights a start takes: that which is resumed, or that of init_from; None: no such."""
    return resumed_run(config) or (run_of(Path(config.init_from)) if config.init_from else None)


def resumed_run(config: TrainConfig) -> Path | None:
    """Return the run that is resumed: that in the run folder, or that of resume_mode's path; None for a new run."""
    if (mode := resume_mode(config)) in ("auto", "never"):
        return None if resumed_keys(config) is None else run_folder(config)
    return run_of(Path(mode))


def _begun_keys(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration of the run that is resumed, dotted key → value; {} for a new run."""
    run = resumed_run(config)
    return flat(saved_config(run)) if run else {}


def resumed_keys(config: TrainConfig) -> dict[str, Any] | None:
    """Return the configuration saved in the run folder, dotted key → value.

    Returns None with resume=never, and if the folder has no checkpoint or no config.yaml.
    """
    folder = run_folder(config)
    if config.resume.mode == "never" or not steps(folder) or not (folder / CONFIG).exists():
        return None
    return flat(saved_config(folder))


def open_run(config: TrainConfig, source: Path | None = None, log: Callable[[str], None] = print) -> Path:
    """Make the run folder, write its config.yaml and return the folder. Call it while the folder is locked.

    Files of an earlier start are first moved to a subfolder by `put_aside`. If `source` is a checkpoint of this folder,
    these are the later checkpoints: damaged ones, or those after the one that resume= names. If the folder has
    checkpoints and `source` is none of them, they are all files of the earlier run (RUN_FILES); if it has no
    checkpoints, RECORDS with a step. source: the checkpoint that the run starts from, if any. log: called with a line
    for what is moved, and for a config.yaml that is missing. Raises ConfigError when the folder has a checkpoint whose
    configuration trains other weights (see `check_run`), OSError or HardwareError when moving or writing files fails.
    """
    check_run(config)
    folder = run_folder(config)
    saved = {folder_of(folder, step).resolve(): step for step in steps(folder)}
    begun = saved.get(source.resolve()) if source else None
    if begun is not None:
        put_checkpoints_aside(folder, [step for step in saved.values() if step > begun], log)
        if not (folder / CONFIG).exists():
            log(f"{folder / CONFIG} was missing: whether keys have changed since step {begun} cannot be checked")
    elif saved and resume_mode(config) != "auto":
        put_aside(folder, RUN_FILES, log)
    elif not saved and (reached := _recorded_step(folder)):
        log(f"{folder} was at step {reached:,} and has no checkpoint: it begins anew")
        put_aside(folder, RECORDS, log)
    if begun is None:
        remove(folder / KEPT)  # of a start that wrote no checkpoint
    write_config(config)
    return folder


def write_config(config: TrainConfig) -> None:
    """Make the run folder if there is none, write its config.yaml and `keep_files`. Raises OSError if that fails."""
    folder = run_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    keep_files(config, folder, origin_run(config))
    write_bytes(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(plain(config))).encode())


def _recorded_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl; 0 without the file."""
    path = folder / RECORDS[0]
    return max((record["step"] for _, record in read_lines(path)), default=0) if path.exists() else 0


def put_aside(folder: Path, names: Iterable[str], log: Callable[[str], None]) -> None:
    """Move the files and folders `names` of `folder` that exist, in this order, to its new subfolder before-<time>.

    log: called with a line that names the subfolder and what was moved, if anything was.
    """
    aside = folder / f"before-{datetime.now():%Y%m%d-%H%M%S-%f}"
    found = [name for name in names if (folder / name).exists()]
    for name in found:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, aside / name)
    if found:
        log(f"put aside in {aside}: {', '.join(found)}")


def put_checkpoints_aside(folder: Path, moved: Iterable[int], log: Callable[[str], None]) -> None:
    """Move the checkpoints of the steps `moved` by `put_aside`, the oldest first; raise HardwareError if that fails."""
    with write_errors(folder):
        put_aside(folder, [f"checkpoints/{folder_of(folder, step).name}" for step in sorted(moved)], log)


def recorded_state(folder: Path) -> dict[str, Any]:
    """Read run_state.json of a run folder; {} if it is missing, damaged or a link out of the folder."""
    try:
        state = read_json(folder / STATE, folder=folder)
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the path of the checkpoint folder that the run in `run_dir` writes after `step` optimiser steps."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def steps(run_dir: Path) -> list[int]:
    """Return the step numbers of all checkpoints in the run folder, newest first; damaged checkpoints count too."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()]
    return sorted((int(p.name[5:]) for p in folders if re.fullmatch(r"step_\d{8,}", p.name)), reverse=True)


def plain(config: Any) -> dict[str, Any]:
    """Convert a configuration to nested dictionaries, as config.yaml stores it, with secrets redacted.

    Signatures in URLs are secrets too, so signing a URL again does not look like a change of the data.
    """
    return without_secrets(as_tree(config))


def as_tree(value: Any) -> Any:
    """Convert a dataclass instance, or a dataclass type with its defaults, to nested dictionaries, with enums by name.

    OmegaConf can do the same, but takes 0.1 s.
    """
    if is_dataclass(value):
        # a type lacks the attributes whose default a function makes
        made = {f.name: cast(Any, f.default_factory)() for f in fields(value) if not hasattr(value, f.name)}
        return {f.name: as_tree(getattr(value, f.name, made.get(f.name))) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: as_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_tree(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Convert nested mappings to one dictionary: dotted key ("optim.lr") → value; a list is one value.

    An empty mapping leaves no key. prefix: put before every key.
    """
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {k: v for name, branch in tree.items() for k, v in flat(branch, f"{prefix}{name}.").items()}

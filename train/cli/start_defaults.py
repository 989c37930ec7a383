"""Defaults of keys that the user did not set, from the model folder or the run (init_from) that a run starts from.

A key counts as set if it stands on the command line, in a file of the user, or in the preset that the user chooses by
model=NAME (`typed_keys`). Values of other presets in configs/ were chosen for the preset's own model, so the folder of
a model that the user names overrides them. Imports no torch.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.train.config import KNOWN_BY_WEIGHTS, Task
from dyad.train.run_folder.folder import flat, run_of, saved_config
from dyad.train.run_folder.older_runs import ADDED, UNRECORDED
from dyad.train.towers.libraries.kept_files import KEYS, lost_files
from dyad.train.towers.libraries.published import shared_model_name
from dyad.train.towers.libraries.sentence_transformers import OPEN, folder_of_config

NAMES = ("model.name", "model.text", "model.text.name")  # if one of these is typed, the user names the text model
# Keys that decide the architecture of a model. A run with init_from takes them, and those of OPEN, from the other run
ARCHITECTURE = """
model.name model.pretrained model.activation model.embed_dim model.shared model.head model.head_width model.classes
data.resize
model.image.kind model.image.name model.image.pretrained model.image.image_size model.image.widths
model.image.from_scratch model.image.lora_rank model.image.lora_alpha model.image.lora_targets
model.text.kind model.text.name model.text.pretrained model.text.end_token
model.text.from_scratch model.text.lora_rank model.text.lora_alpha model.text.lora_targets
model.context.kind model.context.layers model.context.width model.context.heads model.context.embed_dim
""".split()

# Keys of these that a single task reads: a run of another would get another name by them
OF_TASK = {"model.head": Task.views, "model.classes": Task.labelled, "model.context.": Task.sequence}


def take_start_defaults(config: DictConfig, typed: Collection[str]) -> None:
    """Replace, in place, values of a composed configuration by those of the model folder or run that it starts from.

    Only keys that the user did not set change. With init_from, the keys ARCHITECTURE and OPEN (those that a
    SentenceTransformer folder may set) get the values of that run. Else, if the user names the text model, keys that
    its SentenceTransformer folder sets become MISSING, so that `fill_defaults` sets them; files of a published model
    are downloaded for this, and a folder that cannot be used is passed over. model.embed_dim becomes null if one model
    of transformers gives both towers and projections. from_weights becomes the options of KNOWN_BY_WEIGHTS of which the
    user set no key. typed: the keys, and sections of keys, that the user set. Raises ConfigError if the configuration
    of the run in init_from or the config.json of such a model cannot be read.
    """

    def is_open(key: str) -> bool:
        return not any(key == name or key.startswith(f"{name}.") for name in typed)

    if config.init_from is None and not {*NAMES}.isdisjoint(typed):
        with suppress(ConfigError):  # for a folder that cannot be used; `fill_defaults` raises it where it matters
            found = folder_of_config(config, fetch=True)
            for key in [*found.defaults, *found.refused] if found else []:
                if key in OPEN and is_open(key) and _has(config, key):
                    OmegaConf.update(config, key, MISSING)
    own: Any = OmegaConf.merge(config.model, {"embed_dim": None})
    if is_open("model.embed_dim") and shared_model_name(own):
        config.model = own  # the projections of both towers are part of the model
    for key, value in _of_run(config).items():
        if is_open(key):
            OmegaConf.update(config, key, value)
    if is_open("from_weights"):
        config.from_weights = [
            name for name, keys in KNOWN_BY_WEIGHTS.items() if all(is_open(f"objective.{key}") for key in keys)
        ]


def _of_run(config: DictConfig) -> dict[str, Any]:
    """Return key → value of the keys ARCHITECTURE and OPEN in the run that init_from names; {} if it names no run.

    Without init_from, the run is the one that is resumed, if files that describe its model are gone. A key that this
    run is too old to have counts as having the value in ADDED; keys of UNRECORDED are left out, and those of OF_TASK
    for another task.
    """
    if (run := run_of(Path(config.init_from)) if config.init_from else _resumed_by_copies(config)) is None:
        return {}
    older = {key: value for key, value in ADDED.items() if key not in UNRECORDED}
    saved = {**older, **flat(saved_config(run))}
    unread = tuple(key for key, task in OF_TASK.items() if config.task != task)
    wanted = [key for key in (*ARCHITECTURE, *sorted(OPEN)) if not key.startswith(unread)]
    return {key: saved[key] for key in wanted if key in saved and _has(config, key)}


def _resumed_by_copies(config: DictConfig) -> Path | None:
    """Return the folder of the run that is resumed, if it alone still has files that describe its model; else None."""
    mode = config.resume.mode
    run = run_of(Path(config.run.dir, config.run.name or "") if mode == "auto" else Path(mode))
    names = [OmegaConf.select(config, name) for name in KEYS]
    return run if run and lost_files(names, run) else None


def _has(config: DictConfig, key: str) -> bool:
    """Whether the configuration has this dotted key, with a value or without one."""
    section, _, name = key.rpartition(".")
    return name in (OmegaConf.select(config, section) or {}).keys()  # noqa: SIM118  `in` overlooks a missing value

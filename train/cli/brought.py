"""Take what nobody typed from what a run starts from: a folder of a model, published weights, or the run of init_from.

A key counts as typed if it stands on the command line or in a recipe file of the user. What a preset of ours sets was
chosen for the preset's own model: for a model that the user names, the folder of that model wins. Imports no torch.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.train.config import Classes, ImageTower, Task, TextTower
from dyad.train.run_folder.folder import flat, run_of, saved_config
from dyad.train.towers.calibration import exported
from dyad.train.towers.published import of_one_model
from dyad.train.towers.sentence_transformers import OPEN, folder_of_config

NAMES = ("model", "model.name", "model.text", "model.text.name")  # one of these typed: the user names the text model
# What makes the weights of a run the model they are; with OPEN, the keys that init_from brings
ARCHITECTURE = """
model.name model.pretrained model.quick_gelu model.embed_dim model.shared data.resize
model.image.kind model.image.name model.image.pretrained model.image.image_size model.image.widths
model.image.from_scratch model.image.lora_rank model.image.lora_alpha model.image.lora_targets
model.text.kind model.text.name model.text.pretrained
model.text.from_scratch model.text.lora_rank model.text.lora_alpha model.text.lora_targets
""".split()
# Option of the objective that weights may know → the keys by which a user sets it
KNOWN = {"temperature": ("temperature", "init_scale"), "init_bias": ("init_bias",)}


def take(config: DictConfig, typed: Collection[str]) -> None:
    """Change, in place, the keys of a composed configuration that what the run starts from decides.

    typed: the keys and groups that the user set. Raises ConfigError for a folder or run whose settings cannot be read.
    """
    for key, value in _of_run(config).items():
        if not _is_set(key, typed):
            OmegaConf.update(config, key, value)
    if config.init_from is None and not {*NAMES}.isdisjoint(typed):
        found = None
        with suppress(ConfigError):  # of a folder that cannot be used; `fill_defaults` says so where it matters
            found = folder_of_config(config, fetch=True)
        for key in [*found.defaults, *found.refused] if found else []:
            if key in OPEN and not _is_set(key, typed) and OmegaConf.select(config, key.rpartition(".")[0]) is not None:
                OmegaConf.update(config, key, MISSING)
    own: Any = OmegaConf.merge(config.model, {"embed_dim": None})
    if not _is_set("model.embed_dim", typed) and of_one_model(own):
        config.model = own  # the projections of both towers are part of the model
    if "from_weights" not in typed and (config.init_from is not None or knows_temperature(config)):
        options = [name for name in KNOWN if name in config.objective and "min_temperature" in config.objective]
        config.from_weights = [
            name for name in options if not any(_is_set(f"objective.{key}", typed) for key in KNOWN[name])
        ]


def knows_temperature(config: DictConfig) -> bool:
    """Whether the weights that the model's keys name may know a temperature: both towers come from one model that has
    one, or the text tower from an export of ours."""
    model = config.model
    if config.task == Task.question_passage:
        name = model.text.name or model.name
        return bool(name) and model.text.kind == TextTower.transformers and exported(name)[1] is not None
    if config.task != Task.image_text and (config.task, model.classes) != (Task.labelled, Classes.prompted):
        return False
    image, text = ((side.name or model.name, side.pretrained or model.pretrained) for side in (model.image, model.text))
    if (model.image.kind, model.text.kind) != (ImageTower.open_clip, TextTower.open_clip) or image != text:
        from_scratch = model.image.from_scratch or model.text.from_scratch
        return not from_scratch and of_one_model(model) is not None
    name, weights = image
    is_folder = name is not None and (name.endswith("open_clip_config.json") or Path(name).expanduser().is_dir())
    return weights is not None or is_folder or str(name).startswith(("hf-hub:", "local-dir:"))


def _of_run(config: DictConfig) -> dict[str, Any]:
    """Return the keys of the run of init_from that make its weights the model they are; {} without such a run."""
    run = None if config.init_from is None else run_of(Path(config.init_from))
    saved = {} if run is None else flat(saved_config(run))
    sections = {key: OmegaConf.select(config, key.rpartition(".")[0]) for key in (*ARCHITECTURE, *sorted(OPEN))}
    return {key: saved[key] for key, section in sections.items() if key in saved and key.rpartition(".")[2] in section}


def _is_set(key: str, typed: Iterable[str]) -> bool:
    """Whether `typed` has the key, a section that holds it, or the preset of the model that it is of."""
    return any(key == name or (key.startswith(f"{name}.") and ("." in name or name == "model")) for name in typed)

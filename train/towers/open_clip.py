"""Find open_clip models by name or config file, and create each once for both towers.

Importing open_clip takes seconds, so only the functions that need it do.
"""

from __future__ import annotations

import copy
import logging
from contextlib import ExitStack
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.json_text import read_json
from dyad.train.config import ImageTower, ModelConfig, TextTower
from dyad.train.towers.adapters import merged
from dyad.train.towers.published import check_open_clip, explained, refuse_code, snapshot
from dyad.train.towers.tower import Tower

if TYPE_CHECKING:
    from dyad.train.towers.build import ImageTextModel

PACKAGE = Path(__file__).absolute().parents[2]  # the folder dyad, in which configs/ is
# Class of a trunk → the attribute with its projection, and whether the class takes None there (or needs a module)
PROJECTIONS = {
    "VisionTransformer": ("proj", True),
    "TextTransformer": ("text_projection", True),
    "ModifiedResNet": ("attnpool", False),
    "TimmModel": ("head", False),
    "HFTextEncoder": ("proj", False),
}


class MatrixProjection(nn.Module):
    """Multiplies x (…, width) by a weight matrix (width, D): open_clip keeps projections as plain matrices."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class BuildContext:
    """Holds what the builders of both towers share: the configuration, and the open_clip models, each created once.

    load_pretrained=False: create architectures without pretrained weights. image_model, text_model: (name, weights) of
    each tower's open_clip model, the arguments of `open_clip_model`, which creates the model at its first call.
    """

    def __init__(self, config: ModelConfig, load_pretrained: bool) -> None:
        self.config, self.load_pretrained = config, load_pretrained
        self.image_model = (config.image.name or config.name, config.image.pretrained or config.pretrained)
        self.text_model = (config.text.name or config.name, config.text.pretrained or config.pretrained)
        self.open_clip_model = cache(self._create)

    def open_clip_parts(self, trunk: Any, frozen: bool, key: str) -> tuple[Any, nn.Module]:
        """Split one tower of an open_clip model into (trunk without projection, projection).

        trunk: the tower; its projection is removed in place. frozen: also freeze the tower except for its last n layer
        groups, as open_clip counts them; n is the value of the configuration key `key`. The projection always trains.
        Raises ConfigError for a tower of which open_clip cannot leave the last groups trainable.
        """
        if self.config.grad_checkpointing:
            trunk.set_grad_checkpointing(True)
        if frozen:
            unlocked = attrgetter(key.removeprefix("model."))(self.config)
            with explained(f"{key}={unlocked}: {type(trunk).__name__} cannot be frozen in part"):
                trunk.lock(unlocked)  # open_clip counts the projection as the last group
        name, takes_none = PROJECTIONS[type(trunk).__name__]
        found = getattr(trunk, name)
        setattr(trunk, name, None if takes_none else nn.Identity())
        projection = MatrixProjection(found) if isinstance(found, nn.Parameter) else found or nn.Identity()
        return trunk, projection.requires_grad_(True)

    def open_clip_tokenizer(self) -> Any:
        """Load the tokenizer of the text tower's open_clip model. Raises ConfigError when it cannot be loaded."""
        import open_clip

        name, advice = self.text_model[0], "Without a network take a folder that has the tokenizer's files"
        with explained(f"model.name={name}: its tokenizer", advice):
            return open_clip.get_tokenizer(model_name(name), context_length=self.config.text.context_length)

    def open_clip_config(self) -> dict[str, Any] | None:
        """Return the open_clip configuration (model_cfg) of the model that both towers come from.

        The image size and context length that the user sets replace its own. Returns None unless both towers come from
        the same open_clip model.
        """
        image, text = self.config.image, self.config.text
        kinds = (image.kind, text.kind)
        if kinds != (ImageTower.open_clip, TextTower.open_clip) or self.image_model[0] != self.text_model[0]:
            return None
        import open_clip

        model_cfg = copy.deepcopy(open_clip.get_model_config(model_name(self.image_model[0])))
        assert model_cfg is not None
        if image.image_size:
            model_cfg["vision_cfg"]["image_size"] = image.image_size
        if text.context_length:
            model_cfg["text_cfg"]["context_length"] = text.context_length
        return model_cfg

    def _create(self, name: str | None, pretrained: str | None) -> Any:
        import open_clip

        registered = model_name(name)
        refuse_code()
        preprocess = check_weights(registered, pretrained)
        weights = f" with weights '{pretrained}'" if pretrained and self.load_pretrained else ""
        advice = "Without a network give weights as a .safetensors or .pt file"
        with explained(f"model.name={name}{weights} cannot be created", advice), ExitStack() as at_exit:
            # open_clip warns of random weights, which are wanted here, and logs errors that are raised as well.
            logging.disable(logging.ERROR)
            at_exit.callback(logging.disable, logging.NOTSET)
            check_open_clip(f"model.name={name}", open_clip.get_model_config(registered))  # before anything is loaded
            model = open_clip.create_model(
                registered,
                pretrained if self.load_pretrained else None,
                load_weights=self.load_pretrained,
                device=torch.get_default_device(),
                force_custom_text=True,  # the text part as a module of its own
                force_image_size=self.config.image.image_size,
                force_context_length=self.config.text.context_length,
                force_preprocess_cfg=preprocess,
                pretrained_text=self.load_pretrained,
                weights_only=True,
            )
        if type(model).__name__ != "CustomTextCLIP":
            raise ConfigError(f"model.name={name} is a {type(model).__name__}, not a pair of towers. Take a CLIP model")
        return model


def model_name(name: str | None) -> str:
    """Convert the user's model.name=`name` to the name under which open_clip creates the model.

    `name` is one of: a model of open_clip.list_models(); the path of an open_clip config .json, which is registered
    with open_clip; a folder with open_clip_config.json and weights; hf-hub:ORG/MODEL, which open_clip itself downloads
    later; hf-hub:ORG/MODEL@REVISION, which is downloaded now; local-dir:FOLDER. Raises ConfigError for any other name,
    and for None.
    """
    if name is None:
        raise ConfigError("model.name is missing: give an open_clip model (ViT-B-32) or an open_clip config .json")
    if name.endswith(".json"):
        return _registered(name)
    if name.startswith("hf-hub:") and "@" in name:
        return f"local-dir:{snapshot('model.name', name.removeprefix('hf-hub:'))}"
    if name.startswith(("hf-hub:", "local-dir:")):
        return name
    if Path(name).expanduser().is_dir():
        return f"local-dir:{Path(name).expanduser()}"
    import open_clip

    listed = name.replace("/", "-")
    if listed not in open_clip.list_models():
        raise ConfigError(
            f"model.name={name}: open_clip has no such model.{nearest(name, open_clip.list_models())} "
            "Any of open_clip.list_models(), or the path of an open_clip config .json"
        )
    return listed


def _registered(path: str) -> str:
    """Register the config .json at `path` with open_clip and return the new model's name: the file name without .json.

    A file of the same name replaces one registered before. A file open_clip_config.json describes the folder that it is
    in: it is not registered, and local-dir:FOLDER is returned. Raises ConfigError if the file is no open_clip config.
    """
    file = Path(path).expanduser()
    if path.startswith("configs/") and not file.exists():  # of one of our presets, which may run outside a checkout
        file = PACKAGE / path
    with explained(f"model.name={path} cannot be read", "Give an open_clip config"):
        content = read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"model.name={path}: no open_clip config, which is a JSON object")
    if "model_cfg" in content and file.name == "open_clip_config.json":
        return f"local-dir:{file.parent}"
    if missing := [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in content]:
        raise ConfigError(f"model.name={path}: no open_clip config, it lacks {', '.join(missing)}")
    import open_clip

    open_clip.add_model_config(file)
    return file.stem


def check_weights(name: str, pretrained: str | None) -> dict[str, Any]:
    """Check that the weights `pretrained` of open_clip's model `name` exist, and return their image preprocessing.

    pretrained: the path of a weight file, the tag of published weights, or None for no weights. The result has mean,
    std, interpolation and resize_mode, as far as open_clip lists them for a tag; it is {} for a file and for None.
    Raises ConfigError for weights that do not exist, or a tag for a model from a folder or the hub.
    """
    if pretrained is None or Path(pretrained).expanduser().is_file():
        return {}
    if ":" in name:
        raise ConfigError(f"model.pretrained={pretrained}: {name} brings its own weights, leave model.pretrained out")
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(name)
    if not (published := get_pretrained_cfg(name, pretrained)):
        raise ConfigError(
            f"model.pretrained={pretrained}: no such file, nor published weights of {name}.{nearest(pretrained, tags)} "
            f"Published: {', '.join(tags) or 'none'}"
        )
    return {key: published[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in published}


def open_clip_state_dict(model: ImageTextModel) -> dict[str, Tensor]:
    """Return the weights of both towers under the parameter names of open_clip's model class.

    Both towers of `model` must come from one open_clip model. Most configurations create the class CLIP, whose text
    weights have no "text." before their names; others create CustomTextCLIP, whose text weights have it.
    """
    assert model.open_clip_config is not None
    named: dict[str, Tensor] = {}
    for part, tower in (("visual", model.towers.x_tower), ("text", model.towers.y_tower)):
        assert isinstance(tower, Tower)
        attribute, _ = PROJECTIONS[type(tower.trunk).__name__]
        is_matrix = isinstance(tower.projection, MatrixProjection)
        for name, tensor in merged(tower.trunk).state_dict().items():
            named[f"{part}.{name}"] = tensor
        for name, tensor in tower.projection.state_dict().items():
            named[f"{part}.{attribute}" if is_matrix else f"{part}.{attribute}.{name}"] = tensor
    config = model.open_clip_config
    custom = config.get("custom_text", False) or "hf_model_name" in config["text_cfg"]
    return named if custom else {name.removeprefix("text."): tensor for name, tensor in named.items()}

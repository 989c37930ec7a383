"""open_clip models: found by name or config file, and created once for both towers."""

from __future__ import annotations

import copy
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, first_line, nearest
from dyad.data.base.json_text import read_json
from dyad.train.config import ImageTower, ModelConfig, TextTower
from dyad.train.towers.published import check_open_clip, refuse_code, snapshot

# Class of a trunk → the attribute with its projection, and whether the class takes None there (or needs a module)
PROJECTIONS = {
    "VisionTransformer": ("proj", True),
    "TextTransformer": ("text_projection", True),
    "ModifiedResNet": ("attnpool", False),
    "TimmModel": ("head", False),
    "HFTextEncoder": ("proj", False),
}


class MatrixProjection(nn.Module):
    """x W, with W (in, D): open_clip keeps projections as plain matrices."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class BuildContext:
    """What the builders of towers share: the configuration, and the open_clip models, each created once.

    load_pretrained=False: architectures only. image_model, text_model: (name, weights) of each tower's open_clip model.
    """

    def __init__(self, config: ModelConfig, load_pretrained: bool) -> None:
        self.config, self.load_pretrained = config, load_pretrained
        self.image_model = (config.image.name or config.name, config.image.pretrained or config.pretrained)
        self.text_model = (config.text.name or config.name, config.text.pretrained or config.pretrained)
        self._create = cache(self._created)

    def open_clip_visual(self) -> tuple[Any, nn.Module]:
        """Trunk and projection of the open_clip picture tower, frozen as configured."""
        image = self.config.image
        count = image.unlocked_groups if image.frozen else None
        return self._parts(self._create(*self.image_model).visual, "model.image.unlocked_groups", count)

    def open_clip_text(self) -> tuple[Any, nn.Module]:
        """Trunk and projection of the open_clip text tower, frozen as configured."""
        text = self.config.text
        count = text.unlocked_layers if text.frozen else None
        return self._parts(self._create(*self.text_model).text, "model.text.unlocked_layers", count)

    def _parts(self, trunk: Any, key: str, unlocked: int | None) -> tuple[Any, nn.Module]:
        """Take the projection off a trunk; it always trains. unlocked: None, or the last groups of a frozen trunk."""
        if self.config.grad_checkpointing:
            trunk.set_grad_checkpointing(True)
        if unlocked is not None:
            try:
                trunk.lock(unlocked)  # open_clip counts the projection as the last group
            except Exception as error:  # asserts and attribute errors of models without groups
                raise ConfigError(
                    f"{key}={unlocked}: {type(trunk).__name__} cannot be frozen in part: {first_line(error)}"
                ) from error
        name, takes_none = PROJECTIONS[type(trunk).__name__]
        found = getattr(trunk, name)
        setattr(trunk, name, None if takes_none else nn.Identity())
        projection = MatrixProjection(found) if isinstance(found, nn.Parameter) else found or nn.Identity()
        return trunk, projection.requires_grad_(True)

    def open_clip_tokenizer(self) -> Any:
        """The tokenizer of the text tower's open_clip model. Raises ConfigError when it cannot be loaded."""
        import open_clip

        name = model_name(self.text_model[0])
        try:
            return open_clip.get_tokenizer(name, context_length=self.config.text.context_length)
        except Exception as error:  # transformers and tokenizers raise many types for files of strangers
            raise ConfigError(
                f"model.name={self.text_model[0]}: its tokenizer: {first_line(error)}. Without a network take a folder "
                "that has the tokenizer's files"
            ) from error

    def open_clip_config(self) -> dict[str, Any] | None:
        """The model_cfg with which open_clip creates this model; None unless both towers are one open_clip model."""
        import open_clip

        image, text = self.config.image, self.config.text
        kinds = (image.kind, text.kind)
        if kinds != (ImageTower.open_clip, TextTower.open_clip) or self.image_model[0] != self.text_model[0]:
            return None
        model_cfg = copy.deepcopy(open_clip.get_model_config(model_name(self.image_model[0])))
        assert model_cfg is not None
        if image.image_size:
            model_cfg["vision_cfg"]["image_size"] = image.image_size
        if text.context_length:
            model_cfg["text_cfg"]["context_length"] = text.context_length
        return model_cfg

    def _created(self, name: str | None, pretrained: str | None) -> Any:
        import open_clip

        registered = model_name(name)
        refuse_code()
        preprocess = check_weights(registered, pretrained)
        weights = f" with weights '{pretrained}'" if pretrained and self.load_pretrained else ""
        # It warns of random weights, which are wanted here, and logs errors that are raised as well.
        logging.disable(logging.ERROR)
        try:
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
        except ConfigError:
            raise
        except Exception as error:  # open_clip and its parts raise many types
            raise ConfigError(
                f"model.name={name}{weights} cannot be created: {first_line(error)}. Without a network give weights as "
                "a .safetensors or .pt file"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        if type(model).__name__ != "CustomTextCLIP":
            raise ConfigError(f"model.name={name} is a {type(model).__name__}, not a pair of towers. Take a CLIP model")
        return model


def model_name(name: str | None) -> str:
    """open_clip's name of a model; a config file is registered first. Raises ConfigError for what is neither.

    A folder with open_clip_config.json and weights is a model too, as is hf-hub:ORG/MODEL.
    """
    import open_clip

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
    listed = name.replace("/", "-")
    if listed not in open_clip.list_models():
        raise ConfigError(
            f"model.name={name}: open_clip has no such model.{nearest(name, open_clip.list_models())} "
            "Any of open_clip.list_models(), or the path of an open_clip config .json"
        )
    return listed


def _registered(path: str) -> str:
    """Register a config file with open_clip, under the file's name; of two files of one name the latest counts."""
    import open_clip

    file = Path(path).expanduser()
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name={path} cannot be read: {first_line(error)}. Give an open_clip config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.name={path}: no open_clip config, which is a JSON object")
    if "model_cfg" in content and file.name == "open_clip_config.json":
        return f"local-dir:{file.parent}"
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in content]
    if missing:
        raise ConfigError(f"model.name={path}: no open_clip config, it lacks {', '.join(missing)}")
    open_clip.add_model_config(file)
    return file.stem


def check_weights(name: str, pretrained: str | None) -> dict[str, Any]:
    """The preprocessing of published weights, {} for a file. Raises ConfigError for weights that do not exist."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    if pretrained is None or Path(pretrained).expanduser().is_file():
        return {}
    if ":" in name:
        raise ConfigError(f"model.pretrained={pretrained}: {name} brings its own weights, leave model.pretrained out")
    tags = list_pretrained_tags_by_model(name)
    published = get_pretrained_cfg(name, pretrained)
    if not published:
        raise ConfigError(
            f"model.pretrained={pretrained}: no such file, nor published weights of {name}.{nearest(pretrained, tags)} "
            f"Published: {', '.join(tags) or 'none'}"
        )
    return {key: published[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in published}

"""open_clip models: found by name or by a config file, created once for both towers, named as open_clip names them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import ConfigError, first_line, nearest
from data.json_text import read_json
from data.transforms import ImageSpec
from train.config import ImageTower, ModelConfig, TextTower
from train.towers.published import check_open_clip, refuse_code, snapshot
from train.towers.tower import Tower

# Class of a trunk → its attribute that leads into the shared space, and whether it takes None there or wants a module
PROJECTIONS = {
    "VisionTransformer": ("proj", True),
    "TextTransformer": ("text_projection", True),
    "ModifiedResNet": ("attnpool", False),
    "TimmModel": ("head", False),
    "HFTextEncoder": ("proj", False),
}


class Matrix(nn.Module):
    """x W, with W (in, D) as open_clip keeps it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OpenClipPair:
    """The open_clip models that a configuration's towers come from; one model when both name the same."""

    def __init__(self, config: ModelConfig, load_pretrained: bool) -> None:
        self.image = (config.image.name or config.name, config.image.pretrained or config.pretrained)
        self.text = (config.text.name or config.name, config.text.pretrained or config.pretrained)
        self._image_size, self._context = config.image.image_size, config.text.context_length
        self._load = load_pretrained
        self._is_open_clip = config.image.kind is ImageTower.open_clip, config.text.kind is TextTower.open_clip
        self._create = cache(self._created)

    def visual(self, config: ModelConfig) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
        """Trunk, projection and preprocess_cfg of the picture tower."""
        visual = self._create(*self.image).visual
        preprocess = visual.preprocess_cfg
        if config.grad_checkpointing:
            visual.set_grad_checkpointing(True)
        if config.image.frozen:
            _lock(visual, "model.image.unlocked_groups", config.image.unlocked_groups)
        return visual, cut(visual), preprocess

    def text_parts(self, config: ModelConfig) -> tuple[nn.Module, nn.Module]:
        """Trunk and projection of the text tower."""
        text = self._create(*self.text).text
        if config.grad_checkpointing:
            text.set_grad_checkpointing(True)
        if config.text.frozen:
            _lock(text, "model.text.unlocked_layers", config.text.unlocked_layers)
        return text, cut(text)

    @cached_property
    def tokenizer(self) -> Any:
        import open_clip

        name = model_name(self.text[0])
        try:
            return open_clip.get_tokenizer(name, context_length=self._context)
        except Exception as error:  # of transformers and tokenizers, for files of strangers
            raise ConfigError(
                f"model.name={self.text[0]}: its tokenizer: {first_line(error)}. Without a network take a folder that "
                "has the tokenizer's files"
            ) from error

    def config_of(self, spec: ImageSpec) -> dict[str, Any] | None:
        """What open_clip needs to create this model elsewhere; None unless both towers are of one model."""
        if self._is_open_clip != (True, True) or self.image[0] != self.text[0]:
            return None
        preprocess = {
            "size": spec.size,
            "mode": "RGB",
            "mean": list(spec.mean),
            "std": list(spec.std),
            "interpolation": spec.interpolation,
            "resize_mode": spec.resize,
        }
        return {"model_cfg": self._config(model_name(self.image[0])), "preprocess_cfg": preprocess}

    def _config(self, name: str) -> dict[str, Any]:
        import open_clip

        model_cfg = copy.deepcopy(open_clip.get_model_config(name))
        assert model_cfg is not None
        if self._image_size:
            model_cfg["vision_cfg"]["image_size"] = self._image_size
        if self._context:
            model_cfg["text_cfg"]["context_length"] = self._context
        return model_cfg

    def _created(self, name: str | None, pretrained: str | None) -> Any:
        import open_clip

        known = model_name(name)
        refuse_code()
        preprocess = check_weights(known, pretrained)
        weights = f" with weights '{pretrained}'" if pretrained and self._load else ""
        logging.disable(logging.ERROR)  # of random weights, which are wanted or come later, and of what is raised too
        try:
            check_open_clip(f"model.name={name}", open_clip.get_model_config(known))  # its tokenizer comes later
            model = open_clip.create_model(
                known,
                pretrained if self._load else None,
                load_weights=self._load,
                device=torch.get_default_device(),
                force_custom_text=True,  # the text part as a module of its own
                force_image_size=self._image_size,
                force_context_length=self._context,
                force_preprocess_cfg=preprocess,
                pretrained_text=self._load,
                weights_only=True,
            )
        except ConfigError:
            raise
        except Exception as error:  # open_clip raises whatever its parts raise
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
    known = name.replace("/", "-")
    if known not in open_clip.list_models():
        raise ConfigError(
            f"model.name={name}: open_clip has no such model.{nearest(name, open_clip.list_models())} "
            "Any of open_clip.list_models(), or the path of an open_clip config .json"
        )
    return known


def _registered(path: str) -> str:
    """Known to open_clip by the file's name from now on; two files may have the same, so the latest counts."""
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
    """The preprocessing that published weights ask for. Raises ConfigError for weights that nobody knows."""
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


def _lock(trunk: Any, key: str, count: int) -> None:
    """open_clip's own freezing: all but the last `count` groups, of which the projection is the last."""
    try:
        trunk.lock(count)
    except Exception as error:  # asserts and attribute errors of models that cannot be cut
        raise ConfigError(
            f"{key}={count}: {type(trunk).__name__} cannot be frozen in part: {first_line(error)}"
        ) from error


def cut(trunk: nn.Module) -> nn.Module:
    """Take the projection off an open_clip trunk; it trains."""
    name, none = PROJECTIONS[type(trunk).__name__]
    found = getattr(trunk, name)
    setattr(trunk, name, None if none else nn.Identity())
    projection = Matrix(found) if isinstance(found, nn.Parameter) else found or nn.Identity()
    return projection.requires_grad_(True)


def open_clip_names(towers: Mapping[str, nn.Module], model_cfg: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of {"visual": …, "text": …} as the model class of this config names them.

    Most configurations make a class that has no module for the text.
    """
    named: dict[str, Tensor] = {}
    for part, tower in towers.items():
        assert isinstance(tower, Tower)
        attribute, _ = PROJECTIONS[type(tower.trunk).__name__]
        bare = isinstance(tower.projection, Matrix)
        for name, tensor in tower.trunk.state_dict().items():
            named[f"{part}.{name}"] = tensor
        for name, tensor in tower.projection.state_dict().items():
            named[f"{part}.{attribute}" if bare else f"{part}.{attribute}.{name}"] = tensor
    custom = model_cfg.get("custom_text", False) or "hf_model_name" in model_cfg["text_cfg"]
    return named if custom else {name.removeprefix("text."): tensor for name, tensor in named.items()}

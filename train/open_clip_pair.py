"""open_clip models: found by name or by a config file, created once for both towers, named as open_clip names them."""

from __future__ import annotations

import copy
import json
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import open_clip
from torch import Tensor, nn

from data.errors import ConfigError, nearest
from data.transforms import ImageSpec
from train.config import ImageTower, TextTower

if TYPE_CHECKING:
    from train.config import ModelConfig


class OpenClipPair:
    """The open_clip models that a configuration's towers come from; one model when both name the same."""

    def __init__(self, config: ModelConfig, load_pretrained: bool) -> None:
        self.image = (config.image.name or config.name, config.image.pretrained or config.pretrained)
        self.text = (config.text.name or config.name, config.text.pretrained or config.pretrained)
        self._image_size, self._context = config.image.image_size, config.text.context_length
        self._load = load_pretrained
        self._is_open_clip = config.image.kind is ImageTower.open_clip, config.text.kind is TextTower.open_clip
        self._create = cache(self._created)

    def visual(self) -> nn.Module:
        return self._create(*self.image).visual

    def text_tower(self) -> nn.Module:
        return self._create(*self.text).text

    @cached_property
    def tokenizer(self) -> Any:
        name = model_name(self.text[0])
        return open_clip.get_tokenizer(name, context_length=self._context or self._text_config(name))

    def config_of(self, spec: ImageSpec) -> dict[str, Any] | None:
        """What open_clip needs to create this model elsewhere; None unless both towers are of one model."""
        if self._is_open_clip != (True, True) or self.image[0] != self.text[0]:
            return None
        model_cfg = self._config(model_name(self.image[0]))
        preprocess = {
            "size": spec.size,
            "mode": "RGB",
            "mean": list(spec.mean),
            "std": list(spec.std),
            "interpolation": spec.interpolation,
            "resize_mode": spec.resize,
        }
        return {"model_cfg": model_cfg, "preprocess_cfg": preprocess}

    def _config(self, name: str) -> dict[str, Any]:
        model_cfg = copy.deepcopy(open_clip.get_model_config(name))
        assert model_cfg is not None
        if self._image_size:
            model_cfg["vision_cfg"]["image_size"] = self._image_size
        if self._context:
            model_cfg["text_cfg"]["context_length"] = self._context
        return model_cfg

    def _text_config(self, name: str) -> int:
        return self._config(name)["text_cfg"].get("context_length", 77)

    def _created(self, name: str | None, pretrained: str | None) -> nn.Module:
        known = model_name(name)
        try:
            return open_clip.create_model(
                known,
                pretrained if self._load else None,
                force_custom_text=True,  # the text part as a module of its own
                force_image_size=self._image_size,
                force_context_length=self._context,
                pretrained_text=False,
                weights_only=True,
            )
        except Exception as error:  # open_clip raises whatever its parts raise
            weights = f" with weights '{pretrained}'" if pretrained and self._load else ""
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"model.name={name}{weights} cannot be created: {reason}. Without a network give weights as a file"
            ) from error


def model_name(name: str | None) -> str:
    """open_clip's name of a model; a path of a config file is registered first. Raises ConfigError for neither."""
    if name is None:
        raise ConfigError("model.name is missing: give an open_clip model (ViT-B-32) or an open_clip config .json")
    if name.endswith(".json"):
        return _registered(name)
    if name not in open_clip.list_models():
        raise ConfigError(
            f"model.name={name}: open_clip has no such model.{nearest(name, open_clip.list_models())} "
            "Any of open_clip.list_models(), or the path of an open_clip config .json"
        )
    return name


@cache
def _registered(path: str) -> str:
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name={path}: cannot be read: {error}") from error
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in content]
    if missing:
        raise ConfigError(f"model.name={path}: no open_clip config, it lacks {', '.join(missing)}")
    open_clip.add_model_config(file)
    return file.stem


def plain_names(named: dict[str, Tensor], model_cfg: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of visual and text as the model class of this config names them: most have no module for the text."""
    custom = model_cfg.get("custom_text", False) or "hf_model_name" in model_cfg["text_cfg"]
    return named if custom else {name.removeprefix("text."): tensor for name, tensor in named.items()}

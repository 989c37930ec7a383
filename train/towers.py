"""Two towers: what turns pictures and texts into embeddings, and what they want as input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data.transforms import ImageSpec
from train.image_towers import build_image_tower
from train.open_clip_pair import OpenClipPair, plain_names
from train.text_towers import build_text_tower

if TYPE_CHECKING:
    from train.config import ModelConfig


class TwoTower(nn.Module):
    """x_tower and y_tower, each (b, …) inputs → (b, D) embeddings, not normalised. Sharing weights: the same module."""

    def __init__(self, x_tower: nn.Module, y_tower: nn.Module) -> None:
        super().__init__()
        self.x_tower, self.y_tower = x_tower, y_tower


@dataclass(frozen=True)
class Model:
    """towers; image: what the picture tower takes; tokenize: n texts → int64 (n, L).

    open_clip_config: {"model_cfg", "preprocess_cfg"} when both towers are one open_clip model, else None.
    """

    towers: TwoTower
    image: ImageSpec
    tokenize: Callable[[list[str]], Tensor]
    open_clip_config: dict[str, Any] | None


def build_model(config: ModelConfig, load_pretrained: bool = True) -> Model:
    """The towers of a configuration. load_pretrained=False: architectures only; weights come from a checkpoint.

    Initial weights come from torch's global generator. Raises ConfigError for an unknown model, weights that are not
    there, or towers whose widths differ.
    """
    pair = OpenClipPair(config, load_pretrained)
    image, spec = build_image_tower(config, pair, load_pretrained)
    text, tokenize = build_text_tower(config, pair, load_pretrained)
    return Model(TwoTower(image, text), spec, tokenize, pair.config_of(spec))


def open_clip_state_dict(model: Model) -> dict[str, Tensor]:
    """The towers' weights under the names open_clip gives them. Only for a model with an open_clip_config."""
    assert model.open_clip_config is not None
    named = {
        **{f"visual.{name}": tensor for name, tensor in _inner(model.towers.x_tower).state_dict().items()},
        **{f"text.{name}": tensor for name, tensor in _inner(model.towers.y_tower).state_dict().items()},
    }
    return plain_names(named, model.open_clip_config["model_cfg"])


def _inner(tower: nn.Module) -> nn.Module:
    """open_clip's own module inside a tower."""
    inner = tower.get_submodule("trunk")
    return inner.get_submodule("trunk") if hasattr(inner, "pad") else inner


def embed_dim(tower: nn.Module, inputs: Tensor) -> int:
    """Width of a tower's embeddings."""
    with torch.no_grad():
        return tower(inputs).shape[1]

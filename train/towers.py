"""Two towers: what turns the two kinds of inputs into embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data.errors import ConfigError
from train.memo import Memo

if TYPE_CHECKING:
    from data.transforms import ImageSpec
    from train.config import ModelConfig


class Tower(nn.Module):
    """Inputs (b, …) → prepare → trunk → projection → (b, D), not normalised.

    A trunk of which nothing trains runs once per different input, without graph (Memo); it and every other frozen part
    are always in eval(). memo_bytes, pad: see Memo.
    """

    def __init__(
        self,
        trunk: nn.Module,
        projection: nn.Module,
        *,
        prepare: nn.Module | None = None,
        memo_bytes: int = 0,
        pad: int | None = None,
    ) -> None:
        super().__init__()
        self.prepare, self.trunk, self.projection = prepare or nn.Identity(), trunk, projection
        self._memo = Memo(memo_bytes, pad) if _is_frozen(trunk) else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self._memo is None:
            return self.projection(self.features(inputs))
        weights = [*self.trunk.parameters(), *self.trunk.buffers()]
        depends_on = (precision_of(inputs.device), *((t.data_ptr(), t._version) for t in weights))
        return self.projection(self._memo(self.features, inputs, depends_on))

    def features(self, inputs: Tensor) -> Tensor:
        """What the projection takes, computed anew."""
        return self.trunk(self.prepare(inputs))

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        for module in self.trunk.modules():
            if _is_frozen(module):
                module.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The trunk alone: the memo is Python."""
        self.trunk.compile(*args, **kwargs)


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
    there, inputs that a tower cannot take, or towers whose widths differ.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the loader's fork
    from train.image_towers import build_image_tower
    from train.open_clip_pair import OpenClipPair
    from train.text_towers import build_text_tower

    pair = OpenClipPair(config, load_pretrained)
    image, spec = build_image_tower(config, pair, load_pretrained)
    text, tokenize = build_text_tower(config, pair, load_pretrained)
    picture = torch.zeros(1, 3, spec.size, spec.size, dtype=torch.uint8)
    widths = [
        settle(image, picture, f"model.image: this tower cannot take pictures of {spec.size} x {spec.size}"),
        settle(text, tokenize(["a"]), "model.text: this tower cannot take its tokenizer's tokens"),
    ]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"the picture tower gives embeddings of width {widths[0]}, the text tower {widths[1]}: set model.embed_dim "
            "to the width of the tower that comes with its own projection, or take both towers from one model"
        )
    return Model(TwoTower(image, text).train(), spec, tokenize, pair.config_of(spec))


def settle(tower: Tower, inputs: Tensor, problem: str) -> int:
    """Width D of a tower's embeddings; parameters that they do not depend on stop training.

    DDP would wait for the gradients of those. Raises ConfigError, beginning with `problem`, when the tower fails.
    """
    tower.eval()
    try:
        embedding = tower.projection(tower.features(inputs))
    except Exception as error:  # any library, any type
        raise ConfigError(f"{problem}: {first_line(error)}") from error
    trained = [p for p in tower.parameters() if p.requires_grad]
    used = torch.autograd.grad(embedding.sum(), trained, allow_unused=True) if trained else ()
    for parameter, gradient in zip(trained, used, strict=True):
        parameter.requires_grad_(gradient is not None)
    return embedding.shape[1]


def open_clip_state_dict(model: Model) -> dict[str, Tensor]:
    """The towers' weights under the names open_clip gives them. Only for a model with an open_clip_config."""
    from train.open_clip_pair import open_clip_names

    assert model.open_clip_config is not None
    towers = {"visual": model.towers.x_tower, "text": model.towers.y_tower}
    return open_clip_names(towers, model.open_clip_config["model_cfg"])


def precision_of(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in here, None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def freeze(trunk: nn.Module, parts: Sequence[nn.Module], count: int) -> None:
    """Stop a trunk from training but for the last `count` of its parts and all that comes after them."""
    trunk.requires_grad_(False)
    if count > 0:
        first = next(parts[-min(count, len(parts))].parameters())
        parameters = list(trunk.parameters())
        start = next(i for i, p in enumerate(parameters) if p is first)
        for parameter in parameters[start:]:
            parameter.requires_grad_(True)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _is_frozen(module: nn.Module) -> bool:
    """It has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)

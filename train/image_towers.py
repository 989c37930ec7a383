"""Picture towers: uint8 (b, 3, S, S) → (b, D). Pixels are normalised on the device, inside the tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from data.errors import ConfigError, nearest
from data.transforms import ImageSpec
from train.config import ImageTower, ModelConfig
from train.memo import Memo
from train.open_clip_pair import OpenClipPair

if TYPE_CHECKING:
    from open_clip.timm_model import TimmModel

HALF = (0.5, 0.5, 0.5)
GROUP = 8  # channels per group of the normalisation of the small tower


class PictureTower(nn.Module):
    """Normalised pixels → trunk → projection."""

    def __init__(self, spec: ImageSpec, trunk: nn.Module, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(spec.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(3, 1, 1), persistent=False)
        self.trunk = trunk
        self.projection = projection or nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        mean, std = cast(Tensor, self.mean), cast(Tensor, self.std)
        if isinstance(self.trunk, Memo):  # remembered by the bytes of the picture, so it normalises for itself
            return self.projection(self.trunk(pixels))
        return self.projection(self.trunk((pixels.to(mean.dtype) / 255 - mean) / std))


def small_cnn(widths: list[int]) -> nn.Sequential:
    """A trunk for tiny pictures: one stride-2 convolution per width, then everything that is left, flat.

    Flattened, not pooled: where something is matters in a drawing. The normalisation uses no statistics of the batch,
    so that neither the chunking nor the number of ranks changes an embedding.
    """
    layers: list[nn.Module] = []
    for inside, outside in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(outside // GROUP, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten()).to(memory_format=torch.channels_last)


def build_image_tower(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[nn.Module, ImageSpec]:
    """The picture tower of a configuration and the pictures it takes."""
    trunk, projection, spec = BUILDERS[config.image.kind](config, pair, load_pretrained)
    if config.grad_checkpointing and hasattr(trunk, "set_grad_checkpointing"):
        cast("TimmModel", trunk).set_grad_checkpointing(True)
    if config.image.frozen and not config.image.unlocked_groups:
        normalised = PictureTower(spec, trunk)
        return PictureTower(spec, Memo(normalised, config.memo_mb << 20), projection), spec
    return PictureTower(spec, trunk, projection), spec


Built = tuple[nn.Module, nn.Module | None, ImageSpec]


def _open_clip(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> Built:
    visual = pair.visual()
    _lock(visual, config)
    found = visual.preprocess_cfg  # set by open_clip.create_model
    assert isinstance(found, dict)
    size = found["size"] if isinstance(found["size"], int) else found["size"][0]
    return visual, None, ImageSpec(size, found["mean"], found["std"], found["resize_mode"], found["interpolation"])


def _timm(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> Built:
    import timm
    from open_clip.timm_model import TimmModel

    name = config.image.name or ""
    if not timm.is_model(name):
        raise ConfigError(
            f"model.image.name={name or None}: timm has no such model.{nearest(name, timm.list_models())} "
            "Any of timm.list_models()"
        )
    expected = timm.get_pretrained_cfg(name)
    size = config.image.image_size or (expected.input_size[-1] if expected else 224)
    whole = TimmModel(name, config.embed_dim, size, pool="avg", proj="linear")
    if load_pretrained and config.image.pretrained:
        _load_timm(whole.trunk, config.image.pretrained)
    _lock(whole, config)
    mean, std = (expected.mean, expected.std) if expected else (HALF, HALF)
    return whole.trunk, whole.head, ImageSpec(size, mean, std)


def _load_timm(trunk: nn.Module, path: str) -> None:
    """Weights of a timm model from a .safetensors file; those of its classifier stay out."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        missing, _ = trunk.load_state_dict(load_file(path), strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.image.pretrained={path}: {reason}. Give a .safetensors file of this model") from error
    if missing:
        raise ConfigError(f"model.image.pretrained={path} lacks {len(missing)} weights, first {missing[0]}")


def _cnn(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> Built:
    size = config.image.image_size or 64
    wrong = [width for width in config.image.widths if width % GROUP]
    if wrong or not config.image.widths:
        raise ConfigError(f"model.image.widths={config.image.widths}: one multiple of {GROUP} per layer, at least one")
    side = size
    for _ in config.image.widths:
        side = (side + 1) // 2
    projection = nn.Linear(config.image.widths[-1] * side * side, config.embed_dim)
    return small_cnn(config.image.widths), projection, ImageSpec(size, HALF, HALF)


BUILDERS = {ImageTower.open_clip: _open_clip, ImageTower.timm: _timm, ImageTower.cnn: _cnn}


def _lock(tower: nn.Module, config: ModelConfig) -> None:
    if config.image.frozen and config.image.unlocked_groups:
        cast("TimmModel", tower).lock(unlocked_groups=config.image.unlocked_groups, freeze_bn_stats=True)

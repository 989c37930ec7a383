"""Build image towers: uint8 pixels (b, 3, S, S) → (b, D), with S the side in pixels.

Pixels are normalised on the device, inside the tower. To add a kind of tower, add a member to train.config.ImageTower
and a row to BUILDERS, or from outside this repository call dyad.plugins.register_image_tower.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.image_text.transforms import ImageSpec
from dyad.train.config import OWN_IMAGE_TOWERS
from dyad.train.towers.adapters import add_adapters
from dyad.train.towers.image.pixels import NormalizePixels, PatchDropout
from dyad.train.towers.layers import checkpoint_activations, freeze, layer_stack
from dyad.train.towers.libraries.open_clip import BuildContext
from dyad.train.towers.libraries.published import explain_errors, listed
from dyad.train.towers.libraries.transformers_model import load_companion
from dyad.train.towers.tower import Tower, convolves

HALF = (0.5, 0.5, 0.5)
GROUP = 8  # channels of a group of GroupNorm in our CNN
PATCH_DROPOUTS = ("patch_dropout", "patch_drop")  # the module of a ViT that drops patches, in open_clip and in timm
INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # PIL's numbers, as image processors of transformers have them
ImageParts = tuple[nn.Module, nn.Module, ImageSpec]  # trunk, projection, the images that the trunk takes


def build_image_tower(context: BuildContext) -> tuple[Tower, ImageSpec]:
    """Build the image tower of a configuration; return it with the size and normalisation of the images that it takes.

    context: the configuration, and the models of libraries that both towers share. Raises ConfigError for an unknown
    model, weights that do not exist or do not fit, or a key of model.image that the model cannot follow.
    """
    config = context.config
    trunk, projection, spec = (BUILDERS | OWN_IMAGE_TOWERS)[config.image.kind](context)
    _set_patch_dropout(trunk, config.image.patch_dropout)
    if config.image.lora_rank:
        add_adapters(trunk, config.image, "model.image")
    prepare = NormalizePixels(spec, channels_last=_faster_channels_last(trunk))
    return Tower(trunk, projection, prepare=prepare, cache_mb=config.frozen_cache_mb), spec


def _faster_channels_last(trunk: nn.Module) -> bool:
    """Whether a trunk is faster on a CPU in float32 with channels-last pixels, and as exact.

    This is so for trunks with convolutions of feature maps (`convolves`) and without batch norms. Channels-last
    convolutions take two thirds of the time in float32 (tests/benchmarks/RESULTS.md), but not in bf16. torch's batch
    norms compute mean and variance of channels-last inputs with six times the error.
    """
    return convolves(trunk) and not any(isinstance(module, _BatchNorm) for module in trunk.modules())


def _set_patch_dropout(trunk: Any, share: float | None) -> None:
    """Make a ViT of open_clip or timm, in place, leave out a random share of its patches in training.

    share: from 0 to below 1; None: the share that the model's own configuration has. Raises ConfigError for a share
    above 0 and a trunk that cannot leave out patches.
    """
    vit = getattr(trunk, "trunk", trunk)  # open_clip's TimmModel
    name = next((name for name in PATCH_DROPOUTS if isinstance(getattr(vit, name, None), nn.Module)), None)
    if name is None and share:
        raise ConfigError(
            f"model.image.patch_dropout={share}: {type(vit).__name__} cannot leave out patches; the ViTs of open_clip "
            "and timm can. Leave it out"
        )
    if share is None and name == PATCH_DROPOUTS[0]:
        share = getattr(getattr(vit, name), "prob", None)
    if name and share is not None:
        setattr(vit, name, PatchDropout(share, getattr(vit, "num_prefix_tokens", 1)))


def _open_clip(context: BuildContext) -> ImageParts:
    """Take the image part of an open_clip model; return (trunk, projection, ImageSpec).

    The ImageSpec is that of the published weights if they list one, else of the model. Raises ConfigError for a model
    or weights that cannot be loaded, images that are not square, or a trunk that cannot be frozen in part.
    """
    visual = context.open_clip_model(*context.image_model).visual
    trunk, projection = context.open_clip_parts(visual, context.config.image.frozen, "model.image.unlocked_groups")
    preprocess = trunk.preprocess_cfg
    size = preprocess["size"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise ConfigError(f"model.name={context.image_model[0]} takes images of {height} x {width}, not squares")
    mean, std = tuple(preprocess["mean"]), tuple(preprocess["std"])
    return trunk, projection, ImageSpec(height, mean, std, preprocess["resize_mode"], preprocess["interpolation"])


def _timm(context: BuildContext) -> ImageParts:
    """Build a trunk from a model of timm; return (trunk, projection, ImageSpec).

    The projection is a new linear layer to model.embed_dim, without bias; the identity if that is null. An
    interpolation other than bilinear becomes bicubic. Raises ConfigError for an unknown model, weights that cannot be
    loaded, a model.image.image_size that the model cannot take, or grad_checkpointing that it does not support.
    """
    import timm  # takes a second
    from timm.data.config import resolve_model_data_config
    from timm.models import group_parameters

    config = context.config
    name = config.image.name or ""
    if not timm.is_model(name):
        raise ConfigError(
            f"model.image.name={name or None}: timm has no such model.{nearest(name, timm.list_models())} "
            "Any of timm.list_models()"
        )
    size = config.image.image_size
    trunk = _load_timm(name, config.image.pretrained if context.load_pretrained else None, size)
    if size and hasattr(trunk, "set_input_size"):
        with explain_errors(f"model.image.image_size={size}: {name} cannot take it"):
            trunk.set_input_size(size)
    if config.grad_checkpointing:
        checkpoint_activations(trunk)
    if config.image.frozen:
        trunk.requires_grad_(False)
        groups = cast(dict[int, list[str]], group_parameters(trunk, trunk.group_matcher()))
        for group in sorted(groups, reverse=True)[: config.image.unlocked_groups]:
            for parameter in groups[group]:
                trunk.get_parameter(parameter).requires_grad_(True)
    data = resolve_model_data_config(trunk)
    width = getattr(trunk, "head_hidden_size", None) or trunk.num_features
    interpolation = "bilinear" if data["interpolation"] == "bilinear" else "bicubic"
    spec = ImageSpec(size or data["input_size"][-1], data["mean"], data["std"], interpolation=interpolation)
    projection = nn.Identity() if config.embed_dim is None else nn.Linear(width, config.embed_dim, bias=False)
    return trunk, projection, spec


def _load_timm(name: str, pretrained: str | None, size: int | None) -> Any:
    """Create the timm model `name` without its classifier.

    pretrained: a file of weights; or, if it has no suffix, the tag of published weights, which are downloaded; None:
    random weights. size: model.image.image_size; the weights of a file may be those of the model at this size, in place
    of its own. Raises ConfigError for weights that cannot be loaded, and for a file that lacks some of the model's
    weights; weights of the file that the model does not have are ignored.
    """
    import timm
    from timm.models import load_state_dict

    if pretrained is None:
        return timm.create_model(name, num_classes=0)
    advice = f"Give a .safetensors or .pth file of {name}, or a timm tag (tags need a network)"
    with explain_errors(f"model.image.pretrained={pretrained}", advice):
        if not Path(pretrained).suffix:
            return timm.create_model(f"{name.partition('.')[0]}.{pretrained}", pretrained=True, num_classes=0)
        if not (file := Path(pretrained).expanduser()).is_file():
            raise FileNotFoundError("no such file")
        trunk: Any = timm.create_model(name, num_classes=0)
        weights, own = load_state_dict(str(file), weights_only=True), trunk.state_dict()
        fits = all(own[key].shape == weights[key].shape for key in own.keys() & weights.keys())
        if size and not fits and hasattr(trunk, "set_input_size"):
            trunk.set_input_size(size)
        missing, unknown = trunk.load_state_dict(weights, strict=False)
    if missing:
        raise ConfigError(
            f"model.image.pretrained={pretrained} lacks weights of {name}: {listed(missing)}; unknown are "
            f"{listed(unknown)}. Give weights of the same model"
        )
    return trunk


class PooledImage(nn.Module):
    """Embeds images (b, 3, S, S), S the side in pixels, as (b, H) by a transformers encoder of width H.

    The embedding is the encoder's pooler_output, as in CLIP and SigLIP. If the pooler is a dense layer on the first
    token, as in ViT, the embedding is the state of the first token, because most checkpoints have an untrained pooler.
    options: further arguments of the encoder, such as interpolate_pos_encoding, which fits position embeddings to the
    image size; none unless the caller sets them.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.first_token = encoder, hasattr(getattr(encoder, "pooler", None), "dense")
        self.options: dict[str, bool] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Embed images (b, 3, S, S) as (b, H)."""
        found = self.encoder(pixel_values=images, **self.options)
        return found.last_hidden_state[:, 0] if self.first_token else found.pooler_output.flatten(1)


def _transformers(context: BuildContext) -> ImageParts:
    """Build a trunk from the image encoder of a model of transformers; return (trunk, projection, ImageSpec).

    The projection is a new linear layer to model.embed_dim, without bias; if that is null, the model's own (CLIP), or
    the identity. Raises ConfigError without a name, for a model or weights that cannot be loaded or are not complete,
    and for an image processor that an ImageSpec cannot describe.
    """
    config, image = context.config, context.config.image
    if (name := context.image_name) is None:
        raise ConfigError("model.image.name is missing: a transformers folder, a published name or pkg:PACKAGE/FOLDER")
    key = f"model{'.image' if image.name else ''}.name={name}"
    pretrained = context.load_pretrained and not image.from_scratch
    processor = load_companion(key, name, "AutoImageProcessor")
    loaded = context.transformers_model(key, name, pretrained)
    model, encoder = loaded.model, getattr(loaded.model, "vision_model", loaded.model)  # a text tower may be beside it
    own_projection = getattr(model, "visual_projection", None) or nn.Identity()  # of CLIP
    trunk = PooledImage(encoder)
    loaded.refuse_missing(encoder, own_projection, pooled=trunk.first_token)
    if config.grad_checkpointing:
        checkpoint_activations(model)
    if image.frozen:
        freeze(encoder, layer_stack(encoder), image.unlocked_groups)
    spec = _image_spec_of(key, processor)
    if image.image_size not in (None, spec.size):
        if "interpolate_pos_encoding" in inspect.signature(encoder.forward).parameters:
            trunk.options = {"interpolate_pos_encoding": True}
        resized = spec.resized and round(spec.resized * image.image_size / spec.size)
        spec = replace(spec, size=image.image_size, resized=resized)
    if config.embed_dim is None:
        projection = own_projection
    else:
        width = getattr(encoder.config, "hidden_size", None) or encoder.config.hidden_sizes[-1]
        projection = nn.Linear(width, config.embed_dim, bias=False)
    return trunk, projection, spec


def _image_spec_of(key: str, processor: Any) -> ImageSpec:
    """Convert the settings of an image processor of transformers to an ImageSpec.

    key: the configuration key that names the model, for messages. Raises ConfigError for a processor that an ImageSpec
    cannot describe: its images must be resized (bilinear or bicubic), cropped or squashed to squares, and scaled to
    0..1; normalisation is optional.
    """
    given = processor.to_dict()
    size, crop = dict(given.get("size") or {}), dict(given.get("crop_size") or {})
    side = crop if given.get("do_center_crop") else size
    edge, by = size.get("shortest_edge") or size.get("height"), INTERPOLATIONS.get(given.get("resample") or 0)
    scaled = given.get("do_rescale", True) and abs(255 * given.get("rescale_factor", 0) - 1) < 1e-6  # to 0..1
    plain = given.get("do_resize") and scaled
    if not (plain and edge and by and side.get("height") == side.get("width") and size.get("width", edge) == edge):
        raise ConfigError(
            f"{key}: its {type(processor).__name__} does not make squares that are resized (bilinear or bicubic), "
            "cropped and normalised. Take the model from timm: model.image.kind=timm"
        )
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if given.get("do_normalize"):
        mean, std = tuple(given["image_mean"]), tuple(given["image_std"])
    how = "squash" if "height" in size else "shortest"
    return ImageSpec(side["height"], mean, std, how, by, None if edge == side["height"] else edge)


def _cnn(context: BuildContext) -> ImageParts:
    """Build our own CNN for small images: stride-2 convolutions, flattened feature map, linear projection.

    Each entry of model.image.widths is the number of output channels of one convolution. The feature map is not pooled,
    because the position in a drawing matters. GroupNorm uses no statistics of the batch, so neither the chunk size nor
    the number of ranks changes an embedding. Returns (trunk, projection, ImageSpec). Raises ConfigError for no widths,
    widths that GroupNorm cannot divide, or a missing model.embed_dim.
    """
    config = context.config
    size, widths = config.image.image_size or 64, config.image.widths
    if not widths or any(width < 1 or width % GROUP for width in widths):
        raise ConfigError(f"model.image.widths={widths}: one multiple of {GROUP} per layer, at least one")
    if config.embed_dim is None:
        raise ConfigError("model.embed_dim=null: model.image.kind=cnn has no width of its own. Set model.embed_dim")
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(outside // GROUP, outside), nn.ReLU())
        for inside, outside in zip([3, *widths], widths, strict=False)
    ]
    trunk = nn.Sequential(*layers, nn.Flatten()).to(memory_format=torch.channels_last)
    if config.image.frozen:
        freeze(trunk, layers, config.image.unlocked_groups)
    side = -(-size // 2 ** len(widths))  # of the feature map: each layer halves the side, rounded up
    return trunk, nn.Linear(widths[-1] * side * side, config.embed_dim), ImageSpec(size, HALF, HALF)


BUILDERS = {"open_clip": _open_clip, "timm": _timm, "transformers": _transformers, "cnn": _cnn}

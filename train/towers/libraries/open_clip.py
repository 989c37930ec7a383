"""Find open_clip models by name or config file; BuildContext creates models of libraries once for both towers.

Importing open_clip takes seconds, so only the functions that need it import it.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.json_text import read_json
from dyad.train.config import Activation, ImageTower, ModelConfig, TextTower, TrainConfig
from dyad.train.towers.layers import checkpoint_activations
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.libraries.published import (
    WRAPPERS,
    check_files,
    check_open_clip,
    config_file,
    explain_errors,
    refuse_code,
    shared_model_name,
    snapshot,
)
from dyad.train.towers.libraries.transformers_model import TransformersModel, load_model

# class of a trunk → (attribute with its projection, whether the attribute may be None; else it must be a module)
PROJECTIONS = {
    "VisionTransformer": ("proj", True),
    "TextTransformer": ("text_projection", True),
    "ModifiedResNet": ("attnpool", False),
    "TimmModel": ("head", False),
    "HFTextEncoder": ("proj", False),
}
QUICK_GELU = "-quickgelu"  # suffix of the name of a model with QuickGELU that open_clip lists beside one with GELU
# warnings of open_clip that are expected here: about random weights, a tag with QuickGELU, a configuration without
# weights, and a folder with one file of weights
EXPECTED = re.compile(
    "No pretrained weights|Model .* initialized partially|QuickGELU mismatch|Local config loaded|"
    r"Could not find/download|Multiple checkpoints found in .*: \['[^']*'\]\. "
)


class MatrixProjection(nn.Module):
    """Multiplies x (…, width) by a weight matrix (width, D), a projection that open_clip keeps as a plain parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class BuildContext:
    """Holds what the builders of both towers share: the configuration, and models of libraries, each created once.

    load_pretrained=False: create architectures without pretrained weights. image_model, text_model: the arguments
    (name, weights) of open_clip_model for each tower, as the configuration has them; None: not given.
    open_clip_model(name, weights) creates this model of open_clip, with an image and a text part, at the first call
    with these arguments, and returns the same object at later calls; it raises ConfigError for a model or weights that
    cannot be loaded. image_name, text_name: the argument `name` of transformers_model for each tower; None: not given.
    """

    def __init__(self, config: ModelConfig, load_pretrained: bool) -> None:
        self.config, self.load_pretrained = config, load_pretrained
        self.image_model = (config.image.name or config.name, config.image.pretrained or config.pretrained)
        self.text_model = (config.text.name or config.name, config.text.pretrained or config.pretrained)
        both = config.text.kind == TextTower.transformers
        self.image_name = config.image.name or (config.name if both else None)
        self.text_name = config.text.name or config.name
        self.open_clip_model = cache(self._create)
        self._loaded: dict[tuple[str, bool], TransformersModel] = {}

    def transformers_model(self, key: str, name: str, pretrained: bool) -> TransformersModel:
        """Load a model of transformers; later calls with the same `name` and `pretrained` return the same object.

        Arguments and errors are those of `load_model` (transformers_model.py).
        """
        if (name, pretrained) not in self._loaded:
            self._loaded[name, pretrained] = load_model(key, name, pretrained)
        return self._loaded[name, pretrained]

    @property
    def calibration(self) -> Calibration | None:
        """The logit scale and bias in the pretrained weights from which both towers come.

        None if the towers come from different models or weights, the weights are random, or they have no logit scale;
        also if model.embed_dim gives towers of transformers new projections. For a model of transformers, read it after
        the towers are built; before, it is None. For a model of open_clip, reading it creates the model, and raises the
        errors of open_clip_model.
        """
        kinds, (name, weights) = (self.config.image.kind, self.config.text.kind), self.image_model
        if kinds == (ImageTower.open_clip, TextTower.open_clip) and self.image_model == self.text_model:
            if not self.load_pretrained or not (weights or ":" in resolve_model_name(name)):
                return None
            model = self.open_clip_model(name, weights)
            source = f"model.pretrained={weights}" if weights else f"model.name={name}"
            return Calibration.of(source, model.logit_scale, model.logit_bias)
        name = shared_model_name(self.config) or ""
        loaded = None if (name, False) in self._loaded else self._loaded.get((name, True))  # False: from_scratch
        return loaded and loaded.calibration

    def open_clip_parts(self, trunk: Any, frozen: bool, key: str) -> tuple[Any, nn.Module]:
        """Split one tower of an open_clip model into (trunk without projection, projection).

        trunk: the image or text part of an open_clip model; its projection is removed in place, so call this once. A
        trunk without projection gives nn.Identity. frozen: whether to freeze the trunk except for its last n layer
        groups, as open_clip counts them: in a VisionTransformer or TextTransformer the projection is the last group; n
        is the value of the configuration key `key`, such as "model.image.unlocked_groups". The projection always
        trains. model.grad_checkpointing is applied too. Raises ConfigError for a trunk that open_clip cannot freeze, or
        that does not support grad_checkpointing, KeyError for one of a class not in PROJECTIONS.
        """
        if self.config.grad_checkpointing:
            checkpoint_activations(trunk)
        if frozen:
            unlocked = attrgetter(key.removeprefix("model."))(self.config)
            with explain_errors(f"{key}={unlocked}: {type(trunk).__name__} cannot be frozen in part"):
                trunk.lock(unlocked)  # open_clip counts the projection as the last group
        name, takes_none = PROJECTIONS[type(trunk).__name__]
        found = getattr(trunk, name)
        setattr(trunk, name, None if takes_none else nn.Identity())
        projection = MatrixProjection(found) if isinstance(found, nn.Parameter) else found or nn.Identity()
        return trunk, projection.requires_grad_(True)

    def open_clip_tokenizer(self) -> Any:
        """Load the tokenizer of the text tower's open_clip model: n texts → token ids, int64 (n, context length).

        Files that the hub's cache lacks are downloaded. Raises ConfigError when it cannot be loaded.
        """
        import open_clip

        name, advice = self.text_model[0], "Without a network take a folder that has the tokenizer's files"
        with explain_errors(f"model.name={name}: its tokenizer", advice), _refuse_warnings():
            return open_clip.get_tokenizer(resolve_model_name(name), context_length=self.config.text.context_length)

    def open_clip_config(self) -> dict[str, Any] | None:
        """Return the open_clip configuration (model_cfg) of the model that both towers come from.

        An image size and a context length that the user has set replace those of the model. quick_gelu is set if the
        image tower's published weights need it and model.activation=published. Returns None unless both towers are of
        kind open_clip and have models of one name. Raises ConfigError for an unknown model.
        """
        image, text = self.config.image, self.config.text
        kinds = (image.kind, text.kind)
        if kinds != (ImageTower.open_clip, TextTower.open_clip) or self.image_model[0] != self.text_model[0]:
            return None
        import open_clip

        model_cfg = copy.deepcopy(open_clip.get_model_config(resolve_model_name(self.image_model[0])))
        assert model_cfg is not None
        if image.image_size:
            model_cfg["vision_cfg"]["image_size"] = image.image_size
        if text.context_length:
            model_cfg["text_cfg"]["context_length"] = text.context_length
        if self._published(*self.image_model).quick_gelu:
            model_cfg["quick_gelu"] = True
        return model_cfg

    def _published(self, name: str | None, pretrained: str | None) -> PublishedWeights:
        """Return the PublishedWeights of a model, with quick_gelu=False unless model.activation=published.

        Arguments are those of open_clip_model. Raises ConfigError as `resolve_model_name` and `published_weights` do,
        which gets needed=False without load_pretrained.
        """
        found = published_weights(resolve_model_name(name), pretrained, self.load_pretrained)
        return replace(found, quick_gelu=found.quick_gelu and self.config.activation is Activation.published)

    def _create(self, name: str | None, pretrained: str | None) -> Any:
        """Create an open_clip model, after checks of its files; the function behind open_clip_model.

        Returns a CustomTextCLIP of open_clip, with the modules `visual` and `text`. Raises ConfigError for any other
        kind of model, and for a model or weights that cannot be loaded.
        """
        import open_clip

        registered = resolve_model_name(name)
        refuse_code()
        published = self._published(name, pretrained)
        brings_weights = self.load_pretrained and (pretrained is not None or ":" in registered)
        weights = f" with weights '{pretrained}'" if pretrained and self.load_pretrained else ""
        key, advice = f"model.name={name}", "Without a network give weights as a .safetensors or .pt file"
        with explain_errors(f"{key}{weights} cannot be created", advice), _refuse_warnings(), _without_prefixes():
            if registered.startswith("local-dir:"):
                check_files(key, registered.removeprefix("local-dir:"))
            check_open_clip(key, open_clip.get_model_config(registered), ":" in registered)  # before anything is loaded
            model = open_clip.create_model(
                registered,
                pretrained if self.load_pretrained else None,
                load_weights=self.load_pretrained,
                device=torch.get_default_device(),
                force_custom_text=True,  # the text part as a module of its own
                force_image_size=self.config.image.image_size,
                force_context_length=self.config.text.context_length,
                force_preprocess_cfg=published.preprocess,
                force_quick_gelu=published.quick_gelu,
                pretrained_text=self.load_pretrained and ":" not in registered,  # of another model
                require_pretrained=brings_weights,
                weights_only=True,
            )
        if type(model).__name__ != "CustomTextCLIP":
            raise ConfigError(f"model.name={name} is a {type(model).__name__}, not a pair of towers. Take a CLIP model")
        return model


def resolve_model_name(name: str | None) -> str:
    """Return the name under which open_clip creates the model that the user's model.name=`name` means.

    The result is a model of open_clip.list_models(), "local-dir:FOLDER" or "hf-hub:ORG/MODEL". Models of the last two
    forms, which alone contain ":", bring their own weights. `name` is one of:
        a model of open_clip.list_models(), where "/" may stand for "-" (ViT-B/32)
        the path of an open_clip config .json, which is registered with open_clip here, see `_registered`
        a folder with open_clip_config.json and weights, whose content is not checked here: local-dir:FOLDER
        hf-hub:ORG/MODEL and local-dir:FOLDER, which are returned as they are, without a check
        hf-hub:ORG/MODEL@REVISION, which is downloaded here: local-dir:FOLDER of the hub's cache
    Raises ConfigError for any other name, for None, for a file that is no open_clip config, and for a failed download.
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

    The model replaces one of the same name in this process. A file open_clip_config.json with a model_cfg describes the
    folder that contains it: it is not registered, and local-dir:FOLDER is returned. `path` is found by `config_file`.
    Raises ConfigError if the file cannot be read or is no open_clip config.
    """
    file = config_file(path)
    with explain_errors(f"model.name={path} cannot be read", "Give an open_clip config"):
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


@dataclass(frozen=True)
class PublishedWeights:
    """Settings that open_clip lists for published weights; weights from a file, and no weights, have the defaults.

    preprocess: those of the keys mean, std, interpolation and resize_mode that open_clip lists for the weights; they
    replace the model's own. quick_gelu: whether open_clip lists the weights as trained with QuickGELU.
    """

    preprocess: dict[str, Any] = field(default_factory=dict)
    quick_gelu: bool = False


def published_weights(name: str, pretrained: str | None, needed: bool = True) -> PublishedWeights:
    """Return the settings that open_clip lists for the weights `pretrained` of its model `name`.

    name: as `resolve_model_name` returns it. pretrained: a tag of published weights, or the path of a weight file. A
    file that exists and None (no weights) give the default settings. needed=False: weights that open_clip does not list
    give the default settings too. Raises ConfigError for weights that open_clip does not list for `name`, among them
    weights with GELU for a model NAME-quickgelu; and, whatever `needed` says, for a tag or a missing file if `name` is
    a folder or a model of the hub, which brings its own weights.
    """
    if pretrained is None or Path(pretrained).expanduser().is_file():
        return PublishedWeights()
    if ":" in name:
        raise ConfigError(f"model.pretrained={pretrained}: {name} brings its own weights, leave model.pretrained out")
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(name)
    if published := get_pretrained_cfg(name, pretrained):
        keys = ("mean", "std", "interpolation", "resize_mode")
        preprocess = {key: published[key] for key in keys if key in published}
        return PublishedWeights(preprocess, bool(published.get("quick_gelu")))
    if not needed:
        return PublishedWeights()
    plain = name.removesuffix(QUICK_GELU)
    if plain != name and get_pretrained_cfg(plain, pretrained):
        own = f", or model.name={name} model.pretrained={tags[0]}" if tags else ""
        raise ConfigError(
            f"model.pretrained={pretrained}: trained with GELU, and model.name={name} has QuickGELU. Take "
            f"model.name={plain} model.pretrained={pretrained}{own}"
        )
    raise ConfigError(
        f"model.pretrained={pretrained}: no such file, nor published weights of {name}.{nearest(pretrained, tags)} "
        f"Published: {', '.join(tags) or 'none'}"
    )


def may_download(config: TrainConfig) -> bool:
    """Whether building the towers of `config` may download files: it names published weights or a published model.

    A name counts if it is neither a path that exists here nor a pkg: name, even if its files are in the cache. So does
    the model of the hub from which a model of open_clip takes its tokenizer or text encoder.
    """
    model, names = config.model, (config.model.name, config.model.image.name, config.model.text.name)
    named = [model.pretrained, model.image.pretrained, model.text.pretrained]
    named += [name for name in names if name and name.startswith("hf-hub:")]
    if model.text.kind is TextTower.transformers:
        named.append(model.text.name or model.name)
    if model.image.kind is ImageTower.transformers:
        named.append(model.image.name or model.name)
    if not any(map(_is_published, named)):
        of_texts = config.has_texts and model.text.kind is TextTower.open_clip
        of_images = config.has_images and model.image.kind is ImageTower.open_clip
        for name in [model.text.name] * of_texts + [model.image.name] * of_images:
            with suppress(Exception):  # building the towers raises it
                import open_clip

                found: Any = open_clip.get_model_config(resolve_model_name(name or model.name))
                named += [found["text_cfg"].get(key) for key in ("hf_model_name", "hf_tokenizer_name")]
    return any(map(_is_published, named))


def _is_published(name: str | None) -> bool:
    """Whether `name` is neither None, "", a path that exists here, nor a pkg: name."""
    return bool(name) and not name.startswith("pkg:") and not os.path.exists(os.path.expanduser(name))


@contextmanager
def _refuse_warnings() -> Iterator[None]:
    """Raise ConfigError at the end of the `with` block if open_clip has warned in it, except for EXPECTED warnings.

    Other warnings may mean that open_clip has created another model than was asked for. An error raised in the block
    passes instead. Warnings, and what reaches the root logger, are not shown during the block, whoever gives them.
    """
    lines: list[str] = []
    handler, root = logging.Handler(logging.WARNING), logging.getLogger()
    handler.emit = lambda record: lines.extend([record.getMessage()] if record.name == "root" else [])
    before, root.handlers = root.handlers, [handler]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        root.handlers = before
    lines += [str(warning.message) for warning in caught if "open_clip" in warning.filename]
    if unexpected := [line for line in lines if not EXPECTED.match(line)]:
        raise ConfigError(f"open_clip: {unexpected[0]}")


@contextmanager
def _without_prefixes() -> Iterator[None]:
    """In the `with` block, make open_clip strip the prefixes WRAPPERS from the names of weights that it reads.

    WRAPPERS are "module." and "_orig_mod.", which DDP and torch.compile add; open_clip itself strips "module." only. It
    replaces a function of open_clip.factory, for all threads.
    """
    from open_clip import factory

    read: Any = factory.load_state_dict

    def stripped(*args: Any, **options: Any) -> dict[str, Tensor]:
        return {re.sub(rf"^({WRAPPERS})+", "", name): tensor for name, tensor in read(*args, **options).items()}

    factory.load_state_dict = stripped
    try:
        yield
    finally:
        factory.load_state_dict = read

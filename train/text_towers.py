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
from train.memo import Memo
from train.open_clip_pair import OpenClipPair

Tokenize = Callable[[list[str]], Tensor]


class TokenTower(nn.Module):
    """Trunk → projection."""

    def __init__(self, trunk: nn.Module, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk, self.projection = trunk, projection or nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.projection(self.trunk(tokens))


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
    """A transformers encoder and the pooling of its last states: tokens (b, L) → (b, H)."""

    def __init__(self, encoder: nn.Module, pooling: Pooling, pad: int) -> None:
        super().__init__()
        self.encoder, self.pooling, self.pad = encoder, pooling, pad

    def forward(self, tokens: Tensor) -> Tensor:
        mask_bL = tokens != self.pad
        longest = max(1, int(mask_bL.sum(1).max())) if len(tokens) else 1
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


def build_text_tower(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[nn.Module, Tokenize]:
    """The text tower of a configuration and its tokenizer."""
    return BUILDERS[config.text.kind](config, pair, load_pretrained)


def _open_clip(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[nn.Module, Tokenize]:
    text = cast(Any, pair.text_tower())
    if config.grad_checkpointing:
        text.set_grad_checkpointing(True)
    if config.text.frozen and config.text.unlocked_layers:
        text.lock(unlocked_layers=config.text.unlocked_layers)
    elif config.text.frozen:
        return TokenTower(Memo(text, config.memo_mb << 20)), pair.tokenizer
    return TokenTower(text), pair.tokenizer


def _transformers(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[nn.Module, Tokenize]:
    encoder, tokenizer = _encoder(config, load_pretrained)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    context = config.text.context_length or min(tokenizer.model_max_length, encoder.config.max_position_embeddings)
    if config.grad_checkpointing:
        encoder.gradient_checkpointing_enable()
    trunk: nn.Module = Pooled(encoder, config.text.pooling, tokenizer.pad_token_id)
    if config.text.frozen:
        trunk.requires_grad_(False)
        for layer in _layers(encoder)[-config.text.unlocked_layers :] if config.text.unlocked_layers else []:
            layer.requires_grad_(True)
        if not config.text.unlocked_layers:
            trunk = Memo(trunk, config.memo_mb << 20, pad=tokenizer.pad_token_id)
    projection = nn.Linear(encoder.config.hidden_size, config.embed_dim)
    return TokenTower(trunk, projection), Tokenizer(tokenizer, context)


BUILDERS = {TextTower.open_clip: _open_clip, TextTower.transformers: _transformers}


def _encoder(config: ModelConfig, load_pretrained: bool) -> tuple[Any, Any]:
    """(encoder, tokenizer) from a folder, a package or a published name."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    name = config.text.name or config.name
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    place = _package_folder(name) if name.startswith("pkg:") else os.path.expanduser(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        if config.text.from_scratch or not load_pretrained:
            return AutoModel.from_config(AutoConfig.from_pretrained(place)), tokenizer
        return AutoModel.from_pretrained(place, use_safetensors=True), tokenizer
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.text.name={name}: {reason} Without a network give the path of a folder") from error


def _package_folder(name: str) -> str:
    """pkg:PACKAGE/FOLDER → the folder inside the installed package."""
    package, _, folder = name.removeprefix("pkg:").partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"model.text.name={name}: the package '{package}' is not installed. "
            "The emoji demo's comes with:  pip install -e '.[demo]' -c requirements.lock"
        )
    return str(Path(next(iter(found.submodule_search_locations))) / folder)


def _layers(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's layers: its longest list of modules."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []

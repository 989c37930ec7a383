"""Text towers: int64 tokens (b, L) → (b, D), and the tokenizers that go with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from data.errors import ConfigError, first_line
from train.config import ModelConfig, TextTower
from train.towers.adapters import add_adapters
from train.towers.memo import padded_length
from train.towers.open_clip_pair import OpenClipPair
from train.towers.pooled import Pooled
from train.towers.published import check_settings, file_of, location_of, refuse_code, split_revision
from train.towers.sentence_folder import SentenceFolder, sentence_folder
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
        missing = padded_length(tokens.shape[1], length) - tokens.shape[1]
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
    return Tower(trunk, projection, cache_bytes=config.frozen_cache_mb << 20), pair.tokenizer


def _transformers(config: ModelConfig, pair: OpenClipPair, load_pretrained: bool) -> tuple[Tower, Tokenize]:
    tower, own = _transformers_tower(config, load_pretrained)
    return tower, Tokenizer(own.tokenizer, config.text.context_length or min(own.limit, own.tokenizer.model_max_length))


def _transformers_tower(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    name, text = config.text.name or config.name, config.text
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    if text.frozen and text.lora_rank:
        raise ConfigError(
            f"model.text.frozen=true, model.text.lora_rank={text.lora_rank}: adapters leave the encoder's own weights "
            "as they are. Take one of the two"
        )
    pretrained = load_pretrained and not text.from_scratch
    encoder, tokenizer = _load(name, pretrained)
    if text.lower_case:
        _lower_case(tokenizer)
    pad = _padding(tokenizer)
    if config.grad_checkpointing:
        renamed = getattr(encoder, "activation_checkpointing_enable", None)  # in transformers 5.x
        (renamed or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    if text.frozen:
        freeze(encoder, _layers(encoder), text.unlocked_layers)
    if text.lora_rank:
        add_adapters(encoder, text)
    width, shared_width = encoder.config.hidden_size, config.embed_dim
    if shared_width is not None:
        own = nn.Linear(width, shared_width)
    else:
        own = _dense(name, width, pretrained) if text.dense else nn.Identity()
    tower = Tower(Pooled(encoder, text.pooling, pad), own, cache_bytes=config.frozen_cache_mb << 20, pad=pad)
    return tower, TextTokenizer(tokenizer, _limit(config, encoder, tokenizer))


BUILDERS = {TextTower.open_clip: _open_clip, TextTower.transformers: _transformers}


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """(encoder, tokenizer) from a folder, a package or a published name. A stranger's files choose no code: not a
    class that comes with them, nor a kernel for attention."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place, revision = split_revision(location_of(name))
    key = f"model.text.name={name}"
    if place.startswith(("/", ".")) and not os.path.isdir(place):
        raise ConfigError(f"{key}: there is no folder {place}")
    check_settings(key, file_of(name, "config.json", fetch=True))
    if file_of(name, "adapter_config.json", fetch=False):
        raise ConfigError(f"{key}: holds adapters beside another model. Merge them into it (peft: merge_and_unload)")
    refuse_code()
    own, single = {"trust_remote_code": False}, {"dtype": torch.float32}  # stored in less they would be trained in less
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, **own)
        settings = AutoConfig.from_pretrained(place, revision=revision, **own)
        settings._attn_implementation = settings._experts_implementation = None  # what torch has
        with torch.device("meta"):
            _check_size(key, AutoModel.from_config(settings, **own))
        if pretrained:
            options = {"revision": revision, "config": settings, "use_safetensors": True}
            model = AutoModel.from_pretrained(place, **options, **own, **single)
        else:
            model = AutoModel.from_config(settings, **own, **single)
    except ConfigError:
        raise
    except Exception as error:  # of transformers, tokenizers and torch, for files of strangers
        raise ConfigError(
            f"{key}: {first_line(error)}. Without a network give the path of a folder with "
            "config.json, model.safetensors and the tokenizer's files"
        ) from error
    return (model.get_encoder() if model.config.is_encoder_decoder else model), tokenizer


def _check_size(key: str, model: nn.Module) -> None:
    """Raise ConfigError for a model that the machine's memory cannot hold; its tensors have shapes only."""
    numbers = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    needed, memory = 4 * numbers / 2**30, psutil.virtual_memory().total / 2**30
    if needed > memory:
        raise ConfigError(f"{key}: {numbers:.3g} weights take {needed:.3g} GiB, this machine has {memory:.3g} GiB")


def _lower_case(tokenizer: Any) -> None:
    """As sentence-transformers does for do_lower_case: before all else that the tokenizer does to a text."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])


def _padding(tokenizer: Any) -> int:
    """The token that fills texts up, on the right: a special one that the tokenizer does not put into a text itself.

    The one of unknown words is in texts as well, so it comes last.
    """
    given = set(tokenizer("a").input_ids)
    names = [tokenizer.pad_token, tokenizer.eos_token, *tokenizer.all_special_tokens]
    names = sorted(filter(None, names), key=lambda name: name == tokenizer.unk_token)
    free = [name for name in names if tokenizer.convert_tokens_to_ids(name) not in given]
    if not free:
        raise ConfigError("model.text.name: its tokenizer has no special token left to fill up short texts with")
    tokenizer.pad_token, tokenizer.padding_side = free[0], "right"
    return cast(int, tokenizer.pad_token_id)


def _dense(name: str, width: int, pretrained: bool) -> nn.Module:
    """The Dense module of a SentenceTransformer."""
    folder = sentence_folder(name) or SentenceFolder(name)
    dense = folder.dense
    if dense is None:
        raise ConfigError(
            f"model.text.name={name}: {folder.no_dense}. Set model.embed_dim for a new projection, or "
            "model.text.dense=false for none"
        )
    projection = nn.Linear(width, dense.width, bias=dense.bias)
    if pretrained:
        try:
            weights = load_file(dense.weights)
            projection.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ConfigError(f"{dense.weights}: {first_line(error)}") from error
    return projection


def _limit(config: ModelConfig, encoder: Any, tokenizer: Any) -> int:
    """What the configuration says, or the longest that the positions allow, or without any the tokenizer."""
    positions = positions_of(encoder)
    own = next((n for n in (positions, tokenizer.model_max_length) if n and n < 1 << 20), LONGEST)
    wanted = config.text.context_length or own
    if positions is not None and wanted > positions:
        raise ConfigError(f"model.text.context_length={wanted}: this model has {positions} positions")
    return wanted


def positions_of(encoder: Any) -> int | None:
    """The longest text that its position embeddings allow. Those of RoBERTa begin behind the one of padding."""
    tables = [module for name, module in encoder.named_modules() if name.endswith("position_embeddings")]
    behind = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    total = getattr(encoder.config, "max_position_embeddings", None)
    return total and total - max(behind, default=0)


def _layers(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's layers: its longest list of modules."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else [encoder]

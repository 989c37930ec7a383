"""Build text towers, which embed token ids, int64 (b, L) with L tokens per row, as (b, D), and their tokenizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from safetensors.torch import load_file
from tokenizers.normalizers import Lowercase, Sequence
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.batch import Lengths
from dyad.train.config import OWN_TEXT_TOWERS, ModelConfig, TextTower
from dyad.train.towers.adapters import add_adapters
from dyad.train.towers.frozen_cache import cache_bytes
from dyad.train.towers.pooled import Pooled
from dyad.train.towers.published import check_settings, explained, file_of, location_of, refuse_code, split_revision
from dyad.train.towers.rows import padded_length, token_counts
from dyad.train.towers.sentence_transformers import SentenceFolder, sentence_folder
from dyad.train.towers.tower import Tower, freeze

if TYPE_CHECKING:
    from dyad.train.towers.open_clip import BuildContext

LONGEST = 512  # tokens, for a model that names no limit


@dataclass(frozen=True)
class FixedLengthTokenizer:
    """Converts n texts to token ids, int64 (n, context), truncated or padded to the fixed length `context`.

    tokenizer: a tokenizer of transformers.
    """

    tokenizer: Any
    context: int

    def __call__(self, texts: list[str]) -> Tensor:
        shape = {"padding": "max_length", "truncation": True, "max_length": self.context, "return_tensors": "pt"}
        return self.tokenizer(texts, **shape).input_ids

    def lengths(self, tokens: Tensor) -> Lengths:
        """Return the number of tokens of each row, without padding."""
        return token_counts(tokens, self.tokenizer.pad_token_id)


@dataclass(frozen=True)
class TextTokenizer:
    """Converts texts to token ids, truncated to a length that each call chooses.

    tokenizer: a tokenizer of transformers. limit: the most tokens per text that the encoder takes.
    """

    tokenizer: Any
    limit: int

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return self.tokenizer.pad_token_id

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
        """Convert n texts, or n pairs of texts, to token ids int64 (n, L), truncated and padded on the right.

        length: the most tokens of a row. pairs: the second text of each pair, None for single texts; the longer text of
        a pair is truncated. L: the longest row, rounded up to a multiple of 8, at most `length`. Raises ConfigError for
        a `length` that this model does not take.
        """
        least = self.tokenizer.num_special_tokens_to_add(pairs is not None) + 1
        if not least <= length <= self.limit:
            raise ConfigError(
                f"texts of {length} tokens: this model takes {least} to {self.limit}. Change data.question.length or "
                "data.passage.length, or say what the model takes by model.text.context_length"
            )
        shape = {"padding": "longest", "truncation": True, "max_length": length, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, pairs, **shape).input_ids
        missing = padded_length(tokens.shape[1], length) - tokens.shape[1]
        return nn.functional.pad(tokens, (0, missing), value=self.pad)

    def lengths(self, tokens: Tensor) -> Lengths:
        """Return the number of tokens of each row, without padding."""
        return token_counts(tokens, self.tokenizer.pad_token_id)


def build_text_tower(context: BuildContext) -> tuple[Tower, Callable[[list[str]], Tensor]]:
    """Build the text tower of an image_text model and its tokenizer, which makes rows of one fixed length.

    context: the configuration, and the open_clip models that both towers share. Raises ConfigError for an unknown
    model, or weights that do not exist or do not fit.
    """
    config = context.config
    if config.text.kind in OWN_TEXT_TOWERS:
        return OWN_TEXT_TOWERS[config.text.kind](context)
    if config.text.kind is TextTower.open_clip:
        part = context.open_clip_model(*context.text_model).text
        trunk, projection = context.open_clip_parts(part, config.text.frozen, "model.text.unlocked_layers")
        return Tower(trunk, projection, cache_bytes=cache_bytes(config)), context.open_clip_tokenizer()
    tower, own = build_text_encoder(config, context.load_pretrained)
    length = config.text.context_length or min(own.limit, own.tokenizer.model_max_length)
    return tower, FixedLengthTokenizer(own.tokenizer, length)


def build_text_encoder(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    """Build a text tower from a transformers encoder, with a tokenizer for texts of any length.

    load_pretrained=False: build the architecture only, with random weights. Raises ConfigError for an unknown model,
    or weights that do not exist or do not fit.
    """
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
    if text.lower_case:  # before the tokenizer's own normalisation, as sentence-transformers does for do_lower_case
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *filter(None, [backend.normalizer])])
    pad = _padding(tokenizer)
    if config.grad_checkpointing:
        renamed = getattr(encoder, "activation_checkpointing_enable", None)  # in transformers 5.x
        (renamed or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    if text.frozen:
        lists = [list(module) for module in encoder.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=len, default=[encoder])
        freeze(encoder, layers, text.unlocked_layers)
    if text.lora_rank:
        add_adapters(encoder, text)
    width = encoder.config.hidden_size
    if config.embed_dim is not None:
        projection = nn.Linear(width, config.embed_dim)
    else:
        projection = _dense(name, width, pretrained) if text.dense else nn.Identity()
    tower = Tower(Pooled(encoder, text.pooling, pad), projection, cache_bytes=cache_bytes(config), pad=pad)
    return tower, TextTokenizer(tokenizer, _limit(config, encoder, tokenizer))


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """Load (encoder, tokenizer) of transformers from `name`: a folder, pkg:PACKAGE/FOLDER or a published model.

    pretrained: load its weights; else they are random. No file of the model can choose code to run, neither a class
    that comes with the model nor an attention kernel. Raises ConfigError when loading fails.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    location, revision = split_revision(location_of(name))
    key = f"model.text.name={name}"
    if location.startswith(("/", ".")) and not os.path.isdir(location):
        raise ConfigError(f"{key}: there is no folder {location}")
    check_settings(key, file_of(name, "config.json", fetch=True))
    if file_of(name, "adapter_config.json", fetch=False):
        raise ConfigError(f"{key}: holds adapters beside another model. Merge them into it (peft: merge_and_unload)")
    refuse_code()
    safe = {"trust_remote_code": False}
    single = {"dtype": torch.float32, **safe}  # not the dtype of the file, e.g. bf16
    advice = "Without a network give the path of a folder with config.json, model.safetensors and the tokenizer's files"
    with explained(key, advice):
        tokenizer = AutoTokenizer.from_pretrained(location, revision=revision, **safe)
        settings = AutoConfig.from_pretrained(location, revision=revision, **safe)
        settings._attn_implementation = settings._experts_implementation = None  # torch's own
        with torch.device("meta"):
            _check_size(key, AutoModel.from_config(settings, **safe))
        if pretrained:
            single |= {"revision": revision, "config": settings, "use_safetensors": True}
            model = AutoModel.from_pretrained(location, **single)
        else:
            model = AutoModel.from_config(settings, **single)
    return (model.get_encoder() if model.config.is_encoder_decoder else model), tokenizer


def _check_size(key: str, model: nn.Module) -> None:
    """Raise ConfigError if the float32 weights of a model, built on the meta device, exceed the machine's memory.

    key: the configuration key that names the model, for the message.
    """
    numbers = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    needed, memory = 4 * numbers / 2**30, psutil.virtual_memory().total / 2**30
    if needed > memory:
        raise ConfigError(f"{key}: {numbers:.3g} weights take {needed:.3g} GiB, this machine has {memory:.3g} GiB")


def _padding(tokenizer: Any) -> int:
    """Set the tokenizer's padding token, and padding on the right, and return the token's id.

    The token is a special token that the tokenizer does not add to every text. The token of unknown words is the last
    choice, because a text may contain it. Raises ConfigError if the tokenizer has no such token.
    """
    used = set(tokenizer("a").input_ids)
    names = [tokenizer.pad_token, tokenizer.eos_token, *tokenizer.all_special_tokens]
    names = sorted(filter(None, names), key=lambda name: name == tokenizer.unk_token)
    free = [name for name in names if tokenizer.convert_tokens_to_ids(name) not in used]
    if not free:
        raise ConfigError("model.text.name: its tokenizer has no special token left to fill up short texts with")
    tokenizer.pad_token, tokenizer.padding_side = free[0], "right"
    return cast(int, tokenizer.pad_token_id)


def _dense(name: str, width: int, pretrained: bool) -> nn.Module:
    """Return the Dense module of a SentenceTransformer folder as a linear layer.

    width: the layer's input width. pretrained: load its weights; else they are random. Raises ConfigError when the
    folder has no Dense module that is a plain linear layer.
    """
    folder = sentence_folder(name) or SentenceFolder(name)
    if folder.dense is None:
        raise ConfigError(
            f"model.text.name={name}: {folder.no_dense}. Set model.embed_dim for a new projection, or "
            "model.text.dense=false for none"
        )
    with explained(str(folder.dense)):
        weights = {name.removeprefix("linear."): tensor for name, tensor in load_file(folder.dense).items()}
        projection = nn.Linear(width, len(weights["weight"]), bias="bias" in weights)
        if pretrained:
            projection.load_state_dict(weights)
    return projection


def _limit(config: ModelConfig, encoder: Any, tokenizer: Any) -> int:
    """Return the most tokens of a text that the tower takes.

    The limit is model.text.context_length, else the number of position embeddings, else the tokenizer's limit, else
    512. Raises ConfigError for a context_length above the number of position embeddings.
    """
    positions = positions_of(encoder)
    own = next((n for n in (positions, tokenizer.model_max_length) if n and n < 1 << 20), LONGEST)
    wanted = config.text.context_length or own
    if positions is not None and wanted > positions:
        raise ConfigError(f"model.text.context_length={wanted}: this model has {positions} positions")
    return wanted


def positions_of(encoder: Any) -> int | None:
    """Return the most tokens that the encoder's position embeddings allow, None if the encoder's config has no limit.

    The positions of RoBERTa and its relatives begin after the padding index, so fewer tokens fit.
    """
    tables = [module for name, module in encoder.named_modules() if name.endswith("position_embeddings")]
    behind = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    total = getattr(encoder.config, "max_position_embeddings", None)
    return total and total - max(behind, default=0)

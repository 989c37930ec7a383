"""Build text towers, which embed token ids, int64 (b, L) with L tokens per row, as (b, D), and their tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import load_file
from tokenizers.normalizers import Lowercase, Sequence
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.batch import Lengths
from dyad.train.config import OWN_TEXT_TOWERS, ModelConfig, TextTower
from dyad.train.towers.adapters import add_adapters
from dyad.train.towers.pooled import Pooled
from dyad.train.towers.published import explained
from dyad.train.towers.rows import padded_length, token_counts
from dyad.train.towers.sentence_transformers import SentenceFolder, sentence_folder
from dyad.train.towers.tower import Tower, freeze
from dyad.train.towers.transformers_model import checkpoint_activations, layers_of, load_model

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
        return Tower(trunk, projection, cache_mb=config.frozen_cache_mb), context.open_clip_tokenizer()
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
    pretrained = load_pretrained and not text.from_scratch
    encoder, tokenizer = load_model(f"model.text.name={name}", name, "AutoTokenizer", pretrained)
    if hasattr(encoder, "encoder") and hasattr(encoder, "decoder"):  # T5; a saved encoder says is_encoder_decoder=false
        encoder = encoder.get_encoder()
    if text.lower_case:  # before the tokenizer's own normalisation, as sentence-transformers does for do_lower_case
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *filter(None, [backend.normalizer])])
    pad = _padding(tokenizer)
    if config.grad_checkpointing:
        checkpoint_activations(encoder)
    if text.frozen:
        freeze(encoder, layers_of(encoder), text.unlocked_layers)
    if text.lora_rank:
        add_adapters(encoder, text, "model.text")
    width = encoder.config.hidden_size
    if config.embed_dim is not None:
        projection = nn.Linear(width, config.embed_dim)
    else:
        projection = _dense(name, width, pretrained) if text.dense else nn.Identity()
    tower = Tower(Pooled(encoder, text.pooling, pad), projection, cache_mb=config.frozen_cache_mb, pad=pad)
    return tower, TextTokenizer(tokenizer, _limit(config, encoder, tokenizer))


def _padding(tokenizer: Any) -> int:
    """Set the tokenizer's padding token, and padding on the right, and return the token's id.

    The token is a special token that the tokenizer does not add to every text. The token of unknown words is the last
    choice, because a text may contain it. Raises ConfigError if the tokenizer has no such token.
    """
    used = set(tokenizer("a").input_ids)
    names = [tokenizer.pad_token, tokenizer.eos_token, *tokenizer.all_special_tokens]
    names = sorted(filter(None, names), key=lambda name: name == tokenizer.unk_token)
    if not (free := [name for name in names if tokenizer.convert_tokens_to_ids(name) not in used]):
        raise ConfigError("model.text.name: its tokenizer has no special token left to fill up short texts with")
    tokenizer.pad_token, tokenizer.padding_side = free[0], "right"
    return cast(int, tokenizer.pad_token_id)


def _dense(name: str, width: int, pretrained: bool) -> nn.Module:
    """Return the Dense modules of a SentenceTransformer folder: a linear layer, or several modules one after the other.

    width: the input width. pretrained: load their weights; else they are random. Raises ConfigError when the folder has
    no Dense module, or one that is no plain linear layer with an activation of ACTIVATIONS.
    """
    folder = sentence_folder(name) or SentenceFolder(name)
    if not folder.dense:
        raise ConfigError(f"model.text.name={name}: {folder.no_dense}. Set model.embed_dim, or model.text.dense=false")
    layers: list[nn.Module] = []
    for file, activation in folder.dense:
        with explained(str(file)):
            weights = {name.removeprefix("linear."): tensor for name, tensor in load_file(file).items()}
            layer = nn.Linear(width, len(weights["weight"]), bias="bias" in weights)
            if pretrained:
                layer.load_state_dict(weights)
        width = layer.out_features
        layers += [layer, nn.Tanh()] if activation == "Tanh" else [layer]
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


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

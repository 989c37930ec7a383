"""Build text towers, which embed token ids, int64 (b, L) with L tokens per row, as (b, D), and their tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import load_file
from tokenizers.normalizers import Lowercase, Sequence
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import checked_path
from dyad.data.base.limits import whole_number
from dyad.data.batch import PADDING, Lengths
from dyad.train.config import OWN_TEXT_TOWERS, ModelConfig, TextTower
from dyad.train.towers.adapters import add_adapters
from dyad.train.towers.layers import checkpoint_activations, freeze, layer_stack
from dyad.train.towers.libraries.published import TWO_TOWERS, explain_errors
from dyad.train.towers.libraries.sentence_transformers import SentenceFolder, sentence_folder
from dyad.train.towers.libraries.transformers_model import load_companion, load_model
from dyad.train.towers.text.end_token import ends_texts, with_end_token
from dyad.train.towers.text.likelihood import Likelihood, PromptTokenizer
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.rows import Grouped, padded_length, text_ends, token_counts
from dyad.train.towers.text.tokenizer_lock import call_tokenizer
from dyad.train.towers.tower import Tower

if TYPE_CHECKING:
    from dyad.train.towers.libraries.open_clip import BuildContext

CAUSAL = "AutoModelForCausalLM"  # of transformers
OTHERWISE = "Set model.embed_dim, or model.text.dense=false"
WIDEST = 1 << 16  # most outputs of a Dense module
LONGEST = 512  # most tokens of a text, for a model that names no limit
ENDS = ("argmax", "eos")  # pool_type of open_clip's text towers that pool the state at the end of the text
# poolers of open_clip's HFTextEncoder whose result does not depend on masked states
MASKED = ("MeanPooler", "ClsPooler", "ClsLastHiddenStatePooler")


@dataclass(frozen=True)
class MaskingTokenizer:
    """Base class of tokenizers that wrap one of transformers, `tokenizer`.

    Tokens that its attention mask leaves out become PADDING; a tokenizer without a mask, as SigLIP's, pads with a token
    that the encoder reads.
    """

    tokenizer: Any

    def full_lengths(self, texts: list[str], pairs: list[str] | None = None) -> list[int]:
        """Return the number of tokens of each text, or pair of texts, before it is cut, special tokens included."""
        return _full_lengths(self.tokenizer, texts, pairs)

    def lengths(self, tokens: Tensor) -> Lengths:
        """Return how many tokens each row of `tokens`, (n, L), has without PADDING, at least 1: int64 (n,) in NumPy."""
        return token_counts(tokens)


@dataclass(frozen=True)
class FixedLengthTokenizer(MaskingTokenizer):
    """Converts n texts to token ids, int64 (n, L), truncated or padded to L = `context_length` tokens."""

    context_length: int

    def __call__(self, texts: list[str]) -> Tensor:
        return _tokens(self.tokenizer, texts, padding="max_length", max_length=self.context_length)


@dataclass(frozen=True)
class OpenClipTokenizer:
    """Converts n texts to token ids, int64 (n, context length), by a tokenizer of open_clip.

    count: a function from token ids to the number of tokens of each row that the text tower needs; None: it needs all.
    """

    tokenizer: Any
    count: Callable[[Tensor], Lengths] | None

    def __call__(self, texts: list[str]) -> Tensor:
        return call_tokenizer(self.tokenizer, texts)

    @property
    def context_length(self) -> int:
        """The most tokens of a text, with those that begin and end it."""
        return self.tokenizer.context_length

    def full_lengths(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text before it is cut, with those that begin and end a text."""
        from open_clip.tokenizer import get_clean_fn

        own = self.tokenizer
        if (inner := getattr(own, "tokenizer", None)) is None:  # open_clip's SimpleTokenizer puts one at either end
            return [len(own.encode(text)) + 2 for text in texts]
        cleaned = [*map(getattr(own, "clean_fn", get_clean_fn("canonicalize")), texts)]  # SigLipTokenizer's is fixed
        if getattr(own, "tokenizer_mode", "") == "clips":  # open_clip adds three tokens by itself
            return [count + 3 for count in _full_lengths(inner, cleaned, add_special_tokens=False)]
        return _full_lengths(inner, cleaned)

    def lengths(self, tokens: Tensor) -> Lengths | None:
        """Return how many tokens of each row the text tower needs, int64 (b,) in NumPy; None: it needs all."""
        return self.count and self.count(tokens)


@dataclass(frozen=True)
class TextTokenizer(MaskingTokenizer):
    """Converts texts to token ids, truncated to a length that each call chooses.

    limit: the most tokens per text that the encoder takes.
    """

    limit: int

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
        """Convert n texts, or n pairs of texts, to token ids int64 (n, L), truncated, with PADDING on the right.

        length: the most tokens of a row. pairs: the second text of each pair, None for single texts; a pair that is too
        long loses tokens one by one, each from its longer text. L: the longest row, rounded up to a multiple of 8, at
        most `length`. Raises ConfigError for a `length` that this model does not take.
        """
        least = self.tokenizer.num_special_tokens_to_add(pairs is not None) + 1
        if not least <= length <= self.limit:
            near = min(max(length, least), self.limit)
            raise ConfigError(
                f"texts of {length} tokens: this model takes {least} to {self.limit}. Set data.question.length and "
                f"data.passage.length, where they are {length}, to {near}. A model whose number of positions is not "
                "limited takes more by model.text.context_length"
            )
        tokens = _tokens(self.tokenizer, texts, pairs, padding="longest", max_length=length)
        missing = padded_length(tokens.shape[1], length) - tokens.shape[1]
        return nn.functional.pad(tokens, (0, missing), value=PADDING)


def _tokens(tokenizer: Any, texts: list[str], pairs: list[str] | None = None, **shape: Any) -> Tensor:
    """Convert texts, or pairs of texts, to token ids, int64 (n, L), with PADDING where the attention mask is 0.

    If the tokenizer gives no attention mask, its token ids are returned unchanged. pairs: the second text of each pair;
    None: single texts. shape: further arguments of the tokenizer: padding, and max_length, to which it truncates texts.
    """
    found = call_tokenizer(tokenizer, texts, pairs, truncation=True, return_tensors="pt", **shape)
    mask = found.get("attention_mask")
    return found.input_ids if mask is None else found.input_ids.where(mask.bool(), PADDING)


def _full_lengths(tokenizer: Any, texts: list[str], pairs: list[str] | None = None, **options: Any) -> list[int]:
    """Return the number of tokens of each text, or pair of texts, by a tokenizer of transformers, which cuts nothing.

    options: further arguments of the tokenizer.
    """
    # verbose: transformers would warn that texts are too long for the model, which does not see them
    return [len(ids) for ids in call_tokenizer(tokenizer, texts, pairs, verbose=False, **options).input_ids]


class CutText(Grouped):
    """A text tower of open_clip, run on groups of rows, cut as Grouped does, not at the full context length.

    `cut_to_batch` turns a tower into one: an HFTextEncoder that masks padding and whose pooler is one of MASKED, so
    that padding changes no embedding; or a causal one, see CausalText.
    """

    def encode_group(self, tokens: Tensor) -> Tensor:
        return super(Grouped, self).forward(tokens)  # open_clip's


class CausalText(CutText):
    """open_clip's causal TextTransformer as a CutText.

    The model pools the state at the end of the text, and no state depends on later tokens, so rows can be cut.
    open_clip itself runs every text at the full context length, mostly 77 tokens.
    """

    fills = 0

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor]:
        # dynamo of Python 3.13 traces super().name alone, not cast(Any, super()); the mask is of the full context
        states, mask = super()._embeds(text)  # pyright: ignore[reportAttributeAccessIssue]
        return states, mask[: text.shape[1], : text.shape[1]]


def cut_to_batch(trunk: Any) -> nn.Module:
    """Make a text tower of open_clip, in place, group and cut its rows as Grouped does; return the tower.

    The names of its weights do not change. These towers stay as they are: a TextTransformer in which every token
    attends to all others (SigLIP), which pools the first, the last or every state of a row, or which has a class token
    at the end (CoCa); an HFTextEncoder with a pooler that MASKED lacks; and a tower that returns token states too.
    """
    kind = type(trunk)
    if kind.__name__ == "TextTransformer" and trunk.pool_type in ENDS and not trunk.output_tokens:
        if trunk.attn_mask is not None and trunk.cls_emb is None:
            trunk.__class__ = _cut_kind(CausalText, kind)
            trunk.count = partial(text_ends, end=trunk.eos_id if trunk.pool_type == "eos" else None)
    elif kind.__name__ == "HFTextEncoder" and type(trunk.pooler).__name__ in MASKED and not trunk.output_tokens:
        trunk.__class__, trunk.fills = _cut_kind(CutText, kind), trunk.config.pad_token_id
        trunk.count = partial(token_counts, padding=trunk.fills)
    return trunk


@cache
def _cut_kind(cut: type[Grouped], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cut` and of open_clip's class `kind`. It has the name of `kind`, which exports look up."""
    return type(kind.__name__, (cut, kind), {})


def build_text_tower(context: BuildContext) -> tuple[Tower, Callable[[list[str]], Tensor]]:
    """Build the text tower of an image_text model, and its tokenizer, which gives rows of one fixed length.

    context: the configuration, and the models of libraries that both towers share. The tokenizer is a function from
    n texts to int64 (n, L), L the same in all calls: an OpenClipTokenizer, a FixedLengthTokenizer or that of a plugin.
    Raises ConfigError for an unknown model, weights that do not exist or do not fit, and as `build_text_encoder`.
    """
    config = context.config
    if config.text.kind in OWN_TEXT_TOWERS:
        return OWN_TEXT_TOWERS[config.text.kind](context)
    if config.text.kind is TextTower.open_clip:
        part = context.open_clip_model(*context.text_model).text
        trunk, projection = context.open_clip_parts(part, config.text.frozen, "model.text.unlocked_layers")
        if config.text.lora_rank:
            add_adapters(trunk, config.text, "model.text")
        tower = Tower(cut_to_batch(trunk), projection, cache_mb=config.frozen_cache_mb)
        count = trunk.count if isinstance(trunk, Grouped) else None
        return tower, OpenClipTokenizer(context.open_clip_tokenizer(), count)
    tower, own = build_text_encoder(context)
    length = config.text.context_length or min(own.limit, own.tokenizer.model_max_length)
    return tower, FixedLengthTokenizer(own.tokenizer, length)


def build_text_encoder(context: BuildContext) -> tuple[Tower, TextTokenizer]:
    """Build a text tower from a transformers encoder, with a tokenizer for texts of any length.

    If the transformers model has an image tower too, such as CLIP, its text model pools by itself. The projection is a
    new linear layer to model.embed_dim. If model.embed_dim is null, it is the text projection of such a model, or with
    model.text.dense=true the Dense modules of a SentenceTransformer folder, else the identity. context: as in
    `build_text_tower`. Raises ConfigError for an unknown model, for weights that do not exist, do not fit or are not
    complete, for a tokenizer without special tokens, for one that cannot do as model.text.end_token or
    model.text.lower_case asks, and for a model.text.context_length above the model's limit.
    """
    config, text, name = context.config, context.config.text, context.text_name
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    key = f"model{'.text' if text.name else ''}.name={name}"
    pretrained = context.load_pretrained and not text.from_scratch
    tokenizer, loaded = load_companion(key, name, "AutoTokenizer"), context.transformers_model(key, name, pretrained)
    encoder, pooling, own_projection, one_length = loaded.model, text.pooling, None, False
    if encoder.config.model_type in TWO_TOWERS:
        one_length = encoder.config.model_type.startswith("siglip")
        own_projection = getattr(encoder, "text_projection", None) or nn.Identity()
        encoder, pooling = encoder.text_model, None
    elif hasattr(encoder, "encoder") and hasattr(encoder, "decoder"):  # T5, whose saved encoder has no decoder
        encoder = encoder.get_encoder()
    loaded.refuse_missing(encoder, own_projection or nn.Identity(), pooled=pooling is not None)
    if text.lower_case:  # before the tokenizer's own normalisation, as sentence-transformers does for do_lower_case
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            raise ConfigError(
                f"model.text.lower_case=true, {key}: its tokenizer, {type(tokenizer).__name__}, is in Python and "
                "cannot be made to lower texts. Take a model with a tokenizer.json, or set model.text.lower_case=false"
            )
        backend.normalizer = Sequence([Lowercase(), *filter(None, [backend.normalizer])])
    changes = ", lower_case" * text.lower_case
    if text.end_token and not ends_texts(tokenizer):
        tokenizer = with_end_token(tokenizer, key)
        changes += f", end={tokenizer.eos_token_id}"
    pad = _set_padding(tokenizer, tokenizer.padding_side if one_length else "right")
    _set_training(encoder, config)
    width = encoder.config.hidden_size
    if config.embed_dim is not None:
        projection = nn.Linear(width, config.embed_dim)
    elif own_projection is not None:
        projection = own_projection
    else:
        projection = _dense(name, width, pretrained) if text.dense else nn.Identity()
    tower = Tower(Pooled(encoder, pooling, pad, one_length, changes), projection, cache_mb=config.frozen_cache_mb)
    return tower, TextTokenizer(tokenizer, _limit(config, encoder, tokenizer))


def build_likelihood(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, PromptTokenizer]:
    """Build a tower that scores answers to prompts by a causal language model, with its tokenizer.

    load_pretrained=False: build the architecture only, with random weights. Raises ConfigError for a model that is
    unknown or not of transformers, weights that do not exist or are not complete, a model.embed_dim, a tokenizer with
    neither bos_token nor eos_token, or a model.text.context_length above the model's limit.
    """
    text, name = config.text, config.text.name or config.name
    if text.kind is not TextTower.transformers or name is None or config.embed_dim is not None:
        raise ConfigError(
            "task=language_model: a score is a likelihood, of a causal language model of transformers. Set "
            "model.text.kind=transformers, model.text.name=FOLDER and model.embed_dim=null"
        )
    key = f"model{'.text' if text.name else ''}.name={name}"
    pretrained = load_pretrained and not text.from_scratch
    tokenizer, loaded = load_companion(key, name, "AutoTokenizer"), load_model(key, name, pretrained, CAUSAL)
    loaded.refuse_missing(encoder := loaded.model, pooled=False)
    begin = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None)
    if begin is None:
        raise ConfigError(f"{key}: its tokenizer has neither bos_token nor eos_token, to begin a prompt with")
    _set_training(encoder, config)
    limit = _limit(config, encoder, tokenizer)
    return Tower(Likelihood(encoder), nn.Identity()), PromptTokenizer(tokenizer, limit, begin)


def _set_training(encoder: nn.Module, config: ModelConfig) -> None:
    """Apply model.grad_checkpointing, model.text.frozen and model.text.lora_rank to a text encoder, in place.

    Raises ConfigError as `add_adapters` (adapters.py) and `checkpoint_activations` (layers.py).
    """
    if config.grad_checkpointing:
        checkpoint_activations(encoder)
    if config.text.frozen:
        freeze(encoder, layer_stack(encoder), config.text.unlocked_layers)
    if config.text.lora_rank:
        add_adapters(encoder, config.text, "model.text")


def _set_padding(tokenizer: Any, side: str) -> int:
    """Set the padding side of a tokenizer, in place, and a padding token if it has none; return the padding token's id.

    side: "left" or "right". A tokenizer without a padding token gets its eos token or another special token, which may
    occur in texts too: only the attention mask marks padding. Raises ConfigError if it has no special token.
    """
    if not (names := [*filter(None, [tokenizer.pad_token, tokenizer.eos_token]), *tokenizer.all_special_tokens]):
        raise ConfigError("model.text.name: its tokenizer has no special token to fill up short texts with")
    tokenizer.pad_token, tokenizer.padding_side = names[0], side
    return cast(int, tokenizer.pad_token_id)


def _dense(name: str, width: int, pretrained: bool) -> nn.Module:
    """Return the Dense modules of a SentenceTransformer folder: a linear layer, or several modules one after the other.

    name: the folder or published model; files that the hub's cache lacks are downloaded. width: the input width.
    pretrained: load the weights; else they are random. Raises ConfigError when no Dense module is found, for one that
    is no plain linear layer with an activation of ACTIVATIONS, and for weights that are missing or do not fit.
    """
    folder = sentence_folder(name, fetch=True) or SentenceFolder(name)
    if not folder.dense:
        raise ConfigError(f"model.text.name={name}: {folder.no_dense}. {OTHERWISE}")
    layers: list[nn.Module] = []
    for dense in folder.dense:
        with explain_errors(f"model.text.name={name}: its Dense module"):
            if (features := whole_number("out_features", dense.settings["out_features"])) > WIDEST:
                raise ConfigError(f"model.text.name={name}: its Dense module has {features:,} outputs. {OTHERWISE}")
            layer = nn.Linear(width, features, bias=dense.settings.get("bias", True))
            if pretrained:
                if dense.weights is None:
                    raise ConfigError(f"model.text.name={name}: its Dense module has no model.safetensors. {OTHERWISE}")
                weights = load_file(checked_path(dense.weights))
                layer.load_state_dict({key.removeprefix("linear."): tensor for key, tensor in weights.items()})
        width = layer.out_features
        layers += [layer, nn.Tanh()] if dense.activation == "Tanh" else [layer]
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


def _limit(config: ModelConfig, encoder: Any, tokenizer: Any) -> int:
    """Return the most tokens of a text that the tower takes.

    The limit is model.text.context_length, else the number of position embeddings, else the tokenizer's limit, else
    512; numbers of 2²⁰ or more count as no limit. Raises ConfigError for a context_length above the number of position
    embeddings, or without room for a token beside the special ones.
    """
    positions = positions_of(encoder)
    own = next((n for n in (positions, tokenizer.model_max_length) if n and n < 1 << 20), LONGEST)
    wanted = config.text.context_length or own
    if positions is not None and wanted > positions:
        raise ConfigError(f"model.text.context_length={wanted}: this model has {positions} positions")
    if wanted < (least := tokenizer.num_special_tokens_to_add() + 1):
        raise ConfigError(f"model.text.context_length={wanted}: this model takes {least} tokens or more")
    return wanted


def positions_of(encoder: Any) -> int | None:
    """Return the most tokens that the encoder's position embeddings allow, None if the encoder's config has no limit.

    In RoBERTa and similar encoders positions begin at padding index + 1, so fewer tokens fit.
    """
    tables = [module for name, module in encoder.named_modules() if name.endswith("position_embeddings")]
    behind = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    total = getattr(encoder.config, "max_position_embeddings", None)
    return total and total - max(behind, default=0)

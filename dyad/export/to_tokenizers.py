"""Convert the tokenizer of a model to one tokenizer.json for the tokenizers library (Python, Rust, JavaScript, …)."""

from typing import Any

from ftfy import chardata
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.train.towers.models import TwoTowerModel
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.text_tower import MaskingTokenizer, OpenClipTokenizer
from dyad.train.towers.tower import Tower

CHARS: Any = chardata  # the tables of ftfy, by which open_clip's tokenizers clean texts
_LINE = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
_LOWER = [normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς"), normalizers.Lowercase()]  # as str.lower does
_ENTITIES = {r"&(?:amp;)+": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&(?:apos|#0*39|#x27);": "'", "&nbsp;": " "}
_QUOTES = {CHARS.SINGLE_QUOTE_RE.pattern: "'", CHARS.DOUBLE_QUOTE_RE.pattern: '"'}
_CONTROL = "".join(rf"\x{{{code:x}}}" for code in CHARS.CONTROL_CHARS)
_REMOVED = {r"\x1b\[[\d;]*[a-zA-Z]": "", f"[{_CONTROL}]": ""}
_BASIC = [
    *(normalizers.Replace(Regex(pattern), text) for pattern, text in _ENTITIES.items()),
    *(normalizers.Replace(chr(code), text) for code, text in {**CHARS.LIGATURES, **CHARS.WIDTH_MAP}.items()),
    *(normalizers.Replace(Regex(pattern), text) for pattern, text in {**_QUOTES, **_REMOVED}.items()),
    normalizers.NFC(),
]
# open_clip's cleaning functions by name, without their repair of broken encodings and their rarer HTML entities
CLEANING: dict[str, list[Any]] = {
    "_clean_lower": [*_BASIC, *_LINE, *_LOWER],
    "_clean_whitespace": [*_BASIC, *_LINE],
    "_clean_canonicalize": [
        *_BASIC,
        normalizers.Replace("_", " "),
        normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""),
        *_LOWER,
        *_LINE,
    ],
}
WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""  # the pattern of open_clip's tokenizer


def to_tokenizers(model: TwoTowerModel) -> Tokenizer:
    """Convert the tokenizer of a model to a Tokenizer of the tokenizers library, without truncation.

    The result pads to the longest row, or to the context length for a tower that takes rows of one length only. Raises
    ConfigError for a tokenizer that the tokenizers library cannot express.
    """
    own: Any = model.tokenize.tokenizer if isinstance(model.tokenize, OpenClipTokenizer) else model.tokenize
    if hasattr(own, "bpe_ranks"):
        converted, pad = _clip(own), {}
    else:
        fast = getattr(getattr(own, "tokenizer", None), "backend_tokenizer", None)
        if fast is None:
            raise ConfigError(f"format=onnx: the tokenizers library has no {type(own).__name__}. Take another format")
        converted = Tokenizer.from_str(fast.to_str())
        if hasattr(own, "clean_fn"):
            before = [] if converted.normalizer is None else [converted.normalizer]
            converted.normalizer = normalizers.Sequence([*_cleaning(own), *before])
        filling = padding_id(model)
        pad_id = own.tokenizer.pad_token_id if filling is None else filling
        pad = {"pad_id": pad_id, "pad_token": own.tokenizer.pad_token}
    fixed = None if takes_any_length(model.towers.y_tower) else getattr(own, "context_length", None)
    converted.no_truncation()
    converted.enable_padding(direction="right", length=fixed, **pad)
    return converted


def padding_id(model: TwoTowerModel) -> int | None:
    """Return the token id that stands for padding in the input of a graph; None if no id does.

    Tokenizers without an attention mask, such as open_clip's own, have none. It is the id of the padding token. If the
    padding token is also another special token, such as the end token in CLIP, it is the size of the vocabulary, an id
    that no token has.
    """
    own: Any = model.tokenize
    if not isinstance(own, MaskingTokenizer):
        return None
    inner = own.tokenizer
    if "attention_mask" not in inner("a"):
        return None
    others = (inner.unk_token_id, inner.bos_token_id, inner.eos_token_id, inner.cls_token_id, inner.sep_token_id)
    return len(inner) if inner.pad_token_id in others else inner.pad_token_id


def takes_any_length(tower: nn.Module) -> bool:
    """Return whether a text tower takes rows of any number of tokens, at most its context length.

    Only towers of transformers encoders may (`Pooled`); False for one that takes rows of its context length alone.
    """
    return isinstance(tower, Tower) and isinstance(tower.trunk, Pooled) and not tower.trunk.one_length


def _clip(own: Any) -> Tokenizer:
    """Convert open_clip's SimpleTokenizer, `own`, to the tokenizers library; the padding id is not set here.

    The result cleans texts, splits words, encodes them by byte pairs, and adds start and end token.
    """
    start, end = (own.decoder[i] for i in own.all_special_ids[:2])
    converted = Tokenizer(
        models.BPE(own.encoder, list(own.bpe_ranks), end_of_word_suffix="</w>", continuing_subword_prefix="")
    )
    converted.normalizer = normalizers.Sequence(_cleaning(own))
    # cleaning keeps the marks, so those that are written in a text become their tokens
    if converted.normalizer.normalize_str(end) == end:
        converted.add_special_tokens([start, end])
    words = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    marks = [(start, own.sot_token_id), (end, own.eot_token_id)]
    converted.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=marks)
    return converted


def _cleaning(own: Any) -> list[Any]:
    """Return normalizers of the tokenizers library that clean texts as `own.clean_fn` does.

    own: an open_clip tokenizer. Raises ConfigError if its cleaning function has no counterpart in the table CLEANING.
    """
    if (name := getattr(own.clean_fn, "__name__", "")) not in CLEANING:
        raise ConfigError(f"format=onnx: nothing in a tokenizer.json cleans texts as '{name}'. Take another format")
    return CLEANING[name]

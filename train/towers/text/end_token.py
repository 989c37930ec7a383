"""Make a tokenizer end every text with its end-of-sequence token (model.text.end_token)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from dyad.data.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# settings of a tokenizer that its tokenizer.json does not have
KEPT = "model_max_length model_input_names padding_side truncation_side chat_template extra_special_tokens".split()
TEMPLATE = "TemplateProcessing"  # the post-processor that adds special tokens at any place
PLAIN: dict[str, Any] = {
    "type": TEMPLATE,
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


def ends_texts(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers itself ends a text with a special token, such as [SEP] or </s>.

    The token need not be its eos_token: Qwen3-Embedding ends texts with its padding token.
    """
    plain, own = (tokenizer("a", add_special_tokens=special).input_ids[-1:] for special in (False, True))
    return own != plain


def with_end_token(tokenizer: Any, key: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that does as `tokenizer` and ends every text, and each text of a pair, with its eos_token.

    The length to which texts are truncated includes the token. tokenizer: one of transformers that does not end texts
    itself (`ends_texts`). key: the configuration key and value that named the model, for messages. Raises ConfigError
    for a tokenizer without an eos_token, and for one in Python, which has no post-processor.
    """
    from transformers import PreTrainedTokenizerFast  # a second of imports, which other towers do not need

    off = "or set model.text.end_token=false"
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"model.text.end_token=true, {key}: its tokenizer has no eos_token to end texts with. Set eos_token in "
            f"tokenizer_config.json to a token of its vocabulary, {off}"
        )
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise ConfigError(
            f"model.text.end_token=true, {key}: its tokenizer, {type(tokenizer).__name__}, is in Python and cannot be "
            f"made to end texts with {tokenizer.eos_token}. Take a model with a tokenizer.json, {off}"
        )
    settings = json.loads(backend.to_str())
    settings["post_processor"] = _ending(settings["post_processor"], tokenizer.eos_token, tokenizer.eos_token_id)
    # not the class of `tokenizer`: some, such as GPTNeoXTokenizer, replace the post-processor of a saved folder
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
        **tokenizer.special_tokens_map,
        **{name: getattr(tokenizer, name) for name in KEPT},
    )


def _ending(post_processor: dict[str, Any] | None, token: str, token_id: int) -> dict[str, Any]:
    """Return the settings of a post-processor that does as `post_processor` and puts a token behind each text.

    post_processor: as in a tokenizer.json; None: none. The token is added to the template that it has: the tokenizers
    library cannot process a pair by two templates, one after the other.
    """
    own = post_processor or PLAIN
    steps = own["processors"] if own["type"] == "Sequence" else [own]
    template = next((step for step in steps if step["type"] == TEMPLATE), PLAIN)
    others = [step for step in steps if step["type"] != TEMPLATE]

    def ended(pieces: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            yield piece
            if text := piece.get("Sequence"):
                yield {"SpecialToken": {"id": token, "type_id": text["type_id"]}}

    known = {**template["special_tokens"], token: {"id": token, "ids": [token_id], "tokens": [token]}}
    new = {name: [*ended(template[name])] for name in ("single", "pair")}
    return {"type": "Sequence", "processors": [*others, {"type": TEMPLATE, **new, "special_tokens": known}]}

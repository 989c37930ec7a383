"""Tiny decoders of transformers whose tokenizers put nothing behind a text, as those of Llama, Mistral and GPT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteProcessor, Sequence, TemplateProcessing
from transformers import (
    AutoModel,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

BEGIN, END, LETTERS = "<s>", "</s>", sorted(ByteLevel.alphabet())
VOCAB = {token: i for i, token in enumerate(["<unk>", BEGIN, END, *LETTERS, "▁"])}


def _bytes(post_processor: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE(VOCAB, []))
    tokenizer.pre_tokenizer, tokenizer.post_processor = ByteLevel(add_prefix_space=False), post_processor
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)


def _begun() -> TemplateProcessing:
    return TemplateProcessing(f"{BEGIN} $A", f"{BEGIN} $A {BEGIN}:1 $B:1", [(BEGIN, VOCAB[BEGIN])])


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaTokenizer(VOCAB, [], add_bos_token=True),
    "llama3": lambda: _bytes(Sequence([ByteProcessor(trim_offsets=False), _begun()])),
    "bytes": lambda: _bytes(ByteProcessor(trim_offsets=False)),
    "gpt2": lambda: GPT2Tokenizer(VOCAB, [], eos_token=END, bos_token=END),
    "neox": lambda: GPTNeoXTokenizer(VOCAB, [], **dict.fromkeys(("eos_token", "bos_token", "pad_token"), END)),
}


def write(folder: Path, kind: str = "llama3") -> str:
    """Write a model with random weights and a tokenizer of TOKENIZERS to `folder`; return its path."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    TOKENIZERS[kind]().save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=VOCAB[BEGIN],
        eos_token_id=VOCAB[END],
    )
    AutoModel.from_config(shape).save_pretrained(folder)
    return str(folder)

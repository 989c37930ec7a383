"""A tiny decoder of transformers, Qwen3, with bf16 weights and a tokenizer that ends every text with its padding."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging

END, TURN = "<|endoftext|>", "<|im_end|>"


def write(folder: Path, width: int = 32, layers: int = 3, weights: bool = True) -> None:
    """Write the model to `folder`; weights=False: its settings alone, which model.text.from_scratch=true needs."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*letters, END, TURN])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    tokenizer.post_processor = TemplateProcessing("$A " + END, f"$A {END} $B {END}", [(END, len(letters))])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, eos_token=TURN).save_pretrained(folder)
    shape = Qwen3Config(
        vocab_size=len(letters) + 2,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=1024,
        pad_token_id=len(letters),
    )
    if weights:
        AutoModel.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    else:
        shape.save_pretrained(folder)

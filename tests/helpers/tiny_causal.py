"""A tiny causal language model of transformers, GPT-2 over bytes, in float32 and without dropout."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast
from transformers.utils import logging

END = "<|endoftext|>"


def write(folder: Path, positions: int = 64) -> None:
    """Write the model and its tokenizer to `folder`."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*letters, END])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), len(letters))
    shape = GPT2Config(
        vocab_size=len(letters) + 1, n_positions=positions, n_embd=16, n_layer=2, n_head=2, **off, **ends
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)

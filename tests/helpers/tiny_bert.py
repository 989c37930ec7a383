"""python -m helpers.tiny_bert FOLDER makes a tiny transformers text model and its tokenizer there."""

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizer
from transformers.utils import logging

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write(folder: Path) -> None:
    """Write the model, with random weights, and its tokenizer of letters to `folder`."""
    logging.disable_progress_bar()
    torch.manual_seed(0)  # or a test that compares two runs would meet other weights each time
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{letter}" for letter in LETTERS), *LETTERS]
    shape = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(shape).save_pretrained(folder)
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""The number of tokens of a text before it is cut: each tokenizer cuts a text if, and only if, it counts more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_bert
from helpers.towers import ARCHITECTURES, MINILM, transformers_tower, with_text
from open_clip.tokenizer import SigLipTokenizer
from transformers import AutoTokenizer

from dyad.data.batch import PADDING
from dyad.train.config import ModelConfig
from dyad.train.towers.libraries.open_clip import BuildContext
from dyad.train.towers.libraries.published import location_of
from dyad.train.towers.text.likelihood import PromptTokenizer
from dyad.train.towers.text.text_tower import OpenClipTokenizer, TextTokenizer, build_text_tower

LENGTH = 12
TEXTS = [" ".join(["frog"] * count) for count in range(1, 20)]


def rows(tokenize: Any, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, and of the text with one more word: equal if and only if that word is cut."""
    return tokenize([text])[0].tolist(), tokenize([f"{text} toad"])[0].tolist()


def check(tokenize: Any, length: int) -> None:
    counts = tokenize.full_lengths(TEXTS)
    assert counts == tokenize.full_lengths(TEXTS[:7]) + tokenize.full_lengths(TEXTS[7:]) and counts == sorted(counts)
    for text, count in zip(TEXTS, counts, strict=True):
        same, longer = rows(tokenize, text)
        assert (same == longer) is (count >= length), (text, count)


def test_transformers_of_one_length(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    tokenize: Any = build_text_tower(BuildContext(with_text(transformers_tower(str(tmp_path))), False))[1]
    assert tokenize.full_lengths(["abc de", "a", "x" * 40]) == [7, 3, 42]
    tokenize = build_text_tower(BuildContext(with_text(transformers_tower(MINILM, context_length=LENGTH)), False))[1]
    check(tokenize, LENGTH)


def test_texts_and_pairs_of_a_chosen_length(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenize = TextTokenizer(AutoTokenizer.from_pretrained(location_of(MINILM)), 512)
    check(AtLength(tokenize), LENGTH)
    tiny_bert.write(tmp_path)
    tokenize = TextTokenizer(AutoTokenizer.from_pretrained(tmp_path), 512)
    firsts, seconds = ["ab", "c d"], ["abcde", "x " * 700]
    assert tokenize.full_lengths(firsts, seconds) == [10, 705]
    assert [int((row != PADDING).sum()) for row in tokenize(firsts, 512, seconds)] == [10, 512]
    assert "sequence length" not in capfd.readouterr().err


class AtLength:
    """A TextTokenizer at LENGTH tokens."""

    def __init__(self, tokenize: TextTokenizer) -> None:
        self.tokenize, self.full_lengths = tokenize, tokenize.full_lengths

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return torch.nn.functional.pad(found := self.tokenize(texts, LENGTH), (0, LENGTH - found.shape[1]))


@pytest.mark.parametrize("kind", ["bytes", "transformers", "clips"])
def test_open_clip(kind: str, tmp_path: Path) -> None:
    text = {**ARCHITECTURES["vit"]["text_cfg"], "context_length": LENGTH}
    if kind != "bytes":
        own = AutoTokenizer.from_pretrained(location_of(MINILM))
        own.add_special_tokens({"bos_token": "[CLS]", "eos_token": "[SEP]"})
        own.save_pretrained(tmp_path / "own")
        text |= {"hf_tokenizer_name": str(tmp_path / "own"), "vocab_size": 30522}
        text |= {"tokenizer_mode": "clips"} if kind == "clips" else {}
    (tmp_path / "model.json").write_text(json.dumps({**ARCHITECTURES["vit"], "text_cfg": text}))
    _, tokenize = build_text_tower(BuildContext(ModelConfig(name=str(tmp_path / "model.json")), False))
    assert isinstance(tokenize, OpenClipTokenizer) and tokenize.context_length == LENGTH
    check(tokenize, LENGTH)
    if kind == "bytes":
        assert tokenize.full_lengths(["frog", "A  FROG!", "frog " * 100]) == [3, 5, 102]


def test_siglip_of_open_clip() -> None:
    """The tokenizer of a config whose name has "siglip", here with the words of another: its own are downloaded."""
    own = SigLipTokenizer.__new__(SigLipTokenizer)
    own.tokenizer, own.context_length = AutoTokenizer.from_pretrained(location_of(MINILM)), LENGTH
    tokenize = OpenClipTokenizer(own, None)
    check(tokenize, LENGTH)
    assert tokenize.full_lengths(["frog", "A  frog!?"]) == [3, 4]


def test_prompts_and_answers(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    tokenize = PromptTokenizer(AutoTokenizer.from_pretrained(tmp_path), 512, begin=2)
    assert tokenize.full_lengths(["abc", "", "d " * 600]) == [3, 0, 600]

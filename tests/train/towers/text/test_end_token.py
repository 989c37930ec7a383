"""model.text.end_token: every text ends with the tokenizer's end-of-sequence token, where it does not end by itself."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import tiny_bert, tiny_decoder, tiny_llama
from helpers.messages import raises
from helpers.tiny_llama import END, TOKENIZERS, VOCAB
from helpers.towers import transformers_tower, with_text
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from dyad.data.base.errors import ConfigError
from dyad.data.batch import PADDING
from dyad.eval.encode.embeddings import identity_of
from dyad.train.cli.compose import compose_config
from dyad.train.cli.unread_keys import refuse_unread
from dyad.train.config import ModelConfig, Pooling, TextTower, TextTowerConfig
from dyad.train.towers.build import build_image_text, build_text_pair
from dyad.train.towers.models import TextPairModel

EOS = VOCAB[END]


def build(folder: object, **text: Any) -> TextPairModel:
    options = {"pooling": Pooling.last, "end_token": True, **text}
    tower = TextTowerConfig(kind=TextTower.transformers, name=str(folder), **options)
    return build_text_pair(ModelConfig(name=None, embed_dim=None, text=tower))


def tokenizer_of(model: TextPairModel) -> Any:
    return cast(Any, model.tokenize).tokenizer


def ids(tokens: Tensor) -> list[list[int]]:
    return [row[row != PADDING].tolist() for row in tokens]


def edit(folder: str, **changed: object) -> None:
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_and_both_texts_of_a_pair_end_with_the_token(kind: str, tmp_path: Path) -> None:
    """At any length, and in every other way as the tokenizer without the key."""
    folder = tiny_llama.write(tmp_path, kind)
    plain, model = build(folder, end_token=False), build(folder)
    texts, others = ["a red cat", "", "b" * 40], ["d", "e" * 30, "a"]
    for length in (512, 12):
        own, found = ids(plain.tokenize(texts, length - 1)), ids(model.tokenize(texts, length))
        assert found == [[*row, EOS] for row in own]
        assert model.tokenize(texts, length).shape == (3, 48 if length == 512 else 12)
    own, found = ids(plain.tokenize(texts, 512, others)), ids(model.tokenize(texts, 512, others))
    firsts = map(len, ids(plain.tokenize(texts, 512)))
    assert found == [[*row[:n], EOS, *row[n:], EOS] for row, n in zip(own, firsts, strict=True)]
    for row in ids(model.tokenize(["a" * 30, "a" * 30, "a"], 14, ["b" * 30, "b", "b" * 30])):
        assert (len(row), row[-1], row.count(EOS) - row[:1].count(EOS)) == (14, EOS, 2)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_saved_tokenizer_ends_texts_too(kind: str, tmp_path: Path) -> None:
    folder = tiny_llama.write(tmp_path / "a", kind)
    edit(folder, extra_special_tokens=["<unk>"], model_max_length=99)
    model = build(folder)
    tokenizer_of(model).save_pretrained(tmp_path / "b")
    again = AutoTokenizer.from_pretrained(tmp_path / "b")
    for pair in (None, "a dog"):
        assert again("a red cat", pair).input_ids == tokenizer_of(model)("a red cat", pair).input_ids
    assert (again.eos_token, again.bos_token, again.pad_token) == (END, tokenizer_of(model).bos_token, END)
    assert again.extra_special_tokens == ["<unk>"] and again.model_max_length == 99


@pytest.mark.parametrize("kind", ["bert", "decoder"])
def test_a_tokenizer_that_ends_texts_by_itself_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    """Qwen3-Embedding's ends them with its padding token, which is not its eos_token; BERT's has no eos_token."""
    {"bert": tiny_bert, "decoder": tiny_decoder}[kind].write(tmp_path)
    plain, model = build(tmp_path, end_token=False), build(tmp_path)
    assert tokenizer_of(model).backend_tokenizer.to_str() == tokenizer_of(plain).backend_tokenizer.to_str()
    for pairs in (None, ["e", "f"]):
        assert torch.equal(model.tokenize(["ab", "c"], 32, pairs), plain.tokenize(["ab", "c"], 32, pairs))
    assert identity_of(model.towers) == identity_of(plain.towers)


def test_the_embedding_is_the_state_of_the_token(tmp_path: Path) -> None:
    """The padding token is the same: only the attention mask tells which of them ends the text."""
    folder = tiny_llama.write(tmp_path)
    model, texts = build(folder), ["a red cat on the roof", "x", ""]
    encoder, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert tokenizer_of(model).pad_token == END
    with torch.no_grad():
        found = model.towers.eval().x_tower(model.tokenize(texts, 64))
        for row, text in zip(found, texts, strict=True):
            own = torch.tensor([[*tokenizer(text).input_ids, EOS]])
            torch.testing.assert_close(row, encoder(own).last_hidden_state[0, -1], rtol=1e-4, atol=1e-5)
    plain = build(folder, end_token=False)
    towers = [model.towers, plain.towers, build(folder, end_token=False, lower_case=True).towers]
    assert len(set(map(identity_of, towers))) == 3  # embeddings on disk are not those of another


def test_captions_end_with_the_token_at_the_fixed_length(tmp_path: Path) -> None:
    text = transformers_tower(tiny_llama.write(tmp_path), pooling=Pooling.last, end_token=True)
    tokens = build_image_text(with_text(text)).tokenize(["ab", "c" * 99])
    assert ids(tokens)[0][-1] == EOS and len(ids(tokens)[0]) == 4 and tokens.shape == (2, 16) and tokens[1, -1] == EOS


def test_a_text_of_one_token_has_room(tmp_path: Path) -> None:
    model = build(tiny_llama.write(tmp_path))
    assert model.tokenize(["abc"], 3).tolist() == [[VOCAB["<s>"], VOCAB["a"], EOS]]
    with raises(ConfigError, "data.question.length"):
        model.tokenize(["abc"], 2)


def test_tokenizers_that_cannot_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama.write(tmp_path / "a")
    edit(folder, eos_token=None)
    build(folder, end_token=False)
    with raises(ConfigError, f"model.text.name={folder}", "model.text.end_token", "eos_token"):
        build(folder)
    folder = tiny_llama.write(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    (tmp_path / "b" / "vocab.json").write_text(json.dumps(VOCAB))
    edit(folder, tokenizer_class="Wav2Vec2CTCTokenizer", pad_token=END, word_delimiter_token="▁")
    build(folder, end_token=False)
    with raises(ConfigError, f"model.text.name={folder}", "model.text.end_token", "Wav2Vec2CTCTokenizer"):
        build(folder)
    with raises(ConfigError, f"model.text.name={folder}", "model.text.lower_case=true", "Wav2Vec2CTCTokenizer"):
        build(folder, end_token=False, lower_case=True)


def test_a_language_model_and_open_clip_do_not_read_the_key() -> None:
    for words, condition in (
        (["experiment=lm_nll"], "language_model"),
        (["experiment=emoji", "model=tiny_clip"], "model.text.kind=transformers"),
    ):
        typed = ["model.text.end_token=true"]
        with raises(ConfigError, "model.text.end_token=true", condition):
            refuse_unread(typed, [compose_config([*words, *typed])])


def test_the_recipe_of_decoders_sets_the_key() -> None:
    assert compose_config(["experiment=llm_embedder", "data.train=x"]).model.text.end_token
    assert not compose_config(["experiment=mnrl", "data.train=x"]).model.text.end_token

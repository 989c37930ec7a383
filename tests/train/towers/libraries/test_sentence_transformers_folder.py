"""A SentenceTransformer's folder as text tower: what it says beside its weights is our default, and it comes back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from helpers import tiny_bert, tiny_llama
from helpers.export import near
from helpers.messages import raises
from omegaconf import OmegaConf
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as parts
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, T5Config, T5EncoderModel

from dyad.data.base.errors import ConfigError
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.load_run import read_config
from dyad.export import sentence_transformers as export_sentence_transformers
from dyad.export.library import ExportSource
from dyad.export.main import export
from dyad.train.cli.compose import compose_config
from dyad.train.config import Pooling, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.run_folder.folder import open_run
from dyad.train.towers.build import build_text_pair
from dyad.train.towers.libraries.sentence_transformers import BEHIND_PADDING, describe_choices, sentence_folder
from dyad.train.towers.text.text_tower import TextTokenizer, _dense, positions_of

QUESTIONS, PASSAGES = ["who", "what is a Cat"], ["a cat is an animal", "b " * 50, "X"]
OWN, POOLING = "sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"
PROMPTS = {"query": "find:\n", "document": "p: ", "other": "o "}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return str(folder)


def folder_of(bert: str, out: Path, *more: nn.Module, pooling: str = "cls", **model: Any) -> Path:
    """Made by the installed library, of at most 11 tokens."""
    modules = [parts.Transformer(bert, max_seq_length=11), parts.Pooling(32, pooling), *more]  # type: ignore[arg-type]
    made = SentenceTransformer(modules=modules, device="cpu", **{"prompts": PROMPTS, **model})
    made.save_pretrained(str(out), create_model_card=False)
    return out


def edit(path: Path, **more: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **more}))


def configured(folder: Path, *words: str) -> TrainConfig:
    names = ["model=encoder", "data=question_passage", f"model.text.name={folder}", "data.train=x"]
    return compose_config(["task=question_passage", *names, *(words or ["objective=dpr"])])


class Listed:
    """Texts as the evaluation's encoder takes them."""

    def __init__(self, texts: list[str], config: Any, tokenize: Callable[..., torch.Tensor]) -> None:
        self.texts, self.config, self.tokenize = texts, config, tokenize

    def __len__(self) -> int:
        return len(self.texts)

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.tokenize([self.config.prefix + text for text in self.texts[start:stop]], self.config.length)


def embedded(config: TrainConfig) -> tuple[ExportSource, np.ndarray, np.ndarray]:
    """Questions and passages before any training, by the encoder of `python -m eval`."""
    config.data.workers = 0
    source = ExportSource("tiny", config, build_text_pair(config.model))
    return source, *sides(source)


def sides(source: ExportSource) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of the questions and the passages."""
    config, model = source.config, source.model
    encode = Encoder.of(config, model, World())
    x = encode("x", Listed(QUESTIONS, config.data.question, model.tokenize))
    return x, encode("y", Listed(PASSAGES, config.data.passage, model.tokenize))


def train_once(source: ExportSource) -> None:
    """One step of plain gradient descent on the distance of a question and a passage."""
    towers, tokens = source.model.towers.train(), source.model.tokenize(["who", "a cat"], 11)
    loss = towers.x_tower(tokens).diff(dim=0).square().sum()
    loss.backward()
    with torch.no_grad():
        for parameter in towers.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / parameter.grad.norm().clamp(min=1e-6)


def near_to(folder: Path, x: np.ndarray, y: np.ndarray) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(x, theirs.encode_query(QUESTIONS), atol=1e-6)
    np.testing.assert_allclose(y, theirs.encode_document(PASSAGES), atol=1e-6)


KINDS: dict[str, tuple[list[nn.Module], dict[str, Any]]] = {
    "cls, normalised": ([parts.Normalize()], {}),
    "mean, dot": ([], {"pooling": "mean", "similarity_fn_name": "dot"}),
    "last token, linear layer": (
        [parts.Dense(32, 8, bias=False, activation_function=nn.Identity()), parts.Normalize()],
        {"pooling": "lasttoken", "default_prompt_name": "other"},
    ),
    "several layers, as LaBSE and EmbeddingGemma have": (
        [parts.Dense(32, 64, bias=False, activation_function=nn.Identity()), parts.Dense(64, 8), parts.Normalize()],
        {"pooling": "mean"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_embedded_as_its_library_does_and_exported_with_its_prompts(
    bert: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, options = KINDS[kind]
    source, x, y = embedded(configured(folder_of(bert, tmp_path / "st", *more, **options)))
    near_to(tmp_path / "st", x, y)
    train_once(source)
    trained = sides(source)
    assert np.abs(trained[0] - x).max() > 1e-3
    near(monkeypatch)
    export(export_sentence_transformers.LIBRARY, source, tmp_path / "out")
    near_to(tmp_path / "out", *trained)
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").prompts == PROMPTS


def test_what_older_versions_wrote_is_read_too(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Normalize())
    flags = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(flags))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7, "do_lower_case": True}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = configured(folder)
    assert (config.data.question.length, config.model.text.pooling) == (7, Pooling.last)
    near_to(folder, *embedded(config)[1:])


def test_what_is_typed_stays_and_is_said(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Normalize())
    config = configured(folder, "objective=dpr", "objective.similarity=dot", "data.passage.length=20")
    assert (config.objective.similarity.value, config.data.passage.length) == ("dot", 20)
    (line,) = describe_choices(config)
    assert line.endswith("Chosen otherwise: data.passage.length=20 (11 there), objective.similarity=dot (cosine there)")
    assert 'As its folder says: data.passage.prefix="p: ", data.question.length=11' in line
    assert "model.text.pooling=cls." in line
    assert embedded(config)[2].shape == (3, 32)


def test_a_plain_encoder_has_the_defaults_of_the_keys(bert: str) -> None:
    config = configured(Path(bert), "objective=dpr")
    assert (config.data.question.length, config.data.passage.length) == (32, 128)
    assert (config.model.text.pooling, config.objective.similarity.value) == (Pooling.mean, "dot")
    assert list(describe_choices(config)) == []


def test_a_causal_model_that_is_not_pooled_at_its_last_token_is_said(tmp_path: Path) -> None:
    folder = Path(tiny_llama.write(tmp_path / "llama"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"architectures": ["LlamaForCausalLM"]}))
    (line,) = describe_choices(configured(folder, "objective=dpr"))
    assert line.startswith("model.text.pooling=mean: ") and "LlamaForCausalLM" in line and "model=decoder" in line
    assert list(describe_choices(configured(folder, "objective=dpr", "model.text.pooling=last"))) == []


def test_a_projection_that_nobody_typed_is_said(bert: str) -> None:
    """model.embed_dim has a default, for towers beside images, which presets of text models set to null."""
    named = ["model.text.kind=transformers", f"model.text.name={bert}"]
    words = ["task=question_passage", "data=question_passage", "objective=dpr", "data.train=x", *named]
    (line,) = describe_choices(compose_config(words))
    assert line.startswith(f"model.embed_dim=256: model.text.name={bert} gets") and "random weights" in line
    for more in ("model.embed_dim=null", "model.text.from_scratch=true", "init_from=runs/a"):
        assert list(describe_choices(compose_config([*words, more]))) == []


def test_a_tokenizer_that_ends_texts_with_its_padding_keeps_the_end(bert: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding's does: its padding is what it puts behind every text."""
    folder = folder_of(bert, tmp_path / "st", pooling="lasttoken", similarity_fn_name="dot")
    edit(folder / "tokenizer_config.json", pad_token="[SEP]")
    near_to(folder, *embedded(configured(folder))[1:])


def test_the_encoder_half_of_t5(bert: str, tmp_path: Path) -> None:
    """Saved alone, its settings say that it is no encoder-decoder."""
    settings = T5Config(vocab_size=57, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    T5EncoderModel(settings).save_pretrained(tmp_path / "t5")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "t5")
    folder = folder_of(str(tmp_path / "t5"), tmp_path / "st", parts.Normalize(), pooling="mean")
    near_to(folder, *embedded(configured(folder))[1:])


NO_PLACE = {
    "1_Pooling/config.json": ({"pooling_mode": ["cls", "max"]}, "max", "model.text.pooling=cls"),
    "config_sentence_transformers.json": (
        {"similarity_fn_name": "euclidean"},
        "euclidean",
        "objective.similarity=dot",
    ),
}


@pytest.mark.parametrize("file", NO_PLACE)
def test_what_we_do_not_have_must_be_chosen(bert: str, file: str, tmp_path: Path) -> None:
    content, named, choice = NO_PLACE[file]
    folder = folder_of(bert, tmp_path / "st")
    (folder / file).write_text(json.dumps(content))
    with raises(ConfigError, named):
        configured(folder)
    configured(folder, "objective=dpr", choice)


POSITIONS = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
POSITIONS |= {"intermediate_size": 8, "max_position_embeddings": 20, "attention_window": 4, "entity_vocab_size": 4}


@pytest.mark.parametrize("kind", ["bert", *BEHIND_PADDING])
def test_the_default_length_is_one_that_the_encoder_takes(kind: str, tmp_path: Path) -> None:
    settings = AutoConfig.for_model(kind, **POSITIONS)
    settings.save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([*of_types(OWN), *of_types(POOLING, path="1_Pooling")]))
    assert positions_of(AutoModel.from_config(settings)) == (20 if kind == "bert" else 18)
    for said in ({}, {"max_seq_length": 20}):
        edit(tmp_path / "sentence_bert_config.json", **said)
        folder = sentence_folder(str(tmp_path))
        assert folder and folder.defaults["data.passage.length"] == (20 if kind == "bert" else 18)
    if kind in ("bert", "roberta"):
        assert configured(tmp_path).data.passage.length == (20 if kind == "bert" else 18)


def test_a_folder_that_is_not_understood_is_an_encoder_once_its_keys_are_typed(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Normalize())
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, *of_types("sentence_transformers.models.Dropout")]))
    words = ["objective=dpr", "objective.similarity=dot", "model.text.pooling=cls", "data.passage.prefix=''"]
    with raises(ConfigError, "Dropout", "data.passage.length", "data.question.length"):
        configured(folder, *words)
    lengths = ("data.question.length=9", "data.passage.length=9", "data.question.prefix=''")
    source, x, _ = embedded(configured(folder, *words, *lengths))
    assert x.shape == (2, 32) and "only its encoder is taken" in next(iter(describe_choices(source.config)))
    near(monkeypatch)
    export(export_sentence_transformers.LIBRARY, source, tmp_path / "out")


def test_lines_on_a_folder_have_the_key_that_names_it(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st")
    config = configured(folder)
    config.model.text.name, config.model.name = None, str(folder)
    (folder / "modules.json").write_text("7")
    (line,) = describe_choices(config)
    assert line.startswith(f"model.name={folder}: only its encoder is taken.")
    config.model.name = "org/not-in-the-cache"
    (line,) = describe_choices(config)
    assert line.startswith("model.name=org/not-in-the-cache is taken as a plain encoder")


def test_a_dense_module_that_the_cache_of_the_hub_lacks_is_downloaded(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine than that of the training."""
    layer = parts.Dense(32, 8, bias=False, activation_function=nn.Identity())
    folder = folder_of(bert, tmp_path / "st", layer)
    of_hub = {str(file.relative_to(folder)): str(file) for file in folder.rglob("*")}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda model, file, revision: of_hub[file])
    found = _dense("org/with-dense", 32, pretrained=True)
    assert torch.equal(found.get_parameter("weight"), layer.linear.weight)


def test_a_run_from_before_folders_were_read_keeps_its_tokens_and_weights(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Dense(32, 8, activation_function=nn.ReLU()))
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    config = configured(folder, "objective=dpr", "model.embed_dim=null")
    assert (config.model.text.lower_case, config.model.text.dense) == (True, True)
    with raises(ConfigError, "model.text.dense=false"):
        build_text_pair(config.model)
    run = open_run(configured(folder, "objective=dpr", "model.embed_dim=null", f"run.dir={tmp_path}", "run.name=a"))
    saved = OmegaConf.load(run / "config.yaml")
    del saved.model.text.lower_case, saved.model.text.dense
    OmegaConf.save(saved, run / "config.yaml")
    model = build_text_pair(read_config(run).model, load_pretrained=False)  # the run keeps no weights
    assert isinstance(model.towers.y_tower.projection, nn.Identity)
    assert isinstance(model.tokenize, TextTokenizer)
    assert "Lowercase" not in str(model.tokenize.tokenizer.backend_tokenizer.normalizer)


def of_types(*types: str, path: str = "") -> list[dict[str, str]]:
    return [{"path": path, "type": kind} for kind in types]


STRANGE: dict[str, tuple[str, Any, str]] = {
    "a class of its own": ("modules.json", of_types("evil.Transformer", "evil.Pooling"), "evil.Transformer"),
    "a way out": ("modules.json", [*of_types(OWN), *of_types(POOLING, path="../1_Pooling")], "modules.json"),
    "no list": ("modules.json", 7, "modules.json"),
    "no settings": ("1_Pooling/config.json", [1], "1_Pooling/config.json"),
    "a length": ("sentence_bert_config.json", {"max_seq_length": 1 << 70}, str(1 << 70)),
    "a cut": ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim"),
    "prompts": ("config_sentence_transformers.json", {"prompts": [1]}, "prompts"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_nonsense_in_a_folder_is_one_line(bert: str, case: str, tmp_path: Path) -> None:
    file, content, named = STRANGE[case]
    folder = folder_of(bert, tmp_path / "st")
    for written in (json.dumps(content), "[" * 100_000, "{"):
        (folder / file).write_text(written)
        with raises(ConfigError, named if written == json.dumps(content) else file) as caught:
            sentence_folder(str(folder))
        assert "\n" not in str(caught.value)


def test_a_link_out_of_the_folder_is_not_followed(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st")
    (folder / "modules.json").rename(tmp_path / "modules.json")
    (folder / "modules.json").symlink_to(tmp_path / "modules.json")
    with raises(ConfigError, "modules.json"):
        sentence_folder(str(folder))


def test_the_copy_that_a_run_keeps_gives_the_tower_without_weights(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Dense(32, 8, bias=False, activation_function=nn.Tanh()))
    run = open_run(configured(folder, "objective=dpr", "model.embed_dim=null", f"run.dir={tmp_path}", "run.name=a"))
    shutil.rmtree(folder)
    tower: Any = build_text_pair(read_config(run).model, load_pretrained=False).towers.x_tower
    assert {name: p.shape for name, p in tower.projection.named_parameters()} == {"0.weight": (8, 32)}
    with raises(ConfigError, "model.text.name=", "model.safetensors", "model.text.dense=false"):
        _dense(str(next((run / "model").glob("*/st"))), 32, pretrained=True)


def test_a_run_keeps_what_the_folder_said(bert: str, tmp_path: Path) -> None:
    folder = folder_of(bert, tmp_path / "st", parts.Normalize())
    run = open_run(configured(folder, "objective=dpr", f"run.dir={tmp_path}", "run.name=a"))
    edit(folder / "1_Pooling/config.json", pooling_mode="mean")
    kept = read_config(run)
    assert (kept.model.text.pooling, kept.data.passage.prefix) == (Pooling.cls, "p: ")
    assert kept.objective.similarity.value == "cosine"

"""Exported encoders of questions and passages: what the libraries load, merged adapters too, and what is refused."""

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_bert, tiny_llama
from helpers.export import near
from helpers.messages import raises
from helpers.towers import transformers_folder
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, DPRContextEncoder, DPRQuestionEncoder

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig, Title
from dyad.export import (
    dpr as export_dpr,
    onnx as export_onnx,
    sentence_transformers as export_sentence_transformers,
)
from dyad.export.library import ExportSource, Library
from dyad.export.main import export
from dyad.train.config import ModelConfig, Pooling, Task, TextTower, TextTowerConfig, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.build import build_text_pair

QUESTIONS, PASSAGES = ["who", "what is a cat"], ["a cat is an animal", "b " * 50]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def in_a_process_of_their_own(bert: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One export of each format is loaded as the command does it; all others here."""
    for library in (export_dpr.LIBRARY, export_sentence_transformers.LIBRARY):
        assert export(library, source(bert, title=Title.pair), tmp_path_factory.mktemp("own") / "out") < 1e-5


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)


def source(
    name: str,
    *,
    similarity: str = "dot",
    title: Title = Title.join,
    pooling: Pooling = Pooling.cls,
    lora_rank: int = 0,
    end_token: bool = False,
    **model: Any,
) -> ExportSource:
    """A model whose two sides and adapters differ from their start."""
    options: dict[str, Any] = {"pooling": pooling, "lora_rank": lora_rank, "end_token": end_token}
    text = TextTowerConfig(kind=TextTower.transformers, name=name, **options)
    config = TrainConfig(
        task=Task.question_passage,
        model=ModelConfig(**{"name": None, "embed_dim": None, "text": text, **model}),
        data=DataConfig(
            train="x.jsonl",
            question=QuestionConfig(prefix="q: ", length=12),
            passage=PassageConfig(prefix="p: ", length=30, title=title),
        ),
        objective=OBJECTIVES["dpr"](similarity=Similarity(similarity)),
    )
    torch.manual_seed(0)
    built = build_text_pair(config.model)
    for parameter in built.towers.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return ExportSource("tiny", config, built)


def ours(of: ExportSource, side: str) -> Tensor:
    data, towers = of.config.data, of.model.towers.eval()
    with torch.no_grad():
        if side == "x":
            texts = [data.question.prefix + text for text in QUESTIONS]
            return towers.x_tower(of.model.tokenize(texts, data.question.length))
        return towers.y_tower(of.model.tokenize([data.passage.prefix + text for text in PASSAGES], data.passage.length))


def unit(rows: Tensor) -> Tensor:
    return normalize(rows, dim=1)


COSINE, WIDTH_8 = ("cosine", None), ("dot", 8)
SOME = {(Pooling.cls, COSINE), (Pooling.mean, WIDTH_8), (Pooling.last, COSINE)}  # the modules follow each other


@pytest.mark.parametrize(
    ("pooling", "similarity", "width"),
    [
        pytest.param(pooling, *scores, marks=[pytest.mark.soak] * ((pooling, scores) not in SOME))
        for pooling, scores in product(Pooling, (COSINE, WIDTH_8))
    ],
)
def test_sentence_transformers_gives_equal_embeddings(
    bert: str, pooling: Pooling, similarity: str, width: int | None, tmp_path: Path
) -> None:
    of = source(bert, similarity=similarity, pooling=pooling, embed_dim=width)
    out = tmp_path / "out"
    assert export(export_sentence_transformers.LIBRARY, of, out) < 1e-5
    model = SentenceTransformer(str(out), device="cpu")
    for theirs, side in ((model.encode_query(QUESTIONS), "x"), (model.encode_document(PASSAGES), "y")):
        want = ours(of, side)
        torch.testing.assert_close(
            torch.from_numpy(theirs), unit(want) if similarity == "cosine" else want, rtol=1e-4, atol=1e-5
        )
    assert model.similarity_fn_name == similarity and model.prompts == {"query": "q: ", "document": "p: "}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    names = ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "model.safetensors"]
    names += ["config_sentence_transformers.json", "tokenizer.json"]
    assert all((out / name).is_file() for name in names)
    card = (out / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "encode_query" in card and "'q: '" in card


def test_sentence_transformers_takes_title_and_text_as_a_pair(bert: str, tmp_path: Path) -> None:
    of = source(bert, title=Title.pair)
    assert export(export_sentence_transformers.LIBRARY, of, tmp_path / "out") < 1e-5
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode_document(
        [("a cat", text) for text in PASSAGES]
    )
    tokens = of.model.tokenize(["p: a cat"] * 2, 30, PASSAGES)
    with torch.no_grad():
        want = of.model.towers.eval().y_tower(tokens)
    torch.testing.assert_close(torch.from_numpy(theirs), want, rtol=1e-4, atol=1e-5)
    assert 'encode_document([("its title", "a passage")])' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("shared", "title"),
    [
        (True, Title.pair),
        (False, Title.join),
        pytest.param(True, Title.join, marks=pytest.mark.soak),
        pytest.param(False, Title.pair, marks=pytest.mark.soak),
    ],
)
def test_dpr_folders_load_by_both_classes(bert: str, shared: bool, title: Title, tmp_path: Path) -> None:
    of = source(bert, shared=shared, title=title)
    if not shared:
        nn.init.normal_(next(of.model.towers.y_tower.parameters()))
    out = tmp_path / "out"
    assert export(export_dpr.LIBRARY, of, out) < 1e-5
    sides = (("question_encoder", DPRQuestionEncoder, "x", QUESTIONS, "q: "),)
    sides += (("ctx_encoder", DPRContextEncoder, "y", PASSAGES, "p: "),)
    found = []
    for folder, own, side, texts, prefix in sides:
        tokenizer = AutoTokenizer.from_pretrained(out / folder)
        prefixed = [prefix + text for text in texts]
        inputs = tokenizer(prefixed, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            plain = AutoModel.from_pretrained(out / folder).eval()(**inputs).last_hidden_state[:, 0]
            theirs = own.from_pretrained(out / folder).eval()(**inputs).pooler_output
        for embeddings in (plain, theirs):
            torch.testing.assert_close(embeddings, ours(of, side), rtol=1e-4, atol=1e-5)
        found.append(theirs)
    weights = [(out / folder / "model.safetensors").read_bytes() for folder, *_ in sides]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert weights[0] != weights[1]  # other names at least
    card = (out / "README.md").read_text()
    assert "DPRQuestionEncoder" in card and "AutoModel" in card


@pytest.mark.parametrize(
    ("kind", "others"), [("llama", (export_dpr.LIBRARY, export_onnx.LIBRARY)), ("neox", ())], ids=["llama", "neox"]
)
def test_an_end_token_is_in_what_is_exported(kind: str, others: tuple[Library, ...], tmp_path: Path) -> None:
    """GPTNeoXTokenizer would replace the post-processor of a saved folder."""
    folder = tiny_llama.write(tmp_path / "decoder", kind)
    of, without = (source(folder, pooling=Pooling.last, end_token=ends, lora_rank=2) for ends in (True, False))
    for library in (export_sentence_transformers.LIBRARY, *others):
        assert export(library, of, tmp_path / library.name) < 1e-5
    model = SentenceTransformer(str(tmp_path / "sentence_transformers"), device="cpu")
    loaded = dyad.load(f"st:{tmp_path}/sentence_transformers", "cpu")
    for theirs, again, side in (
        (model.encode_query(QUESTIONS), loaded.encode_question(QUESTIONS), "x"),
        (model.encode_document(PASSAGES), loaded.encode_passage(PASSAGES), "y"),
    ):
        want = ours(of, side)
        assert not torch.allclose(want, ours(without, side), atol=1e-2)
        for found in (theirs, again):
            torch.testing.assert_close(torch.as_tensor(found), want, rtol=1e-4, atol=1e-5)


def test_adapters_are_merged(bert: str, tmp_path: Path) -> None:
    of = source(bert, lora_rank=4)
    plain = unit(ours(source(bert), "x"))
    assert not torch.allclose(unit(ours(of, "x")), plain, atol=1e-2)
    for library in (export_dpr.LIBRARY, export_sentence_transformers.LIBRARY):
        out = tmp_path / library.name
        assert export(library, of, out) < 1e-5
        files = [path.read_bytes() for path in out.rglob("*.safetensors")]
        assert files and not any(b"lora" in content[:10_000] for content in files)
    assert any("lora" in name for name, _ in of.model.towers.named_parameters())  # the model itself stays as it is


@pytest.mark.parametrize("pooling", Pooling)
def test_the_lines_of_the_card_work(bert: str, pooling: Pooling, tmp_path: Path) -> None:
    of = source(bert, pooling=pooling, shared=False)
    export(export_dpr.LIBRARY, of, tmp_path / "out")
    shown = export_dpr.LIBRARY.snippet(tmp_path / "out", of)
    assert "at most 12 tokens" in shown and ("DPRQuestionEncoder" in shown) == (pooling is Pooling.cls)
    code = tmp_path / "lines.py"
    code.write_text("\n".join(line[4:] for line in shown.splitlines() if line.startswith("    ")))
    with torch.no_grad():
        found = runpy.run_path(str(code))
        for name, tower, text in (("questions", "x_tower", "a question"), ("passages", "y_tower", "a passage")):
            want = of.model.towers.get_submodule(tower).eval()(of.model.tokenize([text], 30))
            torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-5)


def test_what_has_no_place_in_a_format_is_refused(bert: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with raises(ConfigError, "model.shared=false", "format=dpr"):
        export(export_sentence_transformers.LIBRARY, source(bert, shared=False), out)
    with raises(ConfigError, "model.embed_dim=8", "format=sentence_transformers"):
        export(export_dpr.LIBRARY, source(bert, embed_dim=8), out)
    projected = source(bert, embed_dim=8, shared=False)
    projected.config.model.text.dense = True  # as if the projection were the Dense module of a folder
    for library in (export_dpr.LIBRARY, export_sentence_transformers.LIBRARY):
        with raises(ConfigError, "format=onnx"):
            export(library, projected, out)
    with raises(ConfigError, "model.text.dense=true", "format=onnx", "model.text.dense=false"):
        export(export_dpr.LIBRARY, projected, out)
    half = source(transformers_folder(tmp_path, "t5"), pooling=Pooling.mean)
    for library in (export_dpr.LIBRARY, export_sentence_transformers.LIBRARY):
        with raises(ConfigError, "T5Stack"):
            export(library, half, out)
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_files_of_others_stay(bert: str, tmp_path: Path) -> None:
    of, out = source(bert), tmp_path / "out"
    for _ in range(2):
        export(export_dpr.LIBRARY, of, out)
    (out / "ctx_encoder" / "notes.txt").write_text("mine")
    with raises(ConfigError, "notes.txt"):
        export(export_dpr.LIBRARY, of, out)
    assert (out / "ctx_encoder" / "notes.txt").read_text() == "mine"


def test_a_difference_stops_the_export(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pooling than the run's is noticed, and nothing is left."""
    of = source(bert, pooling=Pooling.mean)
    monkeypatch.setitem(export_sentence_transformers.POOLINGS, Pooling.mean, "cls")
    with raises(AssertionError):
        export(export_sentence_transformers.LIBRARY, of, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

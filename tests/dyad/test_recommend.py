"""Recommendations of a model of sequences, and its export: torch alone loads it, and so does `dyad.load`."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from textwrap import dedent
from typing import cast

import numpy as np
import pytest
import torch
from helpers.eval import ROOT
from helpers.export import near
from helpers.messages import raises
from helpers.slow_imports import recommends_without_slow_imports
from safetensors.numpy import load_file, save_file

import dyad
from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, ItemKind, SequenceConfig
from dyad.data.sequence.frames import Frames
from dyad.data.sequence.histories import Histories
from dyad.data.sequence.items import ItemFrames
from dyad.eval.encode.encoder import Encoder
from dyad.eval.encode.histories import encode_histories
from dyad.eval.tasks.sequence.next_item import NextItem
from dyad.evaluation.load_run import LoadedModel
from dyad.evaluation.suite import build_evaluators
from dyad.export.library import ExportSource
from dyad.export.main import ExportFormat, export, library_of
from dyad.recommend import build_recommender
from dyad.train.config import ModelConfig, RunConfig, Task, TrainConfig
from dyad.train.context_config import ContextConfig, ContextKind
from dyad.train.distributed.world import World
from dyad.train.eval_config import EvalConfig, Seen
from dyad.train.losses.options.choices import Similarity
from dyad.train.losses.options.registry import configure
from dyad.train.towers.build import build_model
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.sequence import SequenceTower

NAMES = [f"item {n}" for n in range(11)] + ["a\u2028b\rc"]  # breaks of lines that are none in items.txt


def source(
    kind: ContextKind, similarity: Similarity, folder: Path, width: int | None = 8, cpc: bool = False
) -> ExportSource:
    """A model with random weights, trained on a log of NAMES in this order. cpc: with a matrix of CPC for the next."""
    rows = [{"user": f"u{n % 3}", "item": name, "time": n} for n, name in enumerate(NAMES)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    torch.manual_seed(0)
    sequence = SequenceConfig(length=3)
    config = TrainConfig(
        task=Task.sequence,
        data=DataConfig(train=str(folder / "log.jsonl"), items=ItemKind.ids, sequence=sequence, workers=0),
        model=ModelConfig(embed_dim=6, context=ContextConfig(kind=kind, layers=2, heads=2, width=width)),
        run=RunConfig(inputs=len(NAMES)),
        objective=replace(configure("clip"), similarity=similarity),
    )
    model = build_model(config)
    if cpc:
        cast(SequenceTower, model.towers.x_tower).set_prediction_matrices(torch.randn(1, 6, 6))
    return ExportSource("run", config, model, None, 1)


@pytest.mark.parametrize("similarity", [*Similarity])
@pytest.mark.parametrize("kind", [*ContextKind])
def test_an_export_recommends_what_the_scores_say(
    kind: ContextKind, similarity: Similarity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near(monkeypatch)
    given = source(kind, similarity, tmp_path)
    assert export(library_of(ExportFormat.torch), given, tmp_path / "out") < 1e-6
    model, tower = dyad.load(str(tmp_path / "out")), given.model.towers.x_tower.eval()
    histories = [["item 3"], ["item 1", "item 5", "item 2", "item 5"]]
    with torch.no_grad():
        items = tower(torch.arange(12))
        contexts = [
            tower(torch.tensor([NAMES.index(name) for name in history[-3:]]), places=np.arange(len(history[-3:])))[-1]
            for history in histories
        ]
    x, y = torch.stack(contexts), items
    if similarity is Similarity.cosine:
        x, y = (torch.nn.functional.normalize(e, dim=-1) for e in (x, y))
    scores = x @ y.T
    found = model.recommend(histories, k=12)
    for row, hits in zip(scores, found, strict=True):
        assert [hit.item for hit in hits] == [NAMES[i] for i in row.argsort(descending=True).tolist()]
        np.testing.assert_allclose([hit.score for hit in hits], row.sort(descending=True).values, atol=1e-5)
    new = model.recommend(histories, k=3, drop_seen=True)
    assert [[hit.item for hit in hits] for hits in new] == [
        [hit.item for hit in hits if hit.item not in history][:3]
        for hits, history in zip(found, histories, strict=True)
    ]
    assert [hit.item for hit in model.recommend(histories[1], k=2)] == [hit.item for hit in found[1][:2]]


@pytest.mark.parametrize("similarity", [*Similarity])
@pytest.mark.parametrize("kind", [*ContextKind])
@pytest.mark.parametrize(("width", "cpc"), [(8, False), (None, False), (8, True), (None, True)])
def test_an_export_recommends_as_the_run_and_as_its_readme_computes(
    width: int | None, cpc: bool, kind: ContextKind, similarity: Similarity, tmp_path: Path
) -> None:
    given = source(kind, similarity, tmp_path, width, cpc)
    library = library_of(ExportFormat.torch)
    library.write(tmp_path, given)
    found = dyad.load(tmp_path).recommend([NAMES[2], NAMES[0], NAMES[0], NAMES[5]], k=12)
    made = build_recommender(
        given.config, cast(SequenceModel, given.model), Encoder.of(given.config, given.model, World())
    )
    assert [hit.item for hit in found] == [name for _, name in made([[NAMES[n] for n in (2, 0, 0, 5)]], 12, False)[0]]
    recipe = dedent(library.snippet(tmp_path, given).partition("from 0:\n")[2])
    (tmp_path / "recipe.py").write_text(recipe.replace("history = [0, 1]", "history = [2, 0, 0, 5]"))
    scores = runpy.run_path(str(tmp_path / "recipe.py"))["scores"].numpy()
    np.testing.assert_allclose([scores[NAMES.index(hit.item)] for hit in found], [h.score for h in found], atol=1e-5)


def test_an_export_that_dyad_reads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = source(ContextKind.gru, Similarity.dot, tmp_path, cpc=True)
    monkeypatch.setattr(SequenceTower, "next_network", property(lambda self: self.context))
    with raises(AssertionError, "dyad.load"):
        library_of(ExportFormat.torch).write(tmp_path, given)


@pytest.mark.parametrize("similarity", [*Similarity])
def test_a_width_cuts_what_is_compared_and_not_what_the_context_network_reads(
    similarity: Similarity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near(monkeypatch)
    export(library_of(ExportFormat.torch), source(ContextKind.gru, similarity, tmp_path), tmp_path / "out")
    whole, cut = (dyad.load(str(tmp_path / "out"), width=width) for width in (None, 4))
    recommender = whole._recommender
    x = replace(recommender, cosine=False).contexts([[3]])[:, :4]
    y = recommender.items_ND.numpy()[:, :4]
    if similarity is Similarity.cosine:
        x, y = (e / np.linalg.norm(e, axis=1, keepdims=True) for e in (x, y))
    (scores,) = x @ y.T
    found = cut.recommend(["item 3"], k=12)
    assert [hit.item for hit in found] == [NAMES[i] for i in (-scores).argsort()]
    np.testing.assert_allclose([hit.score for hit in found], np.sort(scores)[::-1], atol=1e-5)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a model: another process, which has to import torch, checks each that is made."""
    folder = tmp_path_factory.mktemp("exported")
    export(library_of(ExportFormat.torch), source(ContextKind.gru, Similarity.cosine, folder), folder / "out")
    return folder / "out"


def test_an_export_recommends_without_slow_imports(exported: Path) -> None:
    recommends_without_slow_imports(exported, "item 3")


def test_histories_that_are_none(exported: Path) -> None:
    model = dyad.load(str(exported))
    for history, words in (
        ([], ["empty"]),
        (["item 99"], ["'item 99'", "Did you mean 'item 9'"]),
        ([["item 1"], ["new", "item 99"]], ["history 1", "'new'"]),
        ([["item 1"], []], ["empty"]),
        ([1], ["int"]),
    ):
        with raises(ConfigError, *words):
            model.recommend(history)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("similarity", [*Similarity])
def test_scores_are_products_of_the_vectors_of_histories_and_items(
    similarity: Similarity, width: int | None, tmp_path: Path
) -> None:
    library_of(ExportFormat.torch).write(tmp_path, source(ContextKind.gru, similarity, tmp_path, cpc=True))
    model = dyad.load(tmp_path, width=width)
    histories = [["item 3"], ["new", "item 1", "item 5", "item 2", "item 5"]]
    x, y = model.encode_history(histories), model.encode_item()
    assert [*model.items] == NAMES and x.shape == (2, width or 6) and y.dtype == np.float32
    for row, hits in zip(x @ y.T, model.recommend(histories, k=12), strict=True):
        np.testing.assert_allclose([row[NAMES.index(hit.item)] for hit in hits], [hit.score for hit in hits], atol=1e-6)
    assert np.array_equal(model.encode_item(NAMES[3:1:-1]), y[3:1:-1])
    assert (
        np.array_equal(model.encode_item(NAMES[3]), y[3:4]) and model.encode_history(histories[0]).shape == x[:1].shape
    )
    with raises(ConfigError, "'item 99'", "Did you mean 'item 9'"):
        model.encode_item("item 99")
    with raises(ConfigError, "frames", "encode_history"):
        model.encode_sequence(np.zeros((3, 2)))


def test_the_example_of_the_documents_runs(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, example = re.findall(r"```python\n(import dyad\n.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/next_item").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(example.replace("Gen.1.", "item "))
    runpy.run_path(str(tmp_path / "example.py"))
    (best,) = dyad.load(exported).recommend(["item 1", "item 2"], k=1)
    assert capsys.readouterr().out == f"{best.item}\n"


@pytest.mark.parametrize("similarity", [*Similarity])
def test_contexts_of_frames_are_those_of_the_evaluation(similarity: Similarity, tmp_path: Path) -> None:
    sequences = [np.random.default_rng(n).normal(size=(steps, 3)) for n, steps in enumerate((7, 1, 4))]
    for n, frames in enumerate(sequences):
        np.save(tmp_path / f"{n}.npy", frames)
    given = source(ContextKind.gru, similarity, tmp_path, cpc=True)
    data, run = replace(given.config.data, items=ItemKind.frames), RunConfig(inputs=3)
    config = replace(given.config, data=data, run=run)
    built = build_model(config)
    cast(SequenceTower, built.towers.x_tower).set_prediction_matrices(torch.randn(1, 6, 6))
    model = dyad.Model(LoadedModel("here", config, built, None), Encoder.of(config, built, World()))
    paths = [tmp_path / f"{n}.npy" for n in range(3)]
    read = Frames([str(path) for path in paths])
    histories = Histories(read.as_log(), read.starts[1:], ItemFrames(read), data.sequence.length)
    want, _ = encode_histories(replace(model.encoder, features=True, cosine=False), histories)  # as Probe.scored
    np.testing.assert_allclose(model.encode_sequence(sequences), want, atol=1e-6)
    np.testing.assert_allclose(model.encode_sequence([paths[0], str(paths[1])]), want[:2], atol=1e-6)
    np.testing.assert_allclose(model.encode_sequence(sequences[2]), want[2:], atol=1e-6)
    unused = np.concatenate([np.full((1, 3), np.nan), sequences[0][-3:]])  # a sample has 3 frames
    np.testing.assert_allclose(model.encode_sequence(unused), want[:1], atol=1e-6)
    for bad, error, words in (
        (np.zeros(3), ConfigError, ["item 0"]),
        ([sequences[0], [1.0]], ConfigError, ["item 1"]),
        ([], ConfigError, ["empty"]),
        (np.zeros((2, 4)), DataError, ["item 0", 3, "finite"]),
        (np.full((2, 3), np.nan), DataError, ["item 0", 3, "finite"]),
        (np.full((2, 3), 1e300), DataError, ["item 0", 3, "finite"]),
        (tmp_path / "none.npy", DataError, ["none.npy"]),
    ):
        with raises(error, *words):
            model.encode_sequence(bad)
    with raises(ConfigError, "encode_sequence"):
        model.encode_item()


def test_items_that_came_after_the_training_are_left_out(exported: Path) -> None:
    """As in the evaluation: before the history is cut to its length."""
    model = dyad.load(str(exported))
    with_new = [["item 1", "new", "item 5", "item 2", "newer", "newest"], ["new", "item 3"]]
    assert model.recommend(with_new, drop_seen=True) == model.recommend(
        [["item 1", "item 5", "item 2"], ["item 3"]], drop_seen=True
    )


def test_a_model_of_sequences_says_what_it_takes(exported: Path) -> None:
    model = dyad.load(str(exported))
    for call in (model.index, model.encode_text, model.encode_image, model.encode_question, model.encode_passage):
        with raises(ConfigError, "recommend", "sequences"):
            call(["item 1"])


@pytest.mark.parametrize("damage", ["fewer ids", "another width", "no weights", "kind", "shape", "layers", "heads"])
def test_folders_of_strangers(damage: str, exported: Path, tmp_path: Path) -> None:
    out = copytree(exported, tmp_path / "out")
    about = json.loads((out / "sequence.json").read_text())
    if damage == "fewer ids":
        (out / "items.txt").write_text("one\n")
    elif damage == "no weights":
        (out / "model.safetensors").write_bytes(b"nothing")
    elif damage == "shape":
        weights = load_file(out / "model.safetensors")
        save_file({**weights, "trunk.weight": weights["trunk.weight"][0]}, out / "model.safetensors")
    else:
        several = {"kind": {"kind": "rnn"}, "layers": {"layers": 2000}, "heads": {"kind": "transformer", "heads": 3}}
        (out / "sequence.json").write_text(json.dumps(about | several.get(damage, {"width": 1 << 16})))
    with raises(ConfigError, str(out), "no export of a model of sequences"):
        dyad.load(str(out))


def test_an_evaluation_warns_of_events_that_are_in_no_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = source(ContextKind.gru, Similarity.cosine, tmp_path)
    export(library_of(ExportFormat.torch), given, tmp_path / "out")
    rows = [f'{{"user": "u", "item": "item {n}", "time": {n}}}\n' for n in range(4)]
    for part, of_part in {"val": rows[:2], "test": rows[2:]}.items():
        (tmp_path / f"{part}.jsonl").write_text("".join(of_part))
    model, suite, val = (
        dyad.load(str(tmp_path / "out")),
        f"next_item:{tmp_path}/test.jsonl",
        str(tmp_path / "val.jsonl"),
    )
    capsys.readouterr()
    assert dyad.evaluate(model, suite)["test"]["num_events"] == 1
    assert f"{val} is in no history" in capsys.readouterr().err
    assert dyad.evaluate(model, suite, val=val)["test"]["num_events"] == 2
    assert "history" not in (said := capsys.readouterr().err)
    assert f"{val}: 1 of 2 events have no earlier event with an item that the model knows" in said
    alone = tmp_path / "alone.jsonl"
    alone.write_text(rows[0])
    other = tmp_path / "other.jsonl"
    other.write_text(rows[1].replace('"u"', '"v"'))
    with raises(DataError, "alone.jsonl", "export", "val="):
        dyad.evaluate(model, f"next_item:{alone}")
    with raises(DataError, "other.jsonl") as raised:
        dyad.evaluate(model, f"next_item:{alone}", val=str(other))
    assert "export" not in str(raised.value)


def test_an_evaluation_says_how_many_right_items_repeat_the_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With seen=drop they stay while other items of the history go."""
    config = source(ContextKind.gru, Similarity.cosine, tmp_path).config
    (tmp_path / "test.jsonl").write_text(
        "".join(f'{{"user": "u0", "item": "item {n}", "time": {20 + n}}}\n' for n in (0, 1))  # the log has 0 of u0
    )
    config = replace(config, eval=EvalConfig(suite=[f"next_item:{tmp_path}/test.jsonl"]))
    for seen in Seen:
        (evaluator,) = build_evaluators(replace(config, eval=replace(config.eval, seen=seen)), build_model(config))
        assert ("1 of 2 right items are in the history" in capsys.readouterr().err) == (seen is Seen.drop)
        assert isinstance(evaluator, NextItem) and evaluator.history == [str(tmp_path / "log.jsonl")]

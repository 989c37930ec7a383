"""A classifier in Python: its classes, their vectors, scores and export are those of its evaluation."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import ROOT
from helpers.export import near
from helpers.messages import raises
from helpers.runs import EMOJI
from helpers.tiny_bert import write as write_bert
from PIL import Image

import dyad
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.load_run import read_config
from dyad.evaluation.suite import build_evaluators
from dyad.export.main import main as export
from dyad.run.class_names import resolve_classes
from dyad.train.cli.compose import compose_config
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.folder import open_run
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.towers.build import build_model

SHARD = EMOJI / "twemoji-unseen.tar"
SMALL = ["model=small_cnn", "model.image.image_size=16", "model.image.widths=[8,8]", "model.embed_dim=8"]
KEYS = ["task=labelled", *SMALL, "data.label=group", "objective=cross_entropy_sum", "data.workers=0"]


def make_run(folder: Path, *overrides: str) -> Path:
    """A run of task=labelled with random weights, and its checkpoint at step 7."""
    given = [f"data.train={SHARD}", f"data.val={SHARD}", "run.name=tiny", f"run.dir={folder}"]
    keys = dict(argument.split("=", 1) for argument in [*KEYS, *given, *overrides])
    config = resolve_classes(compose_config([f"{key}={value}" for key, value in keys.items()]), World())
    run = open_run(config)
    torch.manual_seed(0)
    towers, objective = build_model(config).towers, build_objective("clip")
    state = capture({"towers": towers, "objective": objective}, torch.optim.AdamW(towers.parameters()), 7, {})
    write_checkpoint(run, state, keep=3)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("classes"))


def test_scores_of_classes_are_those_of_the_evaluation(run: Path) -> None:
    model = dyad.load(run, "cpu")
    assert model.classes == read_config(run).run.classes and len(model.classes) == 9
    vectors = model.encode_class()
    assert vectors.shape == (9, 8) and vectors.dtype == np.float32
    evaluator: Any = build_evaluators(model.config, model.loaded.model)[0]
    assert np.array_equal(vectors, evaluator._weights(Encoder.of(model.config, model.loaded.model, World())))
    assert np.array_equal(model.encode_class(model.classes[3:1:-1]), vectors[3:1:-1])
    assert np.array_equal(model.encode_class(model.classes[3]), vectors[3:4])


def test_mistakes_about_classes_name_the_way(run: Path, tmp_path: Path) -> None:
    model = dyad.load(run, "cpu")
    with raises(dyad.ConfigError, "encode_class"):
        model.encode_text(["a frog"])
    with raises(dyad.ConfigError, "activitie", "activities"):
        model.encode_class("activitie")
    rare = make_run(tmp_path, "data.rare=activities", "objective=partial_auc", "model.embed_dim=null")
    with raises(dyad.ConfigError, "data.rare"):
        dyad.load(rare, "cpu").encode_class()


def test_the_classes_of_texts(tmp_path: Path) -> None:
    rows = "".join(f'{{"text": "day {i}", "mood": "{"happy" if i % 2 else "sad"}"}}\n' for i in range(40))
    (tmp_path / "moods.jsonl").write_text(rows)
    write_bert(tmp_path / "bert")
    bert = ["model=encoder", "model.text.kind=transformers", f"model.text.name={tmp_path / 'bert'}"]
    data = ["data=image_text", "data.items=texts", f"data.train={tmp_path / 'moods.jsonl'}", "data.label=mood"]
    keys = [*bert, *data, "data.val=null", "model.image.image_size=null", "model.image.widths=[32,64,128,192]"]
    model = dyad.load(make_run(tmp_path, *keys), "cpu")
    assert model.classes == ["happy", "sad"]
    assert model.similarity(model.encode_passage(["day 1"]), model.encode_class()).shape == (1, 2)


def test_an_export_has_the_classes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)
    monkeypatch.setattr("sys.argv", ["export", f"run={run}", f"out={tmp_path / 'out'}"])
    export()
    model, classes = dyad.load(run, "cpu"), np.load(tmp_path / "out/classes.npz")
    assert list(classes["names"]) == model.classes
    assert np.array_equal(classes["embeddings"], model.encode_class())
    assert "classes.npz" in (tmp_path / "out/README.md").read_text()
    with raises(dyad.ConfigError, tmp_path / "out", "onnxruntime"):
        dyad.load(tmp_path / "out")


def test_the_example_of_the_documents_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(import dyad\n.*?)```", (ROOT / "docs/views_and_classes.md").read_text(), re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").symlink_to(run)
    (tmp_path / "my_pictures").mkdir()
    Image.new("RGB", (20, 20), "red").save(tmp_path / "my_pictures/1.webp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text(example)
    runpy.run_path("shown.py")
    assert capsys.readouterr().out.split("\n")[0] in dyad.load(run, "cpu").classes

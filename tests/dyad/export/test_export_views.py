"""Exports of models of two views: the representation before the head, as the library computes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import tiny_bert
from helpers.export import near
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, ItemKind
from dyad.export import (
    onnx as export_onnx,
    open_clip as export_open_clip,
    sentence_transformers as export_sentence_transformers,
)
from dyad.export.library import ExportSource
from dyad.export.main import chosen_format, export
from dyad.train.config import Head, ImageTowerConfig, ModelConfig, Task, TextTower, TextTowerConfig, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.towers.build import build_model
from dyad.train.towers.heads import representation


def source(model: ModelConfig, items: ItemKind) -> ExportSource:
    torch.manual_seed(0)
    data = DataConfig(train="x", items=items)
    config = TrainConfig(task=Task.views, model=model, data=data, objective=OBJECTIVES["simclr"]())
    built = representation(build_model(config))
    return ExportSource("tiny", config, built)


def test_images_become_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)
    image = ImageTowerConfig(kind="cnn", image_size=16, widths=[8, 8])
    of = source(ModelConfig(name=None, embed_dim=4, image=image, head=Head.byol, head_width=8), ItemKind.pictures)
    assert chosen_format(None, of.config, of.model).name == "onnx"
    assert export(export_onnx.LIBRARY, of, tmp_path / "out") < 1e-5
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"image.onnx", "config.json", "dyad.json", "README.md"}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "image" in settings and "text" not in settings
    card = (tmp_path / "out" / "README.md").read_text()
    assert "image.onnx" in card and "tokenizer" not in card
    for library in (export_open_clip.LIBRARY, export_sentence_transformers.LIBRARY):
        with raises(ConfigError, "format=onnx"):
            export(library, of, tmp_path / "other")


@pytest.mark.parametrize("head", [Head.none, Head.simclr])
def test_texts_become_a_sentence_transformer(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)
    tiny_bert.write(tmp_path)
    text = TextTowerConfig(kind=TextTower.transformers, name=str(tmp_path))
    of = source(ModelConfig(name=None, embed_dim=4, text=text, head=head, head_width=8), ItemKind.texts)
    assert chosen_format(None, of.config, of.model).name == "sentence_transformers"
    assert export(export_sentence_transformers.LIBRARY, of, tmp_path / "out") < 1e-5
    assert any("Dense" in p.name for p in (tmp_path / "out").iterdir()) is (head is Head.none)

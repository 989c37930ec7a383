"""Learning from two views: the recipes, what they are evaluated on, exports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkout import write_few_images
from helpers.cli import ROOT, Commands
from helpers.messages import raises
from PIL import Image

import dyad
from dyad.data.base.errors import ConfigError
from dyad.run.checks import check_arguments

EMOJI = ROOT / "data/samples/emoji"
SMALL = ["model.image.image_size=32", "global_batch_size=32", "data.workers=0", "debug=smoke", "steps=2"]
SMALL += ["tracking.report=false"]


@pytest.mark.parametrize("recipe", ["simclr_emoji", "spectral_emoji"])
def test_a_recipe_trains_and_evaluates(recipe: str, commands: Commands, tmp_path: Path) -> None:
    few = write_few_images(tmp_path / "few.tar")
    words = [f"experiment={recipe}", *SMALL, f"data.val={few}", f"run.dir={tmp_path}", "run.name=a"]
    done = commands.run("faults.observed", *words)
    assert done.code == 0, done.out
    result = json.loads((tmp_path / "a/eval/val.json").read_text())
    assert result["task"] == "view_retrieval" and {"view_R@1", "view_R@10"} <= {*result["metrics"]}
    assert list((tmp_path / "a/eval/val.pictures").iterdir())
    again = commands.run("eval", f"checkpoint={tmp_path / 'a'}", "baselines=[untrained]")
    assert again.code == 0 and "view" in again.out and "untrained" in again.out, again.out
    found = json.loads((tmp_path / "a/eval/val.json").read_text())
    assert found["metrics"] == result["metrics"] and "untrained" in found["baselines"]

    model = dyad.load(str(tmp_path / "a"))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    embeddings = model.encode_image([Image.fromarray(p) for p in pixels], normalize=False)
    tower = model.loaded.model.towers.x_tower.eval()
    with torch.no_grad():
        features = tower.features(torch.from_numpy(pixels).permute(0, 3, 1, 2))  # type: ignore[operator]
    np.testing.assert_allclose(embeddings, features.numpy(), rtol=1e-5, atol=1e-6)
    metrics = dyad.evaluate(model, val=str(few))["val"]
    assert metrics == pytest.approx({name: result["metrics"][name] for name in metrics})


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n{"text": "b"}\n')
    base = ["task=views", "objective=simclr", "steps=1", f"run.dir={tmp_path}", f"data.train={EMOJI}/noto-unseen.tar"]
    base.append("data.augment.flip=0.5")
    cases = {
        ("model.text.frozen=true",): "data.items=texts",
        ("data.items=texts", "model=minilm", "data.augment.flip=0"): "data.items=pictures",
        ("model=cnn", "model.head=none", "model.head_width=8"): "model.head",
        ("model=cnn", "eval.suite=[zero_shot:x.json]"): "task=views",
        ("model=cnn", "objective.views=interleaved"): "objective.views",
        ("model=cnn", "data.mode=stream"): "data.mode",
        ("model=cnn", f"data.train={texts}"): "data.items=texts",
    }
    for words, named in cases.items():
        typed = {word.partition("=")[0] for word in words}
        with raises(ConfigError, named) as caught:
            check_arguments([*(w for w in base if w.partition("=")[0] not in typed), *words])
        assert len(str(caught.value).splitlines()) == 1


def test_texts_train_by_dropout_and_are_searched(commands: Commands, models: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"_id": i, "text": f"text number {i}"}) + "\n" for i in range(40)))
    words = [
        "task=views",
        "data.items=texts",
        "model=encoder",
        f"model.text.name={models / 'bert'}",
        "objective=simclr",
    ]
    words += [f"data.train={texts}", "steps=3", "global_batch_size=8", "data.workers=0", "tracking=local"]
    words.append("tracking.report=false")
    done = commands.run("train", *words, f"run.dir={tmp_path}", "run.name=a")
    assert done.code == 0, done.out
    assert dyad.load(str(tmp_path / "a")).encode_passage(["text number 1", "another"]).shape[0] == 2
    checked = commands.run("data", "check", str(texts))
    assert checked.code == 0, checked.out


@pytest.mark.soak  # minutes
@pytest.mark.parametrize("recipe", ["simclr_emoji", "spectral_emoji"])
def test_a_recipe_beats_chance_and_the_untrained_encoder(recipe: str, commands: Commands, tmp_path: Path) -> None:
    """And is exported; of a small run: tests/dyad/export/test_export_views.py."""
    assert commands.run("train", f"experiment={recipe}", f"run.dir={tmp_path}", "run.name=a").code == 0
    assert commands.run("eval", f"checkpoint={tmp_path / 'a'}", "baselines=[untrained]").code == 0
    found = json.loads((tmp_path / "a/eval/val.json").read_text())
    before = found["baselines"]["untrained"]["metrics"]["view_R@1"]
    assert found["metrics"]["view_R@1"] > before + 0.1 > found["chance"]["view_R@1"]
    exported = commands.run("train.export", f"run={tmp_path / 'a'}")
    assert exported.code == 0 and (tmp_path / "a/export/onnx/image.onnx").exists(), exported.out

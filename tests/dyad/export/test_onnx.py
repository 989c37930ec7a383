"""Graphs of both tasks: onnxruntime gives the run's embeddings for any number of rows and any length."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import tiny_bert
from helpers.export import near
from helpers.messages import raises
from helpers.towers import cnn, config_file, random_images, transformers_tower
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig, Title
from dyad.data.image_text.decode import decode
from dyad.data.image_text.transforms import ImageSpec, evaluation_transform
from dyad.export import onnx as export_onnx
from dyad.export.library import ExportSource, in_a_clean_process
from dyad.export.main import ExportFormat, export, library_of
from dyad.export.to_tokenizers import CLEANING, to_tokenizers
from dyad.train.config import ModelConfig, Pooling, Task, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.build import build_model
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.models import ImageModel, TwoTowerModel
from dyad.train.towers.tower import Tower, TwoTower

TEXTS = ["a", "", "wheel of dharma", "b " * 40, "Grüße, it's <b>9</b>\n\tnew"]


def source(folder: Path, model: ModelConfig, task: Task, similarity: Similarity = Similarity.cosine) -> ExportSource:
    config = TrainConfig(
        task=task,
        model=model,
        data=DataConfig(
            train="x.jsonl",
            question=QuestionConfig(prefix='q: "', length=12),
            passage=PassageConfig(prefix="p: ", length=30, title=Title.pair),
        ),
        objective=OBJECTIVES["clip"](similarity=similarity),
    )
    torch.manual_seed(0)
    with torch.enable_grad():
        built = build_model(config)
    for parameter in built.towers.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    built.towers.eval()
    return ExportSource("tiny", config, built, Calibration("", 2.0))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return str(folder)


def run(graph: Path, inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return torch.from_numpy(np.asarray(session.run(None, {name: inputs.numpy()})[0]))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_open_clip_pair_with_its_weights_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded by a process of its own; also a graph without its weights' file, which that process names."""
    monkeypatch.setattr(export_onnx, "ONE_FILE", 0)
    model = ModelConfig(name=config_file(tmp_path), grad_checkpointing=True)
    of, out = source(tmp_path, model, Task.image_text), tmp_path / "out"
    assert export(export_onnx.LIBRARY, of, out) < 1e-5
    names = {"image.onnx", "image.onnx.data", "text.onnx", "text.onnx.data"}
    assert {p.name for p in out.iterdir()} == {*names, "tokenizer.json", "config.json", "dyad.json", "README.md"}
    for rows in (1, 3):
        x = random_images(rows, 32)
        close(normalize(of.model.towers.x_tower(x), dim=-1), run(out / "image.onnx", x))
        tokens = of.model.tokenize(TEXTS[:rows])
        close(normalize(of.model.towers.y_tower(tokens), dim=-1), run(out / "text.onnx", tokens))
    graph = onnx.load(out / "image.onnx", load_external_data=False)
    assert [o.version for o in graph.opset_import if not o.domain] == [
        json.loads((out / "config.json").read_text())["opset"]
    ]
    assert str(Path(torch.__file__).parent) not in str(graph) and "Opset 20" in (out / "README.md").read_text()
    (out / "image.onnx.data").unlink()
    with raises(ConfigError):
        ask = {"texts": [], "pairs": None, "graph": "image.onnx"}
        (tmp_path / "calls.json").write_text(json.dumps([ask]))
        (tmp_path / "given.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        in_a_clean_process("onnxruntime", out, tmp_path)


@torch.no_grad()
def test_questions_and_passages_by_one_file(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and a projection; pooled by the last token, scored by dot; the lines of the card."""
    near(monkeypatch)
    text = transformers_tower(bert, pooling=Pooling.last, lora_rank=4, context_length=32)
    model = ModelConfig(name=None, embed_dim=8, text=text)
    of = source(tmp_path, model, Task.question_passage, Similarity.dot)
    out = tmp_path / "out"
    assert export(export_onnx.LIBRARY, of, out) < 1e-5
    assert {p.name for p in out.iterdir()} == {
        "encoder.onnx",
        "tokenizer.json",
        "config.json",
        "dyad.json",
        "README.md",
    }
    (tmp_path / "lines.py").write_text(lines(export_onnx.LIBRARY.snippet(out, of)))
    found = runpy.run_path(str(tmp_path / "lines.py"))
    want = of.model.towers.x_tower(of.model.tokenize(['q: "a question'], 12))
    close(want, torch.from_numpy(found["questions"]))
    assert abs(float(want.norm()) - 1) > 0.01  # as they are, not of unit length
    want = of.model.towers.y_tower(of.model.tokenize(["p: its title"], 30, ["a passage"]))
    close(want, torch.from_numpy(found["passages"]))
    assert found["scores"].shape == (1, 1)


@torch.no_grad()
def test_images_and_a_frozen_encoder(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers of two libraries, which no other format holds. A length that no example had."""
    near(monkeypatch)
    text = transformers_tower(bert, frozen=True, context_length=24)
    model = ModelConfig(name=None, embed_dim=8, image=cnn(), text=text)
    of, out = source(tmp_path, model, Task.image_text), tmp_path / "out"
    export(export_onnx.LIBRARY, of, out)
    for texts in (TEXTS, ["a"], ["w " * n for n in range(1, 20, 3)]):
        tokens = of.model.tokenize(texts)
        longest = int((tokens != 0).sum(1).max())
        close(normalize(of.model.towers.y_tower(tokens), dim=1), run(out / "text.onnx", tokens[:, :longest]))
    Image.fromarray(random_images(1, 16)[0].permute(1, 2, 0).numpy()).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.py").write_text(lines(export_onnx.LIBRARY.snippet(out, of)))
    found = runpy.run_path(str(tmp_path / "lines.py"))
    close(normalize(of.model.towers.x_tower(random_images(1, 16)), dim=1), torch.from_numpy(found["images"]))
    settings = json.loads((out / "config.json").read_text())
    assert settings["image"]["size"] == 16 and settings["text"]["length"] == 24
    assert settings["temperature"] == pytest.approx(0.1353, abs=1e-4)


@pytest.mark.parametrize(("resize", "resized"), [("shortest", 23), ("squash", 20), ("longest", None)])
def test_the_lines_prepare_a_transparent_image_as_the_run_does(
    resize: str, resized: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ImageSpec(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), resize, resized=resized)
    net = Tower(nn.Identity(), nn.Identity(), prepare=nn.Identity())
    of = ExportSource("tiny", TrainConfig(), ImageModel(TwoTower(net, net), None, spec))
    text = lines(export_onnx.snippet(tmp_path, of))
    monkeypatch.chdir(tmp_path)
    across, down = np.meshgrid(np.linspace(0, 255, 90), np.linspace(0, 255, 60))
    Image.fromarray(np.stack([across, down, 255 - across, down], 2).astype(np.uint8), "RGBA").save("image.png")
    (tmp_path / "lines.py").write_text(text[text.index("from PIL") : text.index("images = ")])
    found = runpy.run_path(str(tmp_path / "lines.py"), {"np": np})
    want = evaluation_transform(decode(Path("image.png").read_bytes(), 10**6), spec).numpy()
    assert np.abs(found["pixels"][0].astype(int) - want).mean() < 1


def lines(snippet: str) -> str:
    return "\n".join(line[4:] for line in snippet.splitlines() if line.startswith("    "))


@pytest.mark.parametrize("cleaning", ["lower", "whitespace", "canonicalize"])
def test_one_file_tokenizes_as_open_clip_does(cleaning: str, tmp_path: Path) -> None:
    import open_clip

    own = open_clip.SimpleTokenizer(context_length=20, clean=cleaning)
    assert set(CLEANING) >= {own.clean_fn.__name__}
    converted = to_tokenizers(TwoTowerModel(TwoTower(nn.Identity(), nn.Identity()), own))
    converted.enable_truncation(20)
    texts = [
        *TEXTS,
        "  A_b,\u00a0C!  “quoted” it’s",
        "日本語 emoji 😀 don't",
        "x" * 300,
        "<end_of_text> 1999-12",
        "IT'S",
        *export_onnx.ODD,
        "&lt;b&gt; &amp;amp;lt; &#39;x&nbsp;&quot;",
        "Ｆｕｌｌ １２月 ﬁre ﬂag ｶﾀｶﾅ ﾊﾟ ǅ",
        "a\ufeffb \x07c\x1cd \x1b[31mred\x1b[0m \u2028e",
        "ΑΣ ΣΑΣ İ „a‟ ‚b‛ …",
    ]
    theirs = torch.tensor([encoding.ids for encoding in converted.encode_batch(texts)])
    assert torch.equal(theirs, own(texts))


def test_a_tokenizer_that_no_file_holds_is_refused(bert: str, tmp_path: Path) -> None:
    model = ModelConfig(name=config_file(tmp_path))
    of = source(tmp_path, model, Task.image_text)
    own: Any = of.model.tokenize.tokenizer
    own.clean_fn = lambda text: text[::-1]
    with raises(ConfigError, "<lambda>"):
        export(export_onnx.LIBRARY, of, tmp_path / "out")
    own.clean_fn = __import__("open_clip").tokenizer._clean_lower
    own.reduction_fn = lambda texts, **_: torch.ones(len(texts), 12, dtype=torch.long)
    with raises(ConfigError, "tokenizer.json"):
        export(export_onnx.LIBRARY, of, tmp_path / "out")


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.delitem(sys.modules, "dyad.export.onnx")
    with raises(ConfigError, ".[onnx]", "requirements.lock"):
        library_of(ExportFormat["onnx"])

"""`python -m eval model=`: models of other libraries and exports, as they are; the model before training."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.export import near
from helpers.messages import raises
from helpers.passages import make_run as make_text_run, write_beir
from helpers.runs import EMOJI, TINY, make_run
from PIL import Image
from torch.nn.functional import normalize

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.find_model import find_model
from dyad.evaluation.load_run import read_config
from dyad.evaluation.main import build_untrained, main as evaluate
from dyad.evaluation.suite import _entries, build_evaluators
from dyad.export.main import main as export
from dyad.train.config import Task, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.eval_config import EvalConfig

SHARD = EMOJI / "twemoji-unseen.tar"


def command(main: Any, *words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *words])
        main()


def metrics(file: Path) -> dict[str, float]:
    return json.loads(file.read_text())["metrics"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    near(monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model tells some emoji apart."""
    return make_run(tmp_path_factory.mktemp("fit"), fit=20)


def test_an_open_clip_model_is_evaluated_as_it_is(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(evaluate, f"checkpoint={run}", f"val={SHARD}", "out=own", "examples=0")
    command(export, f"run={run}", "out=exported")
    options = (f"val={SHARD}", "captions=[caption]", "text_key=concept", "examples=0")
    weights = "open_clip:exported/tiny.json@exported/open_clip_model.safetensors"
    for name in (weights, "open_clip:exported", "open_clip:local-dir:exported", "exported"):
        command(evaluate, f"model={name}", "out=theirs", *options)
        assert metrics(here / "theirs/val.json") == pytest.approx(metrics(here / "own/val.json"), abs=0.02)
    command(evaluate, f"model={weights}", *options)
    result = json.loads(
        (here / "runs/eval-open_clip_exported_tiny.json_exported_open_clip_model.safetensors/val.json").read_text()
    )
    assert (result["pretrained"], result["step"], "baselines" in result) == (weights, None, False)
    assert f"{weights}. Written: runs/eval-open_clip" in capsys.readouterr().out
    loaded = find_model(weights).load()
    assert loaded.calibration and loaded.calibration.temperature == pytest.approx(0.05, abs=1e-3)  # from the file
    with raises(ConfigError, "baselines=[untrained]"):
        command(evaluate, f"model={weights}", "baselines=[untrained]", *options)


def test_embeddings_of_an_open_clip_model_are_those_of_open_clip(here: Path) -> None:
    library: Any = import_module("open_clip")  # its annotations are too wide for the type checker
    (here / "tiny.json").write_text(json.dumps(TINY))
    library.add_model_config(here / "tiny.json")
    torch.manual_seed(1)
    theirs = library.create_model("tiny").eval()
    with torch.no_grad():
        theirs.logit_scale.fill_(3.5)
        torch.save(theirs.state_dict(), here / "theirs.pt")
        texts, size = ["a frog", "two red flags"], TINY["vision_cfg"]["image_size"]
        pixels = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), np.uint8)
        preprocess = library.image_transform(size, is_train=False)
        images = torch.stack([preprocess(Image.fromarray(image)) for image in pixels])
        x = normalize(theirs.encode_image(images)).numpy()
        y = normalize(theirs.encode_text(library.get_tokenizer("tiny")(texts))).numpy()
    model = dyad.load("open_clip:tiny.json@theirs.pt", "cpu")
    np.testing.assert_allclose(model.encode_text(texts), y, atol=1e-6)
    np.testing.assert_allclose(model.encode_image(list(pixels)), x, atol=1e-5)
    assert model.temperature == pytest.approx(np.exp(-3.5))


def test_a_sentence_transformer_is_evaluated_with_its_prompts(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ("data.question.prefix='ask: '", "data.passage.prefix='say: '", "data.passage.title=drop")
    run, beir = make_text_run(here / "run", *keys), write_beir(here / "small")
    command(evaluate, f"checkpoint={run}", f"suite=[beir:{beir}]", "out=own", "baselines=[]")
    for form, kind in (("sentence_transformers", "st"), ("dpr", "dpr")):
        command(export, f"run={run}", f"format={form}", f"out={form}")
        command(evaluate, f"model={kind}:{form}", f"suite=[beir:{beir}]", f"out=of_{kind}")
        assert metrics(here / f"of_{kind}/small.json") == pytest.approx(metrics(here / "own/small.json"), abs=1e-6)
        found = json.loads((here / f"of_{kind}/small.json").read_text())["baselines"]
        assert list(found) == ["bm25", "fusion"]  # before training it is the same model
    assert "UNEXPECTED" not in capfd.readouterr().err  # transformers' table of DPR's own names of the weights
    (here / "sentence_transformers/dyad.json").unlink()
    config = find_model("st:sentence_transformers").config
    assert (config.data.question.prefix, config.data.passage.prefix) == ("ask: ", "say: ")
    with raises(ConfigError, "st:run/bert", "hf:run/bert"):
        find_model("st:run/bert")
    assert find_model("hf:run/bert").config.model.text.pooling == "mean"


@pytest.mark.parametrize(
    "content",
    ["[]", '{"keys": {"data.passage.length": "x"}}', '{"logit_scale": "x"}', f'{{"logit_scale": {10**400}}}', "{"],
    ids=lambda content: content[:40],
)
def test_damaged_settings_of_an_export_are_named(content: str, here: Path, models: Path) -> None:
    folder = here / "export"
    folder.mkdir()
    for file in (models / "bert").iterdir():
        shutil.copy(file, folder)
    (folder / "dyad.json").write_text(content)
    with raises(ConfigError, "export/dyad.json"):
        find_model("hf:export")


def test_settings_of_an_export_choose_no_other_keys(here: Path, models: Path) -> None:
    folder = here / "export"
    folder.mkdir()
    for file in (models / "bert").iterdir():
        shutil.copy(file, folder)
    kept = {"data.question.prefix": "q: ", "model.text.name": "/etc", "run.dir": "/tmp/else", "seed": 7}
    (folder / "dyad.json").write_text(json.dumps({"keys": kept}))
    config = find_model("hf:export").config
    assert config.data.question.prefix == "q: " and config.seed == 0
    assert (config.model.text.name, config.run.dir) == ("export", "runs")


def test_the_model_before_training_stands_beside_the_trained_one(
    run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = f"suite=[retrieval:{SHARD},zero_shot:{EMOJI / 'groups.json'}]"
    command(evaluate, f"checkpoint={run}", entries, "out=out", "examples=0", "baselines=[untrained]")
    table = capsys.readouterr().out.partition("step 7 of")[0]
    assert table.count("untrained") == 3 and table.count("model ahead") == 3
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80
    config = read_config(run)
    model = build_untrained(config)
    suite = EvalConfig(suite=[f"retrieval:{SHARD}"])
    _, evaluator = build_evaluators(TrainConfig(data=config.data, eval=suite, objective=config.objective), model)
    expected = evaluator.report(Encoder.of(config, model, World())).metrics
    result = json.loads((here / "out/twemoji-unseen.json").read_text())
    baseline = result["baselines"]["untrained"]
    assert baseline["metrics"] == {k: v for k, v in expected.items() if not k.startswith("num_")}
    for metric, difference in baseline["difference"].items():
        assert difference["value"] == pytest.approx(result["metrics"][metric] - expected[metric])
        assert difference["interval"][0] <= difference["value"] <= difference["interval"][1]


def test_a_folder_and_its_test_split_have_one_name_and_no_two_entries_have() -> None:
    for suite, names in (
        (["beir:a/topics"], ["topics"]),
        (["beir:a/topics@test"], ["topics"]),
        (["beir:a/topics@dev", "beir:a/topics@test"], ["topics_dev", "topics"]),
        (["beir:a/trec-2", "beir:b/trec", "beir:c/trec", "beir:d/trec"], ["trec-2", "trec", "trec-3", "trec-4"]),
        (["beir:a/x", "beir:b/x-3", "beir:c/x", "beir:d/x"], ["x", "x-3", "x-2", "x-4"]),
    ):
        config = TrainConfig(Task.question_passage, data=DataConfig(), eval=EvalConfig(suite=suite))
        assert [entry.name for entry in _entries(config)] == [f"eval/{name}" for name in names]

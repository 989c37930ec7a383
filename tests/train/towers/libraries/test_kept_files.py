"""A run keeps what describes its model: it is loaded and resumed from its folder alone, whatever happens to the files.

The two-rank resume is in tests/faults/test_resume.py.
"""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.export import near
from helpers.foreign import of_two_towers
from helpers.messages import raises
from helpers.runs import EMOJI
from helpers.towers import mpnet_folder

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.shards.licences import notices
from dyad.evaluation.find_model import find_model
from dyad.evaluation.main import main as evaluate
from dyad.export.card import _origins
from dyad.export.library import ExportSource
from dyad.export.main import chosen_format, export, library_of
from dyad.run.resume import lock_and_find
from dyad.run.train_run import train_run
from dyad.train.cli.compose import compose_config
from dyad.train.config import ModelConfig, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.run_folder.folder import check_run, run_folder
from dyad.train.towers.libraries.kept_files import keep_files

VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
TEXTS = ["a frog", "two toads on a log"]


def vit(folder: Path) -> list[str]:
    (folder / "vit.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}))
    return [f"model.name={folder / 'vit.json'}"]


def clip(folder: Path) -> list[str]:
    return of_two_towers(folder / "clip", "clip").words


def bert(folder: Path) -> list[str]:
    name = Path(mpnet_folder(folder))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (name / "modules.json").write_text(json.dumps(modules))
    (name / "1_Pooling").mkdir()
    (name / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (name / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    return ["model=cnn_minilm", f"model.text.name={name}"]


Model = Callable[[Path], list[str]]
MODELS: dict[str, Model] = {"open_clip config": vit, "CLIP folder": clip, "text folder": bert}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def command(folder: Path, words: list[str], name: str = "a", *more: str) -> list[str]:
    own = [f"data.train={EMOJI / 'fxemoji-trained.tar'}", "data.val=null", "data.workers=0", "global_batch_size=8"]
    own += ["tracking=local", "tracking.report=false", "checkpoint.every=2", "checkpoint.keep=2", "steps=4"]
    return ["data=emoji", *words, *own, f"run.dir={folder / 'runs'}", f"run.name={name}", *more]


def train(words: list[str]) -> Path:
    config = compose_config(words)
    train_run(World(), config)
    return run_folder(config)


def embeddings(run: Path) -> np.ndarray:
    return dyad.load(str(run)).encode_text(TEXTS)


def last_weights(run: Path) -> bytes:
    return (run / "checkpoints" / "step_00000004" / "model.safetensors").read_bytes()


@every_model
def test_a_run_is_loaded_and_goes_on_from_its_folder_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models := tmp_path / "models").mkdir()
    words = model(models)
    run = train(command(tmp_path, words))
    before, trained = embeddings(run), last_weights(run)
    shutil.copytree(run, copied := tmp_path / "elsewhere")
    shutil.rmtree(models)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert run == train(command(tmp_path, words)) and last_weights(run) == trained
    for folder in (run, copied):
        np.testing.assert_array_equal(embeddings(folder), before)
    near(monkeypatch)
    found = find_model(str(copied)).load()
    source = ExportSource("mine", found.config, found.model, found.calibration)
    library = library_of(chosen_format(None, found.config, found.model))
    assert export(library, source, tmp_path / "out") < 1e-4

    more = [f"resume={copied / 'checkpoints' / 'step_00000002'}"]
    assert last_weights(train(command(tmp_path, words, "b", *more))) == trained
    copies = [{path.name for path in (folder / "model").rglob("*.*")} for folder in (run, tmp_path / "runs" / "b")]
    assert copies[0] == copies[1] and not any("safetensors" in name for name in copies[0])
    tuned = train(command(tmp_path, words, "c", f"init_from={copied}"))
    assert embeddings(tuned).shape == before.shape


def test_a_config_that_is_edited_changes_no_run(tmp_path: Path) -> None:
    words = vit(tmp_path)
    run = train(command(tmp_path, words))
    before, file = embeddings(run), tmp_path / "vit.json"
    file.write_text(file.read_text().replace('"head_width": 16', '"head_width": 8'))  # the same shapes of weights
    np.testing.assert_array_equal(embeddings(run), before)
    for more in ([], [f"resume={run}", "run.name=b"], [f"init_from={run}", "run.name=b"]):
        config = compose_config(
            [word for word in command(tmp_path, words) if not (more and word == "run.name=a")] + more
        )
        with raises(ConfigError, "vit.json", f"{run}/model"):
            check_run(config)
    train(command(tmp_path, words, "a", "resume=never"))
    assert not np.array_equal(embeddings(run), before)
    (aside,) = run.glob("before-*")
    np.testing.assert_array_equal(embeddings(aside), before)


def test_a_changed_file_of_a_folder_is_named(tmp_path: Path) -> None:
    words = clip(tmp_path)
    for name in ("all_results.json", "trainer_state.json", "LICENSE"):
        (tmp_path / "clip" / name).write_text("{}")
    run = train(command(tmp_path, words))
    (tmp_path / "clip" / "notes.json").write_text("{}")  # a further file
    (tmp_path / "clip" / "all_results.json").unlink()
    (tmp_path / "clip" / "trainer_state.json").write_text("[1]")
    (tmp_path / "clip" / "LICENSE").write_text("another year")
    check_run(compose_config(command(tmp_path, words)))
    settings = tmp_path / "clip" / "config.json"
    settings.write_text(settings.read_text().replace('"quick_gelu"', '"gelu"'))
    with raises(ConfigError, "config.json", f"{run}/model"):
        check_run(compose_config(command(tmp_path, words)))


def test_what_needs_the_originals_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The baseline of the model before training has its weights; a model card quotes the licence also without them."""
    words = bert(tmp_path)
    (folder := Path(words[1].partition("=")[2])).joinpath("LICENSE").write_text("Do what you like.")
    run = train(command(tmp_path, words))
    monkeypatch.setattr("sys.argv", ["eval", f"run={run}", f"suite=[retrieval:{EMOJI / 'twemoji-unseen.tar'}]"])
    monkeypatch.setattr("sys.argv", [*sys.argv, "baselines=[untrained]"])
    evaluate()
    result = json.loads((run / "eval" / "twemoji-unseen.json").read_text())
    assert result["baselines"]["untrained"]["metrics"], capsys.readouterr()
    shutil.rmtree(folder)
    assert [notice.text for notice in notices([*_origins(find_model(str(run)).load().config)])][-1:] == [
        "Do what you like."
    ]


def test_checkpoints_that_vanish_during_a_start_leave_no_run_of_random_weights(tmp_path: Path) -> None:
    config = compose_config(command(tmp_path, vit(tmp_path)))
    with ExitStack() as stack, raises(ConfigError, run_folder(config)):
        lock_and_find(config, run_folder(config), stack, run_folder(config))


def test_the_models_of_auxiliary_losses_are_kept(tmp_path: Path) -> None:
    (own,) = vit(tmp_path)
    config = TrainConfig(also={"views": f"task=views {own}"}, model=ModelConfig(name=mpnet_folder(tmp_path)))
    keep_files(config, tmp_path / "run", None)
    kept = {path.relative_to(tmp_path / "run" / "model").parts[1:] for path in (tmp_path / "run").rglob("*.json")}
    assert kept == {
        ("vit.json",),
        *(("mpnet", name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")),
    }

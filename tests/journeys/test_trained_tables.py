"""Twenty steps on a table of every format: the losses are those of its packed form."""

from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ROOT, Commands
from helpers.tables import IMAGE_FORMATS, LABEL_FORMATS, TEXT_FORMATS, Written
from helpers.tiny_runs import QUIET, losses, only_run, refused
from helpers.topics import arguments

QUICK = {"hub parquet", "COCO", "class folders", "named columns", "save_to_disk"}


def cases(formats: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in formats]


def words(keys: dict[str, Any]) -> dict[str, str]:
    quoted = {name: f"'{value}'" if isinstance(value, str) else str(value) for name, value in keys.items()}
    return {f"data.{name}": value for name, value in quoted.items()}


def packed(commands: Commands, written: Written, folder: Path) -> Path:
    source, keys = written
    columns = [f"{name}={value}".replace("'", "") for name, value in keys.items()]
    assert commands.run("data", "pack", str(source), f"out={folder / 'out'}", *columns).code == 0
    return folder / "out"


def trained(commands: Commands, line: list[str], runs: Path) -> list[float]:
    ended = commands.run(*line)
    assert ended.code == 0, ended.out
    found = losses(only_run(runs))
    assert len(found) == 20
    return found


@pytest.fixture(scope="module")
def of_texts(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("texts")
    source = packed(commands, TEXT_FORMATS["csv"](folder), folder)
    keys = {"steps": 20, "data.negatives.per_row": 2}
    return trained(commands, arguments(models / "bert", source, folder / "runs", keys), folder / "runs")


@pytest.mark.parametrize("name", cases(TEXT_FORMATS))
def test_texts(commands: Commands, models: Path, tmp_path: Path, of_texts: list[float], name: str) -> None:
    source, keys = TEXT_FORMATS[name](tmp_path)
    more = {"steps": 20, "data.negatives.per_row": 2, **words(keys)}
    line = arguments(models / "bert", source, tmp_path / "runs", more)
    assert trained(commands, line, tmp_path / "runs") == of_texts


@pytest.fixture(scope="module")
def of_images(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of packed images with captions, and with labels."""
    from helpers.tiny_runs import tiny_arguments

    found = {}
    for name, formats in (("folder", IMAGE_FORMATS), ("class folders", LABEL_FORMATS)):
        folder = tmp_path_factory.mktemp("pictures")
        keys = {
            **QUIET,
            "data.captions": "[txt]",
            "steps": 20,
            "data.train": packed(commands, formats[name](folder), folder),
        }
        found[name] = trained(commands, tiny_arguments(models, folder / "runs", keys), folder / "runs")
    return found


@pytest.mark.parametrize("name", cases({**IMAGE_FORMATS, "class folders": LABEL_FORMATS["class folders"]}))
def test_images(commands: Commands, tiny, tmp_path: Path, of_images: dict[str, list[float]], name: str) -> None:
    source, keys = (IMAGE_FORMATS | LABEL_FORMATS)[name](tmp_path)
    more = {**QUIET, "data.captions": "[txt]", "steps": 20, "data.train": source, **words(keys)}
    expected = of_images["class folders" if name == "class folders" else "folder"]
    assert trained(commands, tiny(more), tmp_path / "runs") == expected


def test_a_run_on_a_table_is_evaluated_on_one_and_resumes(commands: Commands, tiny, tmp_path: Path) -> None:
    source, _ = IMAGE_FORMATS["hub parquet"](tmp_path)
    keys = {**QUIET, "data.captions": "[txt]", "data.train": source, "data.val": source, "checkpoint.every": 3}
    first = commands.run(*tiny({**keys, "steps": 6, "run.name": "r"}))
    assert first.code == 0 and "was converted once" in first.out and (tmp_path / "runs/r/eval/val.json").exists()
    again = commands.run(*tiny({**keys, "steps": 6, "run.name": "r"}))
    assert again.code == 0 and "already finished" in again.out


def test_data_of_the_other_task_are_named_before_anything_is_loaded(commands: Commands, tmp_path: Path) -> None:
    texts, _ = TEXT_FORMATS["parquet"](tmp_path)
    train = f"python -m train 'data.train=\"{texts}\"' experiment=mnrl model.text.name=bert-base-uncased"
    refused(commands.run("train", f"data.train={texts}"), 2, "task=image_text", train)
    images, _ = IMAGE_FORMATS["hub parquet"](tmp_path)
    line = ["train", "experiment=mnrl", "model.text.name=x", f"data.train={images}"]
    refused(commands.run(*line), 2, "task=question_passage", "model.name=ViT-B-32 epochs=10")
    shard = ROOT / "data/samples/emoji/fxemoji-trained.tar"
    refused(commands.run("train", "experiment=mnrl", "model.text.name=x", f"data.train={shard}"), 2, shard)
    topics = ROOT / "data/samples/topics"
    refused(commands.run("train", f"data.train={topics}"), 2, topics)

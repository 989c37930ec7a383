"""Karpathy's splits, and tables of captions as Kaggle has them: other case, blanks, images in a folder beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.messages import raises
from helpers.shards import image, opened

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.cli.counts import most_samples
from dyad.data.config import DataConfig
from dyad.data.image_text.sample import ShardSample
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.evaluation.suite import _name


def captions(source: object) -> list[tuple[str, ...]]:
    """The captions of all samples of a source, converted as for training."""
    options = table_options(DataConfig(), captioned=True)
    parse_sources(str(source), tables=checked_tables(options))
    ((shard,),) = (each.shards for each in parse_sources(str(source), tables=prepared_tables(options)))
    shards = opened(Path(shard))
    return [tuple(ShardSample.read(shards, i).captions("txt")) for i in range(len(shards))]


@pytest.fixture
def karpathy(tmp_path: Path) -> Path:
    """The form of dataset_coco.json; images of two folders beside it."""
    images = []
    for number, split in enumerate(["train", "restval", "train", "test", "val"]):
        place = f"{'val' if number % 2 else 'train'}2014"
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / f"{number}.png").write_bytes(image(number))
        said = [{"raw": f"picture {number}.", "tokens": []}, {"raw": f"no. {number}", "tokens": []}]
        images.append({"filepath": place, "filename": f"{number}.png", "split": split, "sentences": said})
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return tmp_path / "dataset_coco.json"


def test_a_split_of_karpathy(karpathy: Path) -> None:
    assert captions(f"{karpathy}@train") == [("picture 0.", "no. 0"), ("picture 2.", "no. 2")]
    assert captions(f"{karpathy}@test") == [("picture 3.", "no. 3")]
    assert most_samples([f"{karpathy}@train", f"{karpathy}@restval"], []) == 3
    both = parse_sources(f"{karpathy}@train@2::{karpathy}@restval", tables=prepared_tables(table_options(DataConfig())))
    assert [(len(source.shards), source.weight) for source in both] == [(1, 2.0), (1, 1.0)]


def test_no_split_is_taken_silently(karpathy: Path) -> None:
    for source, words in ((karpathy, ["several splits", f"{karpathy}@test"]), (f"{karpathy}@tst", ["'tst'"])):
        with raises(ConfigError, *words):
            captions(source)
    with raises(ConfigError, "matches nothing"):
        captions(f"{karpathy.parent}/none.json@test")
    rows, annotations = karpathy.parent / "rows.json", karpathy.parent / "captions.json"
    rows.write_text(json.dumps([{"anchor": "a", "positive": "b"}]))
    annotations.write_text(json.dumps({"images": [{"id": 1, "file_name": "0.png"}], "annotations": []}))
    for source in (f"{rows}@0,5", f"{annotations}@test"):
        with raises(ConfigError, source):
            captions(source)


def test_evaluations_of_two_splits_have_two_names(karpathy: Path) -> None:
    names = list[str]()
    for split in ("test", "val", "restval"):
        names.append(_name(f"{karpathy}@{split}", names))
    assert names == ["dataset_coco", "dataset_coco_val", "dataset_coco_restval"]
    assert _name("flickr30k.tar@2", names) == "flickr30k"


def test_images_of_flickr_lie_in_a_folder_beside(karpathy: Path, tmp_path: Path) -> None:
    """dataset_flickr30k.json has no filepath."""
    value = json.loads(karpathy.read_text())
    value["images"] = [{name: each[name] for name in each if name != "filepath"} for each in value["images"][:1]]
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps(value))
    assert captions(tmp_path / "dataset_flickr30k.json@train") == [("picture 0.", "no. 0")]


TABLES = {
    "Flickr8k": ("image,caption\n0.png,a frog\n1.png,a flag\n", "Images"),
    "Flickr30k": ("image_name| comment_number| comment\n0.png| 0| a frog\n1.png| 0|  a flag\n", "flickr30k_images"),
    "capitals": ("Image,Caption\n0.png,a frog\n1.png,a flag\n", "."),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_kaggle(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, place = TABLES[name]
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / "a.csv").write_text(text)
    for number in range(2):
        (tmp_path / place / f"{number}.png").write_bytes(image(number))
    assert captions(tmp_path / "a.csv") == [("a frog",), ("a flag",)]
    said = f"{tmp_path / 'a.csv'}: its images are in {tmp_path / place}"
    assert capsys.readouterr().err.count(said) == (place != ".")


def test_images_of_several_folders_are_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLES["Flickr8k"][0])
    for place in ("train", "val"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "0.png").write_bytes(image())
    with raises(DataError, "missing file", f"{tmp_path}/0.png"):
        captions(tmp_path / "a.csv")

"""How many samples are known before torch is loaded, and what a start refuses by that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises
from helpers.passages import write_beir
from helpers.shards import image, write_tar

from dyad.data.base.errors import ConfigError
from dyad.data.cli import counts
from dyad.data.cli.counts import most_samples
from dyad.run.checks import check_config, check_sweep
from dyad.train.cli.compose import compose_config

ROWS = [{"anchor": f"q {i}", "positive": f"p {i}"} for i in range(5)]
FILES: dict[str, bytes] = {
    "a.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "a.json": json.dumps(ROWS).encode(),
    "a.tsv": b"anchor\tpositive\n" + b"q\tp\n" * 5,
    "a.csv": b"anchor,positive\n" + b"q,p\n" * 5,
}


@pytest.mark.parametrize("name", FILES)
def test_rows_of_small_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert most_samples([str(path)] * 2, []) == 10
    assert [file.name for file in tmp_path.iterdir()] == [name], "nothing is stored"
    monkeypatch.setattr(counts, "SMALL", 10)
    assert most_samples([str(path)], []) is None


def test_what_cannot_be_counted_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n{\n")
    assert most_samples([str(tmp_path / "a.jsonl")], []) is None
    assert most_samples(["https://127.0.0.1:9/a.jsonl"], []) is None


def test_images_and_judged_questions_are_counted(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [(f"{i}.png", image(i)) for i in range(3)])
    (tmp_path / "folder").mkdir()
    for i in range(4):
        (tmp_path / "folder" / f"{i}.png").write_bytes(image(i))
    assert most_samples([str(shard), str(tmp_path / "folder")], []) == 7
    assert most_samples([str(write_beir(tmp_path / "b") / "qrels" / "test.tsv")], []) == 11


STARTS: dict[str, tuple[list[Any], list[str]]] = {
    "batch": (["global_batch_size=6", "data.train={0}/a.jsonl"], ["global_batch_size=6", "5 samples"]),
    "weights": (["global_batch_size=16", "data.train={0}/a.jsonl@3"], ["global_batch_size=16", "15 samples"]),
    "images for questions": (
        ["data.train={0}/a.jsonl", "data.val={0}/p.csv"],
        ["data.val", "p.csv", "file_name, caption"],
    ),
    "misspelt column": (["data.train={0}/a.csv", "data.columns=[anchr,positive]"], ["'anchr'", "anchor, positive"]),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_is_refused_before_torch_is_loaded(tmp_path: Path, name: str) -> None:
    for file, content in FILES.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "p.csv").write_text("file_name,caption\n0.png,one\n")
    words, named = STARTS[name]
    words = ["experiment=mnrl", "model.text.name=x", "steps=1", *(word.format(tmp_path) for word in words)]
    with raises(ConfigError, *named):
        check_sweep(words, [compose_config(words)])


def test_the_loss_with_too_few_samples_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    words = ["experiment=mnrl", "model.text.name=x", "steps=1", f"data.train={tmp_path}/a.jsonl", "global_batch_size=4"]
    words += ["also.one='weight=0.5'", "also.two='global_batch_size=6'"]
    with raises(ConfigError, "also.two: global_batch_size=6", "5 samples"):
        check_sweep(words, [compose_config(words)])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.train={0}/p.csv", "data.columns=[file,caption]"], ["'file'", "file_name, caption"]),
        (["data.train={0}/p.csv", "data.columns=[caption,file_name]"], ["columns file_name, caption", "data.columns"]),
        (["data.train={0}/x.tar.gz"], ["x.tar.gz", "gunzip"]),
    ],
    ids=["misspelt", "swapped", "compressed"],
)
def test_what_was_recognised_is_said(tmp_path: Path, words: list[str], named: list[str]) -> None:
    (tmp_path / "p.csv").write_text("file_name,caption\n0.png,one\n")
    (tmp_path / "0.png").write_bytes(image(0))
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b")
    common = ["model.name=ViT-B-32", "steps=1", "global_batch_size=2", "tracking=local"]
    with raises(ConfigError, *named):
        check_config(compose_config([*common, *(word.format(tmp_path) for word in words)]))

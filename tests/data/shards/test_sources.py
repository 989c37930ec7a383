"""What users may write for shards, and what they are told when it cannot work."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.data.shards.sources import ShardSource, WrittenSource, parse_sources, written_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.tar", "a.tar", "c.jsonl", ".hidden.tar", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "emoji").mkdir()
    return tmp_path


def test_compressed_shards_beside_others_are_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "d.tar.gz").touch()
    a, b, c = (str(folder / name) for name in ("a.tar", "b.tar", "c.jsonl"))
    for key in ("data.train", "SOURCE"):
        assert parse_sources(str(folder), key) == [ShardSource((a, b, c))]
    (line,) = capsys.readouterr().err.splitlines()
    assert "not read: 1 .tar.gz; " in line and f"gunzip -k {folder}/d.tar.gz" in line


def test_file_folder_glob_and_braces(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in ("a.tar", "b.tar", "c.jsonl"))
    assert parse_sources(a) == [ShardSource((a,), 1.0)]
    assert parse_sources(f"file://{a}") == [ShardSource((a,))]
    assert parse_sources(str(folder)) == [ShardSource((a, b, c))]
    assert parse_sources(f"{folder}/*.tar") == [ShardSource((a, b))]
    assert parse_sources(f"{folder}/**/[ab].tar") == [ShardSource((a, b))]
    assert parse_sources(f"{folder}/{{b,a}}.tar") == [ShardSource((b, a))]


def test_brace_ranges_keep_their_zeros(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{n:03d}.tar") for n in range(8, 12)]
    for name in names:
        Path(name).touch()
    assert parse_sources(f"{tmp_path}/{{008..011}}.tar")[0].shards == tuple(names)


def test_weights_joined_and_listed(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in ("a.tar", "b.tar", "c.jsonl"))
    expected = [ShardSource((a,), 2.0), ShardSource((b,), 0.5), ShardSource((c,), 1.0)]
    assert parse_sources(f"{a}@2::{b}@0.5::{c}") == expected
    assert parse_sources([f"{a}@2", f"{b}@0.5::{c}"]) == expected


def test_sources_written_as_mappings(folder: Path) -> None:
    a, b = str(folder / "a.tar"), str(folder / "b.tar")
    assert parse_sources([{"path": a, "weight": 2}, f"{b}@0.5"]) == [ShardSource((a,), 2.0), ShardSource((b,), 0.5)]
    told = {"path": a, "question_prefix": "q: ", "passage_prefix": ""}
    assert written_sources([told, b], "data.train") == [WrittenSource(a, 1.0, "q: ", ""), WrittenSource(b)]
    with raises(ConfigError, "data.train", "a.tar"):
        parse_sources([told])  # images, and evaluations


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"weight": 2}, "data.train: {'weight': 2} has no path"),
        ({"path": "a", "question": "q"}, "data.train: question"),
        ({"path": "a", "weight": "two"}, "data.train: weight"),
        ({"path": "a", "weight": 0}, "data.train: weight=0"),
        ({"path": "a", "weight": float("nan")}, "data.train: weight=nan"),
        ({"path": "a", "passage_prefix": 3}, "data.train: passage_prefix"),
        ({}, "data.train="),
        (3, "data.train=[3]"),
        ({1: 2}, "data.train"),
    ],
)
def test_mappings_that_cannot_be_read(source: object, named: str) -> None:
    with raises(ConfigError, named):
        written_sources([source], "data.train")


def test_names_with_at_signs_and_braces_are_names(tmp_path: Path) -> None:
    odd = [tmp_path / "x@home.tar", tmp_path / "{1}.tar", tmp_path / "[z].tar"]
    for path in odd:
        path.touch()
        assert parse_sources(str(path)) == [ShardSource((str(path),))]


def test_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert parse_sources("~/a.tar") == [ShardSource((str(folder / "a.tar"),))]


def test_remote_files_globs_and_folders() -> None:
    fs = fsspec.filesystem("memory")
    for name in ("a.tar", "b.tar", "other.bin"):
        fs.pipe_file(f"/sources/{name}", b"")
    both = ("memory:///sources/a.tar", "memory:///sources/b.tar")
    assert parse_sources("memory://sources/*.tar") == [ShardSource(both)]
    assert parse_sources("memory://sources@3") == [ShardSource(both, 3.0)]
    assert parse_sources("https://host/x/{0..1}.tar?key=v") == [
        ShardSource(("https://host/x/0.tar?key=v", "https://host/x/1.tar?key=v"))
    ]
    with raises(ConfigError, "memory://nowhere"):
        parse_sources("memory://nowhere")
    with raises(ConfigError, "https://host/folder"):
        parse_sources("https://host/folder")


def test_remote_folder_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "glob", lambda *_: {}["credentials"])
    with raises(ConfigError, "memory://x/*.tar"):
        parse_sources("memory://x/*.tar")


def test_missing_driver_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with raises(ConfigError, "s3fs"):
        parse_sources("s3://bucket/*.tar")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("{d}/emojy/*.tar", "'emoji'"),
        ("{d}/emoji/*.tar", "{d}/emoji"),
        ("{d}/emoji", "{d}/emoji"),
        ("{d}/a.tar/x.tar", "{d}/a.tar"),
        ("{d}/{{a,z}}.tar", "'z.tar'"),
        ("{d}/{{a,b.tar", "{d}/{{a,b.tar"),
        ("{d}/notes.txt", "{d}/notes.txt"),
        ("{d}/a.tar@0", "'{d}/a.tar@0'"),
        ("{d}/a.tar@-1", "'{d}/a.tar@-1'"),
        ("{d}/a.tar@nan", "'{d}/a.tar@nan'"),
        ("@2", "'@2'"),
        ("{d}/a.tar::{d}/*.tar", "{d}/a.tar"),
        ("pipe:cat {d}/a.tar", "'pipe:'"),
        ("ftp://host/a.tar", "'ftp:'"),
        ("{d}/a.tar::", "{d}/a.tar::"),
        ("", ""),
        ([], ""),
        (None, ""),
        ([3], "[3]"),
    ],
)
def test_what_cannot_work(folder: Path, value: object, named: str) -> None:
    written = value.format(d=folder) if isinstance(value, str) else value
    with raises(ConfigError, "data.val", named.format(d=folder)) as caught:
        parse_sources(written, "data.val")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_compressed_shards_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.touch()
    with raises(ConfigError, path):
        parse_sources(str(path))

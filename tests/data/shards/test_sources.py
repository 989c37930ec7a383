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
        parse_sources([told])  # pictures, and evaluations


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weight": 2}, r"data\.train: path of a source: .* written \{path, weight, question_prefix, passage_prefix\}"),
        ({"path": "a", "question": "q"}, r"data\.train: question of a source: Unexpected .*question_prefix"),
        ({"path": "a", "weight": "two"}, r"data\.train: weight of a source: .*number"),
        ({"path": "a", "weight": 0}, r"data\.train: weight=0 of a: must be a positive number"),
        ({"path": "a", "weight": float("nan")}, r"data\.train: weight=nan of a: must be"),
        ({"path": "a", "passage_prefix": 3}, r"data\.train: passage_prefix of a source: .*string"),
        ({}, r"data\.train=.* names no shards"),
        (3, r"data\.train=\[3\] names no shards"),
        ({1: 2}, r"data\.train: "),
    ],
)
def test_mappings_that_cannot_be_read(source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
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
    with raises(ConfigError):
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
    ("value", "message"),
    [
        ("{d}/emojy/*.tar", r"data.val={d}/emojy/\*.tar matches nothing: no 'emojy' in {d}. Did you mean 'emoji'\?"),
        ("{d}/emoji/*.tar", r"matches nothing in {d}/emoji\."),
        ("{d}/emoji", r"there is no .tar or .jsonl file"),
        ("{d}/a.tar/x.tar", r"{d}/a.tar is no folder"),
        ("{d}/{{a,z}}.tar", r"no 'z.tar' in {d}"),
        ("{d}/{{a,b.tar", r"a brace is not closed"),
        ("{d}/notes.txt", r"shards end in .tar or .jsonl"),
        ("{d}/a.tar@0", r"the weight in '{d}/a.tar@0' must be a positive number"),
        ("{d}/a.tar@-1", r"must be a positive number"),
        ("{d}/a.tar@nan", r"must be a positive number"),
        ("@2", r"must be a positive number"),
        ("{d}/a.tar::{d}/*.tar", r"{d}/a.tar appears twice"),
        ("pipe:cat {d}/a.tar", r"'pipe:' is not read"),
        ("ftp://host/a.tar", r"'ftp:' is not read. Use a local path or https, http, s3, gs, hf, memory"),
        ("{d}/a.tar::", r"names no shards"),
        ("", r"names no shards"),
        ([], r"names no shards"),
        (None, r"names no shards"),
        ([3], r"names no shards"),
    ],
)
def test_what_cannot_work(folder: Path, value: object, message: str) -> None:
    written = value.format(d=folder) if isinstance(value, str) else value
    with pytest.raises(ConfigError, match=message.format(d=folder)) as caught:
        parse_sources(written, "data.val")  # type: ignore[arg-type]
    assert "data.val" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_compressed_shards_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.touch()
    with raises(ConfigError):
        parse_sources(str(path))

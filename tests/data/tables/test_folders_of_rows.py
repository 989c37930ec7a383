"""Files of rows with named columns, in a folder and in storage: each is a table, as it is alone. Remote globs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers.data_cli import here
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig
from dyad.data.question_passage.questions import open_questions
from dyad.data.tables.folders import tables_of

KEYS: dict[str, Any] = {"columns": ["q", "p"]}


def pairs(source: Path | str, **keys: Any) -> list[tuple[str, str]]:
    """Question and first positive of each row, as training reads them."""
    rows = open_questions(str(source), DataConfig(**keys))
    return [(row.question.text, row.positives[0].text) for row in map(rows.row, range(len(rows)))]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "tsv"])
def test_columns_are_those_of_the_files_of_a_folder(suffix: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Hidden files are no part of it. Beside shards, files of rows are no tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, remote = tmp_path / "rows", f"memory://rows/{suffix}"
    folder.mkdir()
    for i, name in enumerate(("a", "b", ".c")):
        row = json.dumps({"q": f"a {i}", "p": f"b {i}"})
        text = {"jsonl": f"{row}\n", "json": f"[{row}]", "tsv": f"q\tp\na {i}\tb {i}\n"}[suffix]
        (folder / f"{name}.{suffix}").write_text(text)
        MemoryFileSystem().pipe(f"/rows/{suffix}/{name}.{suffix}", text.encode())
    for source in (folder, f"{folder}/*.{suffix}", remote, f"{remote}/[ab].*"):
        assert pairs(source, **KEYS) == [("a 0", "b 0"), ("a 1", "b 1")]
    here(monkeypatch, "check", folder, "columns=[q,p]")
    assert "questions       2 of 2 rows" in capsys.readouterr().out
    with raises(ConfigError, folder / f"a.{suffix}", "'x'", "data.columns="):
        pairs(folder, columns=["q", "x"])
    assert tables_of(str(folder), []) == tables_of(remote, []) == []
    (folder / "a.tar").write_bytes(b"")
    MemoryFileSystem().pipe(f"/rows/{suffix}/a.tar", b"")
    assert tables_of(str(folder), KEYS["columns"]) == tables_of(remote, KEYS["columns"]) == []


@pytest.mark.parametrize("pattern", ["*.csv", "part-?.csv", "part-[ab].csv"])
def test_globs_of_remote_tables(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        MemoryFileSystem().pipe(f"/globs/part-{name}.csv", f"anchor,positive\n{name},right\n".encode())
    assert pairs(f"memory://globs/{pattern}") == [("a", "right"), ("b", "right")]


def test_a_version_of_a_remote_table_is_no_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    MemoryFileSystem().pipe("/versions/a.csv?versionId=1", b"anchor,positive\na,right\n")
    assert pairs("memory://versions/a.csv?versionId=1") == [("a", "right")]

"""Files of rows with named columns, in a folder and in storage: each is a table, as it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dyad.data.config import DataConfig
from dyad.data.question_passage.questions import open_questions


def pairs(source: Path | str, **keys: Any) -> list[tuple[str, str]]:
    """Question and first positive of each row, as training reads them."""
    rows = open_questions(str(source), DataConfig(**keys))
    return [(row.question.text, row.positives[0].text) for row in map(rows.row, range(len(rows)))]


@pytest.mark.parametrize("pattern", ["*.csv", "part-?.csv", "part-[ab].csv"])
def test_globs_of_remote_tables(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        MemoryFileSystem().pipe(f"/globs/part-{name}.csv", f"anchor,positive\n{name},right\n".encode())
    assert pairs(f"memory://globs/{pattern}") == [("a", "right"), ("b", "right")]

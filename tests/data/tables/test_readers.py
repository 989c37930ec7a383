"""The rows of tables in unusual files: images that are missing, lines in a file named .json."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rows import Fields, write_lines
from helpers.tables import coco

from dyad.data.tables.folders import tables_of
from dyad.data.tables.readers import open_table


def rows(source: Path) -> list[Fields]:
    """All rows can be read."""
    found = [fields for _, fields in open_table(str(source)).rows()]
    assert all(isinstance(fields, dict) for fields in found)
    return found  # type: ignore[return-value]


def test_coco_finds_its_images_when_the_first_is_missing(tmp_path: Path) -> None:
    source = coco(tmp_path / "coco")
    (tmp_path / "coco/train2017/00.png").unlink()
    there = [(source.parent / fields["file_name"]).is_file() for fields in rows(source)]
    assert there == [False, *[True] * 59]


@pytest.mark.parametrize("first", ["type", "images", "query"])
def test_json_lines_in_a_file_named_json(first: str, tmp_path: Path) -> None:
    """Rows of HotpotQA begin with a field of the name that annotations of COCO may begin with."""
    said = [{first: "bridge", "anchor": "a b", "positive": "c d"}] * 2
    source = write_lines(tmp_path / "a.json", said)
    assert tables_of(str(source), []) == []  # read by offset
    (table,) = tables_of(str(source), ["anchor", "positive"])
    assert table.columns == [first, "anchor", "positive"] and rows(source) == said

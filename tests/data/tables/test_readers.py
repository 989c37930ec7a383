"""The rows of tables in unusual files: images that are missing, lines in a file named .json,
columns that nobody asks for; files that hold no table."""

from __future__ import annotations

import math
from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.messages import raises
from helpers.rows import Fields, write_lines
from helpers.shards import image
from helpers.tables import coco, write_arrow

from dyad.data.base.errors import DataError
from dyad.data.tables.folders import tables_of
from dyad.data.tables.image_table import TableOptions, image_table, json_bytes
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


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_times_of_nanoseconds_need_no_pandas(suffix: str, tmp_path: Path) -> None:
    """One such column, which nobody asks for, would make the whole table unreadable."""
    nanoseconds = pa.array([1_700_000_000_123_456_789, None])
    kinds = [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.duration("ns")]
    arrays = [nanoseconds.cast(kind) for kind in kinds] + [pa.array([1001, None]).cast(pa.time64("ns"))]
    table = pa.table([*arrays, pa.array(["a", "b"])], names=["naive", "utc", "lasts", "clock", "caption"])
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        write_arrow(tmp_path / "a.arrow", table)
    first, second = rows(tmp_path / f"a.{suffix}")
    told = datetime(2023, 11, 14, 22, 13, 20, 123456)
    assert (first["naive"], first["utc"]) == (told, told.replace(tzinfo=UTC)) and first["clock"] == time(0, 0, 0, 1)
    assert first["lasts"] == timedelta(seconds=1_700_000_000, microseconds=123456) and first["caption"] == "a"
    assert second == {**dict.fromkeys(table.column_names), "caption": "b"}


def test_a_field_that_is_no_number_is_null() -> None:
    """pandas writes NaN where a value is missing."""
    assert json_bytes({"a": math.nan, "b": [1.5, math.inf], "c": "NaN"}) == b'{"a": null, "b": [1.5, null], "c": "NaN"}'


def test_fields_with_bytes_are_left_out_at_any_depth(tmp_path: Path) -> None:
    row = {"image": image(), "caption": "a", "one": b"\xff", "list": [b"\xff"], "inner": [{"bytes": b"\xff"}]}
    columns = pa.Table.from_pylist([row | {"names": [["b"]]}])
    pairs = pa.array([[("c", b"\xff")]], pa.map_(pa.string(), pa.binary()))
    pq.write_table(columns.append_column("pairs", pairs), tmp_path / "a.parquet")
    table = image_table(open_table(str(tmp_path / "a.parquet")), TableOptions())
    assert table is not None
    ((_, fields),) = table.table.rows()
    assert table.members(fields)["json"] == b'{"names": [["b"]]}'


@pytest.mark.parametrize(("content", "value"), [("5", 5), ("null", None), ("true", True), ('"a"', "'a'")])
def test_a_json_file_without_an_array_is_refused(content: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with raises(DataError, tmp_path / "a.json", value):
        tables_of(str(tmp_path / "a.json"), ["anchor"])


def test_a_quoted_cell_keeps_a_separator_of_two_characters(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('user::item\nu::"std::map"\n')
    assert rows(tmp_path / "a.csv") == [{"user": "u", "item": "std::map"}]

"""Logs of events in any format and order, their windows, and what is refused."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, ItemKind, SequenceConfig
from dyad.data.sequence.files import events_left_out, sequence_files
from dyad.data.sequence.log import Log, log_files, read_log
from dyad.data.sequence.windows import windows_of

ROWS = [("ann", "b", 5), ("bob", "c", 1), ("ann", "a", 2), ("bob", "a", 1), ("ann", "c", 5), ("cat", "b", 0)]
SEQUENCES = {"ann": ["a", "b", "c"], "bob": ["c", "a"], "cat": ["b"]}


def write(path: Path, rows: Sequence[tuple[Any, ...]], names: Sequence[str] = ("user", "item", "time")) -> str:
    fields = [dict(zip(names, row, strict=True)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in fields))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(fields), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(fields)
    return str(path)


def named(log: Log) -> dict[str, list[str]]:
    bounds = zip(log.users, log.starts[:-1], log.starts[1:], strict=True)
    return {user: [log.items[item] for item in log.item_e[start:stop]] for user, start, stop in bounds}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_events_are_sorted_by_user_and_time(suffix: str, tmp_path: Path) -> None:
    log = read_log([write(tmp_path / f"log{suffix}", ROWS)], SequenceConfig())
    assert named(log) == SEQUENCES
    assert [*log.items] == ["b", "c", "a"] and log.files[0].name == f"log{suffix}"


@pytest.mark.parametrize(
    "times",
    [
        ("2024-05-01", "2024-04-30T23:59:59", "2024-05-01T00:00:01Z"),
        ("1.5e9", "1", "1500000001.5"),
        ("2024-05-01 02:00:00+02:00", "2024-04-30", "2024-05-01T00:00:01+00:00"),
    ],
)
def test_times(times: Sequence[str], tmp_path: Path) -> None:
    rows = [("u", name, time) for name, time in zip("bac", times, strict=True)]
    assert named(read_log([write(tmp_path / "log.csv", rows)], SequenceConfig())) == {"u": ["a", "b", "c"]}


def test_dates_of_parquet_are_midnights(tmp_path: Path) -> None:
    rows = [("u", name, date.fromisoformat(day)) for name, day in zip("ba", ("2024-05-01", "2024-04-30"), strict=True)]
    of_parquet, of_csv = (read_log([write(tmp_path / name, rows)], SequenceConfig()) for name in ("a.parquet", "a.csv"))
    assert named(of_parquet) == {"u": ["a", "b"]} and of_parquet.time_e.tolist() == of_csv.time_e.tolist()


def test_ids_that_parquet_has_as_floats_are_whole_numbers(tmp_path: Path) -> None:
    rows = [("u", 15.0, 1), ("u", 2, 2)]
    assert named(read_log([write(tmp_path / "log.parquet", rows)], SequenceConfig())) == {"u": ["15", "2"]}
    for value in (1.5, float("nan"), 2.0**53):
        with raises(DataError, "log.parquet", "row 1", f"item is {value!r}"):
            read_log([write(tmp_path / "log.parquet", [("u", value, 1)])], SequenceConfig())


def test_without_times_the_rows_are_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.csv", rows, ("who", "what", "when")) for n, rows in enumerate((ROWS[:3], ROWS[3:]))]
    log = read_log(files, SequenceConfig(user="who", item="what", time=None))
    assert named(log) == {"ann": ["b", "a", "c"], "bob": ["c", "a"], "cat": ["b"]}
    assert log.file_e.tolist() == [0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("u", "", 1), ["item is ''"]),
        ((None, "a", 1), ["user is None"]),
        (("u", "a\nb", 1), ["item is"]),
        (("u", "a", "noon"), ["time is 'noon'"]),
        (("u", "a", float("inf")), ["time is inf"]),
        (("u", ["a"], 1), ["item is ['a']"]),
        (("u", "a", None), ["time is None"]),
        (("u", "a", True), ["time is True"]),
        (("u", "a\ud800", 1), ["no Unicode", "item is"]),
    ],
)
def test_rows_that_are_no_events(row: tuple[Any, ...], words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [*ROWS[:1], row])
    with raises(DataError, path, "line 2", *words):
        read_log([path], SequenceConfig())


def test_logs_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", ROWS)
    with raises(ConfigError, "data.sequence.user=users", "Did you mean 'user'"):
        sequence_files(path, DataConfig(items=ItemKind.ids, sequence=SequenceConfig(user="users")))
    with raises(ConfigError, "data.sequence.time=at", "data.sequence.time=null"):
        sequence_files(path, DataConfig(items=ItemKind.ids, sequence=SequenceConfig(time="at")))
    with raises(ConfigError, "data.sequence.items"):
        sequence_files(path, DataConfig(items=ItemKind.pictures))
    with raises(ConfigError, "weights"):
        log_files(f"{path}@2")
    with raises(ConfigError, "https://host/log.csv"):
        log_files("https://host/log.csv")
    with raises(DataError, "no event"):
        read_log([write(tmp_path / "empty.csv", [])], SequenceConfig())


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("length", [2, 3, 7])
def test_windows_have_each_step_once(ahead: int, length: int) -> None:
    lengths = np.array([1, 2, 3, 4, 5, 7, 9, 30])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    windows = windows_of(starts, length, ahead)
    steps = [np.arange(a, b) for a, b in zip(windows.starts, windows.stops, strict=True)]
    want = [np.arange(a, b - ahead) for a, b in pairwise(starts.tolist())]
    alone = [of[:1] for of in want if ahead == 0 and len(of) % length == 1]  # one step with nothing to predict
    assert np.concatenate(steps).tolist() == np.setdiff1d(np.concatenate(want), np.concatenate([[], *alone])).tolist()
    sequence = np.searchsorted(starts, windows.starts, side="right")
    assert (sequence == np.searchsorted(starts, windows.stops - 1 + ahead, side="right")).all()
    assert windows.sizes.max() <= length and (windows.sizes + ahead >= 2).all()
    last = np.append(sequence[1:] != sequence[:-1], True)
    assert (
        windows.sizes[last] == np.minimum(lengths[sequence[last] - 1] - ahead, length)
    ).all()  # is as long as can be
    assert windows.firsts[-1] == windows.sizes.sum()


def test_a_val_between_training_and_the_evaluated_test_is_named(tmp_path: Path) -> None:
    for part in ("val", "test"):
        (tmp_path / f"{part}.jsonl").write_text('{"user": "u", "item": "i", "time": 1}\n')
    val, test = f"{tmp_path}/val.jsonl", f"{tmp_path}/test.jsonl"
    (line,) = events_left_out([test], ["train.jsonl"])
    assert f"data.sequence.earlier={val}" in line and line.endswith(f"val={val} for python -m eval")
    assert not [*events_left_out([val], []), *events_left_out([test], [os.path.relpath(val)])]
    (tmp_path / "val.jsonl").unlink()
    assert not [*events_left_out([test], [])]

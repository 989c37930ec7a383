"""`python -m data sequences`: what goes to which part, from logs, a corpus in order and judgements."""

from __future__ import annotations

import gzip
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.documents import ROOT, blocks
from helpers.messages import raises
from pyarrow import feather

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.build.sequences import run
from dyad.data.cli.main import VERBS, parse_verb
from dyad.data.log_weights import read_log_weights
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.text_files import CODECS
from dyad.train.cli.compose import compose_config

Parts = dict[str, list[tuple[str, str]]]  # part → user and item of each event
SEQUENCES = {f"u{n}": [f"i{(n + step) % 7}" for step in range(2 + n % 5)] for n in range(40)}


def build(source: Path, out: Path, *words: str) -> Parts:
    (verb,) = (verb for verb in VERBS if verb.name == "sequences")
    run(*parse_verb(verb, [str(source), f"out={out}", *words]))
    rows: dict[str, list[dict[str, Any]]] = {
        part: [json.loads(line) for line in (out / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "val", "test")
    }
    return {part: [(row["user"], row["item"]) for row in found] for part, found in rows.items()}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log whose rows are by time: the first event of every user, then the second …"""
    events = [(step, user, items[step]) for user, items in SEQUENCES.items() for step in range(len(items))]
    lines = [f"{user},{item},{time}" for time, (_, user, item) in enumerate(sorted(events, key=lambda e: e[0]))]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["who,what,when", *lines]))
    return path


KEYS = ("user=who", "item=what", "time=when")


def test_the_last_events_are_left_out(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = build(log, tmp_path / "the log", *KEYS)
    kept = {user: items for user, items in SEQUENCES.items() if len(items) >= 3}
    assert parts["test"] == [(user, items[-1]) for user, items in kept.items()]
    assert parts["val"] == [(user, items[-2]) for user, items in kept.items()]
    assert parts["train"] == [(user, item) for user, items in kept.items() for item in items[:-2]]
    weights = read_log_weights(str(tmp_path / "the log/log_q.safetensors"))
    items = [item for _, item in parts["train"]]
    for item in {*items}:
        share = float(weights.of(np.array([content_key(item.encode())]))[0])
        assert share == pytest.approx(math.log(items.count(item) / len(items)), abs=1e-12)
    assert len(weights.keys_n) == len({*items})
    said = capsys.readouterr().out
    assert "8 users had fewer" in said and f'data.train="{tmp_path}/the log/train.jsonl"' in said


def test_the_printed_command_is_that_of_the_page(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(log, tmp_path / "log", *KEYS)
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    (of_page,) = (
        shlex.split(command)
        for block in blocks(ROOT / "docs/sequences.md")
        for command in block.commands()
        if "data.train=log/train.jsonl" in command
    )
    paths = {f'data.{part}="{tmp_path}/log/{part}.jsonl"': f"data.{part}=log/{part}.jsonl" for part in ("train", "val")}
    assert {paths.get(word, word) for word in printed} == {*of_page}
    compose_config(printed[3:])


def test_a_time_divides_all_events(log: Path, tmp_path: Path) -> None:
    parts = build(log, tmp_path / "out", *KEYS, "split=time", "val=0.2", "test=0.1")
    total = sum(map(len, parts.values()))
    assert abs(len(parts["val"]) / total - 0.2) < 0.02 and abs(len(parts["test"]) / total - 0.1) < 0.02
    times = [
        [json.loads(line)["time"] for line in (tmp_path / f"out/{part}.jsonl").read_text().splitlines()]
        for part in ("train", "val", "test")
    ]
    assert max(times[0]) < min(times[1]) and max(times[1]) < min(times[2])


def test_whole_users_go_to_one_part(log: Path, tmp_path: Path) -> None:
    parts = build(log, tmp_path / "out", *KEYS, "split=user", "val=0.25", "test=0.25")
    users = [{user for user, _ in parts[part]} for part in ("train", "val", "test")]
    assert not (users[0] & users[1] or users[0] & users[2] or users[1] & users[2]) and all(users)
    assert build(log, tmp_path / "again", *KEYS, "split=user", "val=0.25", "test=0.25") == parts


def test_a_corpus_in_order_and_judgements(tmp_path: Path) -> None:
    ids = [f"book.{chapter}.{verse}" for chapter in range(3) for verse in range(4)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": i, "text": f"verse {i}"}) + "\n" for i in ids))
    parts = build(tmp_path / "corpus.jsonl", tmp_path / "chapters", r"user_of=(.*)\.\d+")
    assert parts["train"] == [(f"book.{c}", f"book.{c}.{v}") for c in range(3) for v in range(2)]
    (tmp_path / "queries.jsonl").write_text("")
    (tmp_path / "qrels").mkdir()
    rows = [("a.1", "book.0.0", 1), ("a.2", "book.2.1", 2), ("a.2", "book.1.1", 0), ("a.3", "book.0.3", 1)]
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{p}\t{grade}" for q, p, grade in rows)]
    (tmp_path / "qrels/train.tsv").write_text("\n".join(lines) + "\n")
    parts = build(tmp_path, tmp_path / "cited", r"user_of=(.*)\.\d+")
    assert [event for part in ("train", "val", "test") for event in parts[part]] == [
        ("a", "book.0.0"),
        ("a", "book.2.1"),
        ("a", "book.0.3"),
    ]


def test_an_event_that_a_row_repeats_is_in_one_part(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = build(log, tmp_path / "once", *KEYS)
    names, *rows = log.read_text().splitlines()
    log.write_text("\n".join([names, *rows, *reversed(rows)]))
    capsys.readouterr()
    assert build(log, tmp_path / "twice", *KEYS) == parts
    assert f"{len(rows)} rows repeat an event" in capsys.readouterr().out


def test_without_times_items_in_a_row_are_no_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plays.csv").write_text("user,item\n" + "u,song\n" * 4)
    parts = build(tmp_path / "plays.csv", tmp_path / "out", "time=null")
    assert parts == {"train": [("u", "song")] * 2, "val": [("u", "song")], "test": [("u", "song")]}
    said = capsys.readouterr().out
    assert "repeat" not in said and "warning" not in said


def test_equal_times_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days = ["2024-05-01", "2024-05-01", "2024-05-01", "2024-05-02", "2024-05-03"]
    (tmp_path / "days.csv").write_text("user,item,time\n" + "".join(f"u,i{n},{day}\n" for n, day in enumerate(days)))
    build(tmp_path / "days.csv", tmp_path / "out")
    assert "warning: 50% of neighbouring events" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("ratings.dat", "{}::{}::5::{}", ["columns=[user,item,rating,time]"]),  # MovieLens 1M
        ("u.data", "{}\t{}\t5\t{}", ["columns=[user,item,rating,time]"]),  # MovieLens 100K
        ("log.csv", "{},{},{}", ["columns=[user,item,time]"]),
        ("beauty.txt", "{} {}", ["columns=[user,item]", "time=null"]),  # SASRec
        ("ml.inter", "{}\t{}\t{}", ["user=user_id:token", "item=item_id:token", "time=timestamp:float"]),  # RecBole
    ],
)
def test_files_of_other_tools(file: str, line: str, words: list[str], tmp_path: Path) -> None:
    events = [(f"{user}", f"{10 * user + step}", step) for user in range(3) for step in range(4)]
    names = ["user_id:token\titem_id:token\ttimestamp:float"] if file.endswith(".inter") else []
    (tmp_path / file).write_text("".join(f"{each}\n" for each in [*names, *(line.format(*e) for e in events)]))
    parts = build(tmp_path / file, tmp_path / "out", *words)
    assert [len(parts[part]) for part in ("train", "val", "test")] == [6, 3, 3]
    assert parts["test"] == [("0", "3"), ("1", "13"), ("2", "23")]


@pytest.mark.parametrize("suffix", CODECS)
def test_compressed_logs(suffix: str, log: Path, tmp_path: Path) -> None:
    parts = build(log, tmp_path / "plain", *KEYS)
    for file in (f"log.csv{suffix}", f"log.dat{suffix}"):
        with pa.CompressedOutputStream(str(tmp_path / file), CODECS[suffix]) as packed:
            packed.write(log.read_bytes())
        assert build(tmp_path / file, tmp_path / f"of {file}", *KEYS) == parts
    whole = (tmp_path / file).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no" + whole):
        (tmp_path / file).write_bytes(damaged)
        with raises(DataError, tmp_path / file, "unpacked"):
            build(tmp_path / file, tmp_path / "damaged", *KEYS)


def test_of_a_folder_only_tables_are_logs(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(log, tmp_path / "out", *KEYS)
    (tmp_path / "logs").mkdir()
    log.rename(tmp_path / "logs/log.csv")
    (tmp_path / "logs/README.md").write_text("A log.")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build(Path("~/logs"), tmp_path / "of folder", *KEYS) == parts


def test_packed_logs_of_a_folder_are_read_once(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = build(log, tmp_path / "out", *KEYS)
    (tmp_path / "logs").mkdir()
    names, *rows = log.read_text().splitlines()
    for number, own in enumerate((rows[:50], rows[50:])):
        with gzip.open(tmp_path / f"logs/{number}.csv.gz", "wt") as file:
            file.write("\n".join([names, *own]))
    assert build(tmp_path / "logs", tmp_path / "packed", *KEYS) == parts
    (tmp_path / "logs/0.csv").write_text("\n".join([names, *rows[:50]]))  # as gunzip -k leaves it
    capsys.readouterr()
    assert build(tmp_path / "logs", tmp_path / "both", *KEYS) == parts
    said = capsys.readouterr()
    assert "repeat" not in said.out and "not read" not in said.out + said.err


def test_columns_of_a_file_that_names_its_own_are_refused(log: Path, tmp_path: Path) -> None:
    build(log, tmp_path / "out", *KEYS)
    table = pa.Table.from_pylist([json.loads(line) for line in (tmp_path / "out/train.jsonl").read_text().splitlines()])
    pq.write_table(table, tmp_path / "log.parquet")
    feather.write_feather(table, tmp_path / "log.arrow")
    for file in (tmp_path / "out/train.jsonl", tmp_path / "log.parquet", tmp_path / "log.arrow"):
        with raises(ConfigError, "columns=[user,item,time]", file):
            build(file, tmp_path / "again", "columns=[user,item,time]")


def test_names_with_blanks_between_are_no_columns(log: Path, tmp_path: Path) -> None:
    log.write_text(log.read_text().replace(",", " "))
    with raises(ConfigError, "tab , ; | ::") as raised:
        build(log, tmp_path / "out", *KEYS)
    assert "Set user=COLUMN" not in str(raised.value)
    log.write_text("u1  i1  1\n")
    with raises(ConfigError, "has not 3 cells", "tab , ; | ::, and one blank"):
        build(log, tmp_path / "out", "columns=[user,item,time]")


def test_events_that_look_like_triples_of_ids(tmp_path: Path) -> None:
    (tmp_path / "n.tsv").write_text("1\t7\t100\n")
    with raises(ConfigError, tmp_path / "n.tsv", "queries.train.tsv", "data sequences FILE columns=[user,item,time]"):
        build(tmp_path / "n.tsv", tmp_path / "out")


def test_an_archive_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "ml-100k.zip").write_bytes(b"PK\3\4")
    with raises(ConfigError, "INPUT=", "ml-100k.zip", "archive"):
        build(tmp_path / "ml-100k.zip", tmp_path / "out")


def test_users_with_two_events_are_kept_if_asked(log: Path, tmp_path: Path) -> None:
    for split in ("time", "user"):
        parts = build(log, tmp_path / split, *KEYS, f"split={split}", "least=2")
        assert {user for found in parts.values() for user, _ in found} == {*SEQUENCES}


def test_blanks_around_ids_are_said(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(log, tmp_path / "out", *KEYS)
    assert "have a blank" not in capsys.readouterr().out
    log.write_text(log.read_text().replace("u1,", "u1 ,").replace(",i3,", ", i3,"))
    build(log, tmp_path / "blanks", *KEYS)
    assert "2 ids of users or items have a blank" in capsys.readouterr().out


def test_bad_rows_are_left_out_and_counted(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = build(log, tmp_path / "sound", *KEYS)
    names, *rows = log.read_text().splitlines()
    log.write_text("\n".join([names, ",i1,7", *rows, "u1,i1,", "u1,,3"]))
    with raises(DataError, log, "row 1", "who", "on_error=skip"):
        build(log, tmp_path / "out", *KEYS)
    capsys.readouterr()
    assert build(log, tmp_path / "out", *KEYS, "on_error=skip") == parts
    said = capsys.readouterr()
    assert f"skipped 3 of {len(rows) + 3} rows: 2 no id, 1 no time" in said.out and "row 1 (line 2)" in said.err


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        (["user_of=("], ConfigError, ["user_of=("]),
        (["user_of=.*"], ConfigError, ["one group"]),
        (["val=0.6", "test=0.4"], ConfigError, ["val=0.6 test=0.4"]),
        (["least=99"], DataError, ["least=99"]),
        (["split=time", "val=0.0001"], ConfigError, ["split=time", "val"]),
        (["item=thing"], ConfigError, ["item=thing", "Set item=COLUMN", "columns=["]),
        (["least=2"], ConfigError, ["split=last least=2", "least=3"]),
        (["columns=[who,when]"], ConfigError, ["columns=[who,when]", "log.csv", "2 cells", "'who', 'what', 'when'"]),
        (["columns=[who,what,who]"], DataError, ["'who'"]),
    ],
)
def test_what_cannot_work_writes_nothing(
    words: list[str], error: type[Exception], named: list[str], log: Path, tmp_path: Path
) -> None:
    own = [key for key in KEYS if key.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    with raises(error, *named):
        build(log, tmp_path / "out", *own, *words)
    assert not (tmp_path / "out").exists()


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    for name, error in (("a.csv", DataError), ("a.jsonl", ConfigError)):
        (tmp_path / name).touch()
        with raises(error, tmp_path / name, "no rows"):
            build(tmp_path / name, tmp_path / "out")

"""Corpora by position and id, and the text that is rendered of a passage."""

from __future__ import annotations

import csv
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.messages import raises
from helpers.rows import corpus_row, write_beir, write_lines
from helpers.shards import overwrite, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import PassageConfig, Title
from dyad.data.question_passage.corpus import Corpus, CorpusPassages, open_corpus
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.shards.content_keys import content_key, hash_ids
from dyad.data.shards.rows import _header, open_rows


def opened(*paths: Path) -> Corpus:
    return open_corpus([str(path) for path in paths], "corpus")


def write_table(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["id", "text", "title"], *rows])
    return path


@pytest.mark.parametrize(
    ("title", "passage", "rendered"),
    [
        (Title.join, Passage("text", "Title"), ("p: Title text", None)),
        (Title.join, Passage("text"), ("p: text", None)),
        (Title.pair, Passage("text", "Title"), ("p: Title", "text")),
        (Title.pair, Passage("text"), ("p: ", "text")),
        (Title.drop, Passage("text", "Title"), ("p: text", None)),
    ],
)
def test_rendering(title: Title, passage: Passage, rendered: tuple[str, str | None]) -> None:
    assert passage.rendered(PassageConfig(prefix="p: ", title=title)) == rendered


def test_keys_are_of_the_content() -> None:
    assert Passage("b", "a", "1").key == Passage("b", "a").key == content_key(b"a\nb")
    assert Passage("a b").key != Passage("b", "a").key
    assert Question("1", "q").key == Question("2", "q").key == content_key(b"q")


def test_passages_by_position_and_id(tmp_path: Path) -> None:
    corpus = opened(write_lines(tmp_path / "a.jsonl", map(corpus_row, range(100))))
    assert len(corpus) == 100
    assert corpus[7] == Passage("text 7", "title 7", "d7") and corpus[8].title == ""
    assert corpus.ids(98, 200) == ["d98", "d99"]
    assert [corpus.positions([f"d{i}"])[0] for i in range(100)] == list(range(100))
    assert corpus.positions(["d5", "d100", "", "d0"]).tolist() == [5, -1, -1, 0]
    assert corpus.positions([]).tolist() == []
    assert corpus.keys.tolist() == [passage.key for passage in corpus]
    assert corpus.lengths[:2].tolist() == [6, 13]
    chosen = CorpusPassages(corpus, np.array([3, 1]))
    assert [passage.id for passage in chosen] == ["d3", "d1"] and chosen.keys == [corpus[3].key, corpus[1].key]


def test_ids_that_share_half_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones share none; here all passages do, so that every comparison needs the second half."""

    def half(ids: list[str]) -> np.ndarray:
        found = hash_ids(ids).copy()
        found[0] %= 2
        return found

    monkeypatch.setattr("dyad.data.question_passage.corpus.hash_ids", half)
    corpus = opened(write_lines(tmp_path / "a.jsonl", map(corpus_row, range(40))))
    assert corpus.positions([f"d{i}" for i in range(50)]).tolist() == [*range(40), *[-1] * 10]


def test_several_files_are_one_corpus(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", map(corpus_row, range(5)))
    b = write_lines(tmp_path / "b.jsonl", map(corpus_row, range(5, 9)))
    table = write_table(tmp_path / "c.tsv", [["d9", "text 9", "title 9"]])
    corpus = opened(a, b, table)
    assert corpus.ids(0, 20) == [f"d{i}" for i in range(10)]
    assert corpus.fingerprint != opened(b, a, table).fingerprint
    assert opened(b, a, table).positions(["d0"])[0] == 4 and corpus.positions(["d0"])[0] == 0
    assert open_corpus(f"{tmp_path}/[ab].jsonl", "corpus").ids(3, 7) == ["d3", "d4", "d5", "d6"]


def test_names_of_fields_and_whole_numbers_as_ids(tmp_path: Path) -> None:
    rows = [
        {"docid": 7, "text": "a", "image": None},
        {"id": "8", "contents": "b", "title": None},
        {"psg_id": "9", "text": "", "title": "only a title"},
    ]
    corpus = opened(write_lines(tmp_path / "a.jsonl", rows))
    assert [corpus[i] for i in range(3)] == [
        Passage("a", "", "7"),
        Passage("b", "", "8"),
        Passage("", "only a title", "9"),
    ]


def test_a_table_as_dpr_writes_it(tmp_path: Path) -> None:
    """Quotes as csv writes them, line breaks inside a cell, and outer quotes of texts dropped as DPR does."""
    rows = [["1", "plain", "A"], ["2", 'he "said" so', '"B"'], ["3", "two\nlines", "C"], ["4", '"all quoted"', "D'E"]]
    path = write_table(tmp_path / "psgs.tsv", rows)
    corpus = opened(path)
    assert [(p.id, p.text, p.title) for p in corpus] == [(*row[:1], row[1].strip('"'), row[2]) for row in rows]
    assert corpus.rows.where(3) == f"{path}: line 6"
    assert corpus.rows.fields(3) == {"id": "4", "text": "all quoted", "title": "D'E"}


def test_a_table_whose_columns_changed_places(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.tsv", [["1", "x", "T"]])
    assert opened(path)[0] == Passage("x", "T", "1")
    path.write_text("title\ttext\tid\nT\tx\t1\n")
    assert opened(path)[0] == Passage("x", "T", "1")


def test_shards_hold_the_same_rows(tmp_path: Path) -> None:
    members = [(f"{i}.json", f'{{"_id": "d{i}", "text": "t{i}"}}'.encode()) for i in range(3)]
    corpus = opened(write_tar(tmp_path / "a.tar", members))
    assert [p.text for p in corpus] == ["t0", "t1", "t2"]
    with raises(DataError, "b.tar", "'0'"):
        opened(write_tar(tmp_path / "b.tar", [("0.txt", b"x")]))


def test_a_beir_folder_stands_for_its_corpus(tmp_path: Path) -> None:
    assert len(open_corpus(str(write_beir(tmp_path / "b")), "corpus")) == 20


def test_a_corpus_can_be_pickled(tmp_path: Path) -> None:
    corpus = opened(write_lines(tmp_path / "a.jsonl", map(corpus_row, range(1000))))
    data = pickle.dumps(corpus)
    assert len(data) < 3000
    copy = pickle.loads(data)
    assert copy[999] == corpus[999] and copy.positions(["d5"])[0] == 5 and np.array_equal(copy.keys, corpus.keys)


def test_the_second_opening_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", map(corpus_row, range(10)))
    first = opened(path)
    monkeypatch.setattr("dyad.data.question_passage.corpus._table", lambda rows: pytest.fail("read again"))
    assert np.array_equal(opened(path).keys, first.keys)
    monkeypatch.undo()
    write_lines(path, map(corpus_row, range(11)))
    os.utime(path, ns=(1, 1))
    assert opened(path).positions(["d10"])[0] == 10
    assert len(list((tmp_path / ".index").glob("*.passages-*.npy"))) == 1, "the array of the earlier state stayed"


def test_a_touched_table_is_the_same_one_until_its_columns_are_others(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("id\ttext\ttitle\n1\ta\tb\n")
    touched, changed = open_rows([str(path)]), open_rows([str(path)])
    os.utime(path, ns=(1, 1))
    assert touched.fields(0) == {"id": "1", "text": "a", "title": "b"}
    _header.cache_clear()  # as in another process
    path.write_text("id\ttitle\ttext\n1\ta\tb\n")
    with raises(DataError):
        changed.fields(0)


def test_a_table_of_ids_that_came_with_the_data_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could give each id the text of another."""
    (tmp_path / "a").mkdir()
    opened(write_lines(tmp_path / "a" / "a.jsonl", map(corpus_row, range(10))))
    (table,) = (tmp_path / "a" / ".index").glob("*.passages-*.npy")
    np.save(table, np.zeros_like(np.load(table)))
    assert opened(tmp_path / "a" / "a.jsonl").positions(["d3"])[0] < 0  # of our own making: believed
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert opened(tmp_path / "b" / "a.jsonl").positions(["d3"])[0] == 3
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    monkeypatch.setattr(
        "dyad.data.question_passage.corpus._table", lambda rows: pytest.fail("a copy of our own was read again")
    )
    assert opened(tmp_path / "c" / "a.jsonl").positions(["d3"])[0] == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user"))
    with pytest.raises(pytest.fail.Exception):
        opened(tmp_path / "c" / "a.jsonl")


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"_id": "1", "text": "a"}', '{"_id": "1", "text": "b"}'], ("line 2", "'1'", "line 1")),
        (['{"_id": 1, "text": "a"}', '{"_id": "1", "text": "b"}'], ("line 2", "'1'")),
        (['{"_id": "1", "text": "a"}', '{"text": "b"}'], ("line 2",)),
        (['{"_id": "1"}'], ("line 1", "_id")),
        (['{"_id": "1", "text": 3}'], ("line 1", "text", "3")),
        (['{"_id": ["1"], "text": "a"}'], ("line 1", "_id", "['1']")),
        (['{"_id": true, "text": "a"}'], ("line 1", "_id", "True")),
        (['{"_id": "", "text": "a"}'], ("line 1", "_id", "''")),
        (['{"_id": "1", "text": "a\\ud800"}'], ("line 1", "text")),
        (['{"_id": "1", "text": "a", "title": ["b"]}'], ("line 1", "title", "['b']")),
        (['{"_id": "1", "text": "a"}', "{"], ("line 2",)),
    ],
)
def test_rows_that_are_no_passages(tmp_path: Path, lines: list[str], named: tuple[str, ...]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with raises(DataError, "a.jsonl", *named):
        opened(path)


def test_what_is_no_corpus(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [corpus_row(1)])
    with raises(ConfigError, "corpus=", "@2"):
        open_corpus(f"{path}@2", "corpus")
    with raises(ConfigError, "corpus=", "b.jsonl", "a.jsonl"):
        open_corpus(str(tmp_path / "b.jsonl"), "corpus")
    (tmp_path / "c.jsonl.gz").touch()
    with raises(ConfigError, "c.jsonl.gz"):
        open_corpus(str(tmp_path / "c.jsonl.gz"), "corpus")


def test_a_damaged_line_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", map(corpus_row, range(10)))
    stamp = path.stat().st_mtime_ns
    corpus = opened(path)
    overwrite(path, path.read_bytes().index(b"text 4"), b"TEXT")
    os.utime(path, ns=(stamp, stamp))
    assert corpus[3].text == "text 3"
    with raises(DataError, "a.jsonl", "'5'", "CRC32"):
        corpus[4]


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", map(corpus_row, range(10)))
    opened(path)
    (table,) = (tmp_path / ".index").glob("*.passages-*.npy")
    os.truncate(table, 150)
    with raises(DataError, "a.jsonl"):
        opened(path)
    np.save(table, np.zeros((5, 10)))
    with raises(DataError, "float64"):
        opened(path)


BOUNDED = """
import sys, time
from dyad.data.question_passage.corpus import open_corpus

def peak():  # of this process alone: getrusage counts the one that started it, too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

before = peak()
corpus = open_corpus(sys.argv[1], "corpus")
assert corpus.positions(["d70000"])[0] == 70000 and corpus[12345].id == "d12345"
print(len(corpus), peak() - before)
"""


@pytest.mark.linux
@pytest.mark.parametrize("suffix", ["jsonl", "json", "tsv"])
def test_memory_is_bounded(tmp_path: Path, suffix: str) -> None:
    """50 MB of passages are opened with less than 32 MB more than before; what is held are columns of numbers."""
    path, filler = tmp_path / f"a.{suffix}", "words and more words " * 30
    with path.open("w") as file:
        file.write({"json": "[", "jsonl": "", "tsv": "id\ttext\ttitle\n"}[suffix])
        for i in range(75_000):
            line = f"d{i}\t{filler}\tt" if suffix == "tsv" else f'{{"_id": "d{i}", "text": "{filler}"}}'
            file.write((",\n" if suffix == "json" and i else "") + line + ("\n" if suffix != "json" else ""))
        file.write("]" if suffix == "json" else "")
    assert path.stat().st_size > 45e6
    run = subprocess.run([sys.executable, "-c", BOUNDED, path], capture_output=True, text=True, check=True)
    rows, megabytes = map(float, run.stdout.split())
    path.unlink()
    assert rows == 75_000 and megabytes < 32, run.stdout


def test_arrays_go_to_the_cache_where_the_folder_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_lines(tmp_path / "data" / "a.jsonl", map(corpus_row, range(3)))
    (path.parent / ".index").touch()
    assert opened(path).positions(["d2"])[0] == 2
    assert len(list((tmp_path / "cache").rglob("a.jsonl.passages-*.npy"))) == 1
    monkeypatch.setattr("dyad.data.question_passage.corpus._table", lambda rows: pytest.fail("read again"))
    assert opened(path).positions(["d2"])[0] == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raises(DataError, "a.jsonl", "XDG_CACHE_HOME"):
        opened(path)


def test_an_index_that_cannot_be_asked_for(tmp_path: Path) -> None:
    """As in a folder of another user; here the name of the array is too long, which stops root, too."""
    path = write_lines(tmp_path / f"{'a' * 225}.jsonl", map(corpus_row, range(3)))
    with raises(DataError, path, "XDG_CACHE_HOME"):
        opened(path)


def test_a_table_of_no_passages_is_named_and_not_its_shard(tmp_path: Path) -> None:
    for head in ("anchor,positive", "text,url"):
        (tmp_path / "pairs.csv").write_text(f"{head}\na,b\n")
        with raises(DataError, tmp_path / "pairs.csv", "row 1", head.replace(",", ", ")) as caught:
            open_corpus(str(tmp_path / "pairs.csv"), "items")
        assert ".jsonl" not in str(caught.value) and "pack" not in str(caught.value)

"""Every format gives the same neutral rows; what is wrong with a row is said with its line before training starts."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import raises
from helpers.rows import Fields, corpus_row, dpr_row, write_beir, write_lines
from helpers.shards import overwrite, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import (
    QuestionRow,
    QuestionRows,
    named_files,
    open_questions,
)
from dyad.data.shards.content_keys import content_key, hash_ids, key_name


def opened(
    value: Path | str | list[str], corpus: Path | None = None, split: str = "train", **passage: Any
) -> QuestionRows:
    config = DataConfig(
        question=QuestionConfig(split=split),
        passage=PassageConfig(corpus=str(corpus) if corpus else None, **passage),
    )
    return open_questions(str(value), config)


def plain(row: QuestionRow) -> tuple[Question, list[Passage], list[Passage], list[Passage]]:
    return row.question, list(row.positives), list(row.negatives), list(row.hard_negatives)


def name_of(question: str) -> str:
    """The id of a question whose row gives none."""
    return key_name(content_key(question.encode()))


DPR_ROWS = [dpr_row(i, hard=i) for i in range(4)]
DPR_READ = [
    (
        Question(name_of(f"what's {i}"), f"what's {i}", (f"answer {i}",)),
        [Passage(f"right {i} 0", f"P{i}")],
        [Passage(f"other {i}", "N", "7")],
        [Passage(f"hard {i} {j}", "H", f"h{j}") for j in range(i)],
    )
    for i in range(4)
]


ARRAYS: dict[str, Callable[[Any], str]] = {
    "compact": lambda rows: json.dumps(rows, ensure_ascii=False, separators=(",", ":")),
    "indented": lambda rows: json.dumps(rows, indent=4),
    "spacious": lambda rows: "\r\n [ \t" + " ,\n ".join(json.dumps(row) for row in rows) + " \n]\n\n",
    "lines by another name": lambda rows: "\n".join(map(json.dumps, rows)),
}


@pytest.mark.parametrize("style", ARRAYS)
def test_dpr_json(tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in small pieces, too, so that rows and characters of several bytes lie across their borders."""
    path = tmp_path / "train.json"
    path.write_text(ARRAYS[style](DPR_ROWS), encoding="utf-8", newline="")
    for piece in (1 << 20, 7, 64):
        monkeypatch.setattr("dyad.data.shards.scan_rows.PIECE", piece)
        for index in (tmp_path / ".index").glob("*"):
            index.unlink()
        questions = opened(path)
        assert [plain(questions.row(i)) for i in range(4)] == DPR_READ


def test_dpr_lines_and_shards(tmp_path: Path) -> None:
    lines = opened(write_lines(tmp_path / "train.jsonl", DPR_ROWS))
    assert [plain(lines.row(i)) for i in range(4)] == DPR_READ
    members = [(f"{i + 1}.json", json.dumps(row).encode()) for i, row in enumerate(DPR_ROWS)]
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "a.tar", members[:2])
    write_tar(tmp_path / "shards" / "b.tar", members[2:])
    shards = opened(tmp_path / "shards")
    assert [plain(shards.row(i)) for i in range(4)] == DPR_READ


def test_questions_without_id_in_files_of_one_name(tmp_path: Path) -> None:
    """They are told apart, in mining and evaluation too; and equal ones are one question."""
    files = [write_lines(tmp_path / name / "train.jsonl", [dpr_row(i), dpr_row(5)]) for i, name in enumerate("ab")]
    questions = opened("::".join(map(str, files)))
    assert [questions.question(i).id for i in range(4)] == [name_of(f"what's {i}") for i in (0, 5, 1, 5)]
    assert np.array_equal(questions.id_hashes, hash_ids(questions.question(i).id for i in range(4)))


def test_answers_ids_and_missing_lists(tmp_path: Path) -> None:
    row = {"query_id": 12, "question": "q", "positive_ctxs": [{"text": "t", "title": None}], "hard_negative_ctxs": None}
    questions = opened(write_lines(tmp_path / "a.jsonl", [row]))
    assert plain(questions.row(0)) == (Question("12", "q"), [Passage("t")], [], [])


TEVATRON = {
    "query_id": "5",
    "query": "it’s",
    "answers": ["a"],
    "positive_passages": [{"docid": "1", "title": "T", "text": "right"}],
    "negative_passages": [{"docid": "2", "title": "", "text": "wrong"}],
}
TEVATRON_READ = (Question("5", "it’s", ("a",)), [Passage("right", "T", "1")], [], [Passage("wrong", "", "2")])
FLAG = {"query": "q", "pos": ["right", "also"], "neg": ["wrong"], "pos_scores": [1.0], "prompt": "p"}
FLAG_READ = (Question(name_of("q"), "q"), [Passage("right"), Passage("also")], [], [Passage("wrong")])


@pytest.mark.parametrize(("fields", "expected"), [(TEVATRON, TEVATRON_READ), (FLAG, FLAG_READ)])
def test_other_inline_formats(tmp_path: Path, fields: Fields, expected: Any) -> None:
    questions = opened(write_lines(tmp_path / "a.jsonl", [fields]))
    assert plain(questions.row(0)) == expected


def with_ids(positive: list[Any], negative: list[Any], query: str = "q") -> Fields:
    return {
        "query_id": "1",
        "query_text": query,
        "query_image": None,
        "positive_document_ids": positive,
        "negative_document_ids": negative,
    }


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", map(corpus_row, range(9)))


def test_ids_are_looked_up_in_the_corpus(tmp_path: Path, corpus: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [with_ids(["d3", "d1"], ["d2"])])
    questions = opened(path, corpus)
    assert plain(questions.row(0)) == (
        Question("1", "q"),
        [Passage("text 3", "title 3", "d3"), Passage("text 1", "title 1", "d1")],
        [],
        [Passage("text 2", "", "d2")],
    )
    assert questions.row(0).positives.keys == [Passage("text 3", "title 3").key, Passage("text 1", "title 1").key]
    assert questions.corpus is not None and len(questions.corpus) == 9
    with raises(ConfigError, "a.jsonl", "line 1", "data.passage.corpus"):
        opened(path)


@pytest.mark.parametrize("name", ["candidates", "ctxs"])
def test_scored_candidates(tmp_path: Path, name: str) -> None:
    """The best pos_pool are right, the worst neg_pool of the others hard negatives; of equals the first is better."""
    scores = [0.5, 3, -1, 3, 0.25, 2]
    row = {"question": "q", name: [{"text": f"c{i}", "score": score} for i, score in enumerate(scores)]}
    path = write_lines(tmp_path / "a.jsonl", [row])

    def pools(**sizes: Any) -> list[list[str]]:
        question, right, negatives, hard = plain(opened(path, **sizes).row(0))
        assert question.text == "q" and negatives == []
        return [[p.text for p in right], [p.text for p in hard]]

    assert pools(pos_pool=2, neg_pool=3) == [["c1", "c3"], ["c0", "c4", "c2"]]
    assert pools(pos_pool=4, neg_pool=5) == [["c1", "c3", "c5", "c0"], ["c4", "c2"]]
    assert pools(pos_pool=9, neg_pool=1) == [["c1", "c3", "c5", "c0", "c4", "c2"], []]


# ---- BEIR ----------------------------------------------------------------------------------------------------------


def test_a_beir_folder(tmp_path: Path) -> None:
    """Its judged questions in the order of queries.jsonl; a passage that is judged 0 is a negative."""
    questions = opened(write_beir(tmp_path / "b"))
    assert len(questions) == 6 and questions.sizes == [6]
    assert plain(questions.row(5)) == (
        Question("q5", "what 5", group="t2"),
        [Passage("text 16", "", "d16"), Passage("text 17", "title 17", "d17")],
        [Passage("text 15", "title 15", "d15")],
        [],
    )
    assert questions.row(5).positives.keys == [Passage("text 16").key, Passage("text 17", "title 17").key]
    assert questions.lengths.tolist() == [6] * 6 and questions.corpus is not None
    assert np.array_equal(questions.id_hashes, hash_ids(f"q{i}" for i in range(6)))


def test_a_split_without_header_and_with_repetitions(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "b")
    (folder / "qrels" / "test.tsv").write_text("q7\td2\t1\r\nq1\td5\t2\nq7\td1\t1\nq7\td2\t2\nq3\td1\t-1\n")
    questions = opened(folder, split="test")
    assert [questions.question(i).id for i in range(2)] == ["q1", "q7"] and len(questions) == 2
    assert [p.id for p in questions.row(1).positives] == ["d1", "d2"] and not questions.row(1).negatives
    (folder / "qrels" / "none.tsv").write_text("query-id\tcorpus-id\tscore\n")
    assert len(opened(folder, split="none")) == 0


def test_another_corpus_for_a_beir_folder(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "b")
    rows = [corpus_row(i) | {"text": f"other {i}"} for i in range(30)]
    corpus = write_lines(tmp_path / "other.jsonl", rows)
    questions = opened(folder, corpus)
    assert questions.row(0).positives[0].text == "other 1"
    assert questions.fingerprint != opened(folder).fingerprint


def test_sources_are_joined_with_weights(tmp_path: Path) -> None:
    folder, lines = write_beir(tmp_path / "b"), write_lines(tmp_path / "a.jsonl", DPR_ROWS)
    questions = opened(f"{lines}@2::{folder}@0.5")
    assert questions.sizes == [4, 6] and questions.weights == [2, 0.5] and len(questions) == 10
    assert questions.question(4).id == "q0" and questions.question(3).text == "what's 3"
    assert questions.lengths.tolist() == [8] * 4 + [6] * 6 and questions.id_hashes.shape == (2, 10)
    assert questions.corpus is not None and len(questions.corpus) == 20
    assert questions.fingerprint != opened(f"{folder}::{lines}").fingerprint
    with pytest.raises(IndexError):
        questions.row(10)
    with pytest.raises(IndexError):
        questions.row(-1)
    two = opened(f"{folder}::{write_beir(tmp_path / 'c', passages=21)}")
    assert two.corpus is None, "which of the two is meant cannot be known"


def test_questions_can_be_pickled(tmp_path: Path) -> None:
    questions = opened(f"{write_beir(tmp_path / 'b')}::{write_lines(tmp_path / 'a.jsonl', DPR_ROWS)}")
    data = pickle.dumps(questions)
    assert len(data) < 8000
    copy = pickle.loads(data)
    assert [plain(copy.row(i)) for i in range(10)] == [plain(questions.row(i)) for i in range(10)]


# ---- what is wrong -------------------------------------------------------------------------------------------------


POSITIVE = {"text": "t"}
BAD_ROWS: list[tuple[Fields, str]] = [
    ({"query": "q", "pos": "right"}, "pos is 'right'"),
    ({"query": "q", "pos": ["a"], "neg": "b"}, "neg is 'b'"),
    ({"query": "q", "pos": ["a"], "neg": {"0": "b"}}, "neg is {'0': 'b'}"),
    ({"query": "q", "pos": ["a", 1]}, "pos[1] is 1"),
    ({"query": "q", "pos": ["  "]}, "pos[0]"),
    ({"query": " ", "pos": ["a"]}, "query is ' '"),
    ({"query": None, "pos": ["a"]}, "query is None"),
    ({"query": "q", "pos": []}, "pos"),
    ({"question": "q", "positive_ctxs": []}, "positive_ctxs"),
    ({"question": "q", "positive_ctxs": None}, "positive_ctxs"),
    ({"question": "q", "positive_ctxs": ["t"]}, "positive_ctxs[0] is 't'"),
    ({"question": "q", "positive_ctxs": [{"title": "t"}]}, "positive_ctxs[0]"),
    ({"question": "q", "positive_ctxs": [{"text": "", "title": " "}]}, "positive_ctxs[0]"),
    ({"question": "q", "positive_ctxs": [POSITIVE], "answers": "yes"}, "answers"),
    ({"question": "q", "positive_ctxs": [POSITIVE], "id": 1.5}, "1.5"),
    ({"question": "q\ud800", "positive_ctxs": [POSITIVE]}, "question"),
    ({"query": "q", "positive_passages": [], "query_id": "1"}, "positive_passages"),
    ({"question": "q", "ctxs": [{"text": "t"}]}, "ctxs[0] is None"),
    ({"question": "q", "ctxs": [{"text": "t", "score": float("nan")}]}, "ctxs[0] is nan"),
    ({"question": "q", "ctxs": [{"text": "t", "score": 10**400}]}, "ctxs[0]"),
    ({"question": "q", "ctxs": [{"text": "t", "score": 1, "has_answer": True}]}, ""),
    ({"question": "q", "ctxs": []}, "ctxs"),
    ({"q": "x", "passages": []}, "q, passages"),
    ({}, "none"),
    ({"\ud800\x1b": 1, **dict.fromkeys("abcdefghijklmnopqrstuvwxyz")}, r"'\ud800\x1b', a"),
    ({**FLAG, "metadata": {"topic": "\udc00"}}, "metadata.topic"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_ROWS)
def test_bad_rows_are_named_with_their_line(tmp_path: Path, fields: Fields, named: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [FLAG, FLAG, fields])
    command = f"python -m data pack {path} out=packed to=dpr on_error=skip"
    with raises(DataError, "a.jsonl", "line 3", named, command) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_fields_of_other_names_are_read_by_data_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"query": "q", "response": "r"}])
    with raises(DataError, "line 1", "query, response", "data.columns=[QUESTION,POSITIVE]") as caught:
        opened(path)
    assert "on_error" not in str(caught.value)
    rows = open_questions(str(path), DataConfig(columns=["query", "response"]))
    assert (rows.row(0).question.text, rows.row(0).positives[0].text) == ("q", "r")


def test_bad_rows_of_an_array_and_a_shard(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([FLAG, {"query": "q", "pos": []}], indent=1))
    with raises(DataError, "a.json", "row 2"):
        opened(tmp_path / "a.json")
    with raises(DataError, "a.tar", "'x'"):
        opened(write_tar(tmp_path / "a.tar", [("x.json", b'{"query": "q", "pos": []}')]))


@pytest.mark.parametrize(
    ("positive", "negative", "missing"), [(["d1", "d9"], [], "d9"), (["d1"], ["d9"], "d9"), (["d1"], [9, "d9"], "9")]
)
def test_an_id_that_is_not_in_the_corpus(
    tmp_path: Path, corpus: Path, positive: list, negative: list, missing: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [with_ids(["d1"], []), with_ids(positive, negative)])
    with raises(DataError, "a.jsonl", "line 2", f"'{missing}'", "corpus.jsonl"):
        opened(path, corpus)


def test_a_copy_of_judged_questions_and_their_corpus_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = opened(write_beir(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "a")
    monkeypatch.setattr("dyad.data.shards.index_cache.write_cached", lambda *_: pytest.fail("made again"))
    assert plain(opened(tmp_path / "elsewhere" / "a").row(3)) == plain(questions.row(3))


def test_rows_are_checked_again_for_another_corpus(tmp_path: Path, corpus: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [with_ids(["d1"], [])])
    assert len(opened(path, corpus)) == 1
    smaller = write_lines(tmp_path / "smaller.jsonl", [corpus_row(0)])
    with raises(DataError, "'d1'", "smaller.jsonl"):
        opened(path, smaller)
    write_lines(corpus, [corpus_row(0)])
    with raises(DataError, "'d1'", "corpus.jsonl"):
        opened(path, corpus)


@pytest.mark.parametrize(
    ("query", "named"), [({"text": " "}, "text is ' '"), ({"metadata": {"topic": "\ud800"}}, "metadata.topic")]
)
def test_bad_questions_of_a_beir_folder(tmp_path: Path, query: Fields, named: str) -> None:
    """Those that are asked; others are only looked up."""
    folder = write_beir(tmp_path / "b")
    queries = [{"_id": f"q{i}", "text": "what", **(query if i == 7 else {})} for i in range(8)]
    write_lines(folder / "queries.jsonl", queries)
    assert len(opened(folder)) == 6
    write_lines(folder / "queries.jsonl", [{**queries[0], **query}, *queries[1:]])
    with raises(DataError, "queries.jsonl", "line 1", named):
        opened(folder)


def test_what_is_not_there(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "b")
    with raises(ConfigError, "data.question.split=tran", "'train'"):
        opened(folder, split="tran")
    (folder / "collection.tsv").touch()
    (folder / "qidpidtriples.train.tsv").touch()
    with raises(ConfigError, "qrels.train.tsv", folder / "qidpidtriples.train.tsv", folder / "collection.tsv"):
        opened(folder)
    (folder / "collection.tsv").unlink()
    (folder / "queries.jsonl").rename(folder / "queries.jsonl.zst")
    with raises(ConfigError, "data.train=", "queries.jsonl", "queries.jsonl.zst"):
        opened(folder)
    with raises(ConfigError, "data.train=", "a.json.gz"):
        (tmp_path / "a.json.gz").touch()
        opened(tmp_path / "a.json.gz")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.jsonl.zst").touch()
    with raises(ConfigError, "a.jsonl.zst"):
        opened(tmp_path / "packed")
    lines = write_lines(tmp_path / "a.jsonl", [FLAG])
    with raises(ConfigError, "a.jsonl"):
        opened(f"{lines}::{lines}")
    with raises(ConfigError, "data.passage.corpus="):
        named_files(str(lines), DataConfig(passage=PassageConfig(corpus=str(tmp_path / "x.jsonl"))))
    assert named_files(str(lines), DataConfig()) == [str(lines)]


def test_a_damaged_line_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", DPR_ROWS)
    stamp = path.stat().st_mtime_ns
    questions = opened(path)
    overwrite(path, path.read_bytes().index(b"right 2"), b"wrong")
    os.utime(path, ns=(stamp, stamp))
    assert questions.question(1).text == "what's 1"
    with raises(DataError, "a.jsonl", "'3'", "CRC32"):
        questions.row(2)

"""Judgements as other tools write them; those of unknown ids are left out, and bad ones named with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.messages import raises
from helpers.rows import write_beir

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig
from dyad.data.question_passage.judgements import MAX_LINE, judgements
from dyad.data.question_passage.questions import QuestionRows, open_questions


def opened(folder: Path) -> QuestionRows:
    return open_questions(str(folder), DataConfig())


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"q0 d1 1", "'q0 d1 1'"),
        (b"q0\t0\t0\td1\t1", r"'q0\t0\t0\td1\t1'"),
        (b"q0\td1\tone", "'one'"),
        (b"q0\td1\t--1", "'--1'"),
        (b"q0\td1\t1.5", "'1.5'"),
        (b"q" * MAX_LINE, f"{MAX_LINE - 1} bytes"),
        (b"q0\td\xc3\xa9\xff\t1", "byte 6"),
    ],
)
def test_bad_judgements_are_named_with_their_line(tmp_path: Path, line: bytes, named: str) -> None:
    folder = write_beir(tmp_path / "b")
    with (folder / "qrels" / "train.tsv").open("ab") as file:
        file.write(line)
    with raises(DataError, "train.tsv", "line 20", named):
        opened(folder)


def test_a_judgement_is_no_header(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "b")
    (folder / "qrels" / "train.tsv").write_text("q0\td1\t1.5\n")
    with raises(DataError, "train.tsv", "line 1", "'1.5'"):
        opened(folder)


def test_judgements_of_unknown_ids_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ArguAna and NFCorpus have some. They are counted at each start, also when the array of the judged is stored."""
    folder = write_beir(tmp_path / "b")
    whole = opened(folder)
    assert capsys.readouterr().err == ""
    with (folder / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\td99\t1\nq99\td1\t1\nq98\td1\t0\n")
    for _ in range(2):
        rows = opened(folder)
        said = capsys.readouterr().err
        assert "1 of an unknown question and 1 of an unknown passage (an evaluation counts it as not found" in said
        assert [rows.question(i) for i in range(len(rows))] == [whole.question(i) for i in range(len(whole))]
        assert [rows.row(i).positives.keys for i in range(len(rows))] == [
            whole.row(i).positives.keys for i in range(len(whole))
        ]


def test_judgements_of_another_corpus_are_refused(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "b")
    (folder / "qrels" / "train.tsv").write_text("q0\td1\t1\nq0\tx1\t1\ny1\td1\t1\n")
    with raises(DataError, "train.tsv", "line 2", "2 of 3", "passage id 'x1'"):
        opened(folder)


FORMS = {
    "BEIR": "query-id\tcorpus-id\tscore\nq 1\td 1\t1\nq2\td2\t0\n",
    "BEIR without names": "q 1\td 1\t1\nq2\td2\t0\n",
    "whole numbers of pandas": "q 1\td 1\t1.0\nq2\td2\t0.0\n",
    "TREC with tabs": "q 1\t0\td 1\t1\nq2\t0\td2\t0\n",
    "blank lines and a mark": "\ufeff\nq 1\td 1\t1\n\nq2\td2\t0\n\n\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_judgements_as_other_tools_write_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / "test.tsv"
    path.write_text(FORMS[name])
    assert [found[1:] for found in judgements(str(path))] == [(("q 1", "d 1"), 1), (("q2", "d2"), 0)]


@pytest.mark.parametrize("text", ["q1 0 d1 1\nq2  0 d2 -1\n", "q1 d1 1\nq2   d2 -1 \n"], ids=["TREC", "three columns"])
def test_judgements_with_spaces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test.tsv"
    path.write_text(text)
    assert [found[1:] for found in judgements(str(path))] == [(("q1", "d1"), 1), (("q2", "d2"), -1)]


@pytest.mark.parametrize(
    "text",
    ["q1\td1\t1\nq2 d2 1\n", "q1 0 d1 1\nq2 d2 1\n", "q1\td1\t1\nq2\t\t1\n", "q1\td1\t1\nq2\t0\td2\t1\n"],
    ids=["spaces", "three", "no id", "four"],
)
def test_all_judgements_of_a_file_have_one_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test.tsv"
    path.write_text(text)
    with raises(DataError, path, "line 2"):
        list(judgements(str(path)))

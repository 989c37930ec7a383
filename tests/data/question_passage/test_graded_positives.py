"""The relevance of positives, data.relevance: every format that has one, what is refused, and what a batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.rows import Fields, tokenize, write_beir, write_lines

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, DrawnPositives, NegativesConfig, PassageConfig
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.questions import QuestionRow, open_questions

FLAG = {"query": "q", "pos": ["a", "b"], "neg": ["c"], "pos_scores": [0.5, 1], "neg_scores": [3.0]}
DPR = {"question": "q", "positive_ctxs": [{"text": "a", "weight": 0.25}, {"text": "b", "weight": "0.5"}]}
SCORED = {"question": "q", "ctxs": [{"text": t, "score": s} for t, s in (("a", -2), ("b", 0.3), ("c", 0.9), ("d", 0))]}
PAIR = {"sentence1": "x", "sentence2": "y", "score": 0.75}


def opened(path: Path, relevance: str | None, **config: Any) -> list[QuestionRow]:
    rows = open_questions(str(path), DataConfig(relevance=relevance, **config))
    return [rows.row(i) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("fields", "name", "want"),
    [
        (FLAG, "pos_scores", [0.5, 1.0]),
        (DPR, "weight", [0.25, 0.5]),
        (PAIR, "score", [0.75]),
        ({"anchor": "q", "positives": ["a", " ", "b"], "w": 1e-3}, "w", [1e-3, 1e-3]),
        ({"anchor": "q", "positives": ["a", "b"], "w": [0.5, 0.25]}, "w", [0.5, 0.25]),
        ({"query": "q", "positive_passages": [{"text": "a", "relevance": 1}]}, "relevance", [1.0]),
    ],
)
def test_every_format(tmp_path: Path, fields: Fields, name: str, want: list[float]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [fields])
    (row,) = opened(path, name)
    assert row.relevance == want and len(row.positives) == len(want)
    if "score" not in fields:
        assert opened(path, None)[0].relevance is None


def test_the_best_of_scored_candidates(tmp_path: Path) -> None:
    """Only what is a positive needs one: the scores of the others may be anything."""
    path = write_lines(tmp_path / "a.jsonl", [SCORED])
    (row,) = opened(path, "score", passage=PassageConfig(pos_pool=2, neg_pool=1))
    assert [p.text for p in row.positives] == ["c", "b"] and row.relevance == [0.9, 0.3]
    assert [p.text for p in row.hard_negatives] == ["a"]
    with raises(DataError, "a.jsonl", "line 1", "score of ctxs[3]", "0"):
        opened(path, "score", passage=PassageConfig(pos_pool=3))


@pytest.mark.parametrize(
    ("fields", "name", "named"),
    [
        ({**FLAG, "pos_scores": [0.5, 5.3]}, "pos_scores", ("pos_scores[1]", "5.3")),
        ({**FLAG, "pos_scores": [0.5, 0]}, "pos_scores", ("pos_scores[1]", "0")),
        ({**FLAG, "pos_scores": [0.5, True]}, "pos_scores", ("pos_scores[1]", "True")),
        ({**FLAG, "pos_scores": [0.5, 1e-60]}, "pos_scores", ("pos_scores[1]", "1e-60")),
        ({**FLAG, "pos_scores": [0.5]}, "pos_scores", ("pos_scores", "1", "2")),
        ({**FLAG, "pos_scores": "high"}, "pos_scores", ("pos_scores", "'high'")),
        ({**FLAG, "pos_scores": None}, "pos_scores", ("pos_scores", "None")),
        ({**PAIR, "score": float("nan")}, "score", ("nan",)),
    ],
)
def test_what_is_no_relevance_names_its_row(tmp_path: Path, fields: Fields, name: str, named: tuple[str, ...]) -> None:
    """Also where the rows were read before, without it."""
    path = write_lines(tmp_path / "a.jsonl", [fields])
    if "score" not in fields:
        opened(path, None)
    with raises(DataError, "a.jsonl", "line 1", f"relevance={name} on_error=skip", *named):
        opened(path, name)


@pytest.mark.parametrize(
    ("fields", "name", "named"),
    [
        (FLAG, "pos_score", ("'pos_score'", "'pos_scores'")),
        (DPR, "wight", ("positive_ctxs[0]", "'wight'", "'weight'")),
        ({**PAIR, "label": 1}, "score", ("label", "sentence1,sentence2")),
    ],
)
def test_fields_that_do_not_fit_are_named(tmp_path: Path, fields: Fields, name: str, named: tuple[str, ...]) -> None:
    """A later row may be left out; of the first row all others are like it."""
    good = {**FLAG, name: [0.5, 1.0]}
    with raises(DataError, "line 2", f"relevance={name} on_error=skip", *named):
        opened(write_lines(tmp_path / "b.jsonl", [good, fields]), name)
    with raises(DataError, "a.jsonl", "line 1", *named) as caught:
        opened(write_lines(tmp_path / "a.jsonl", [fields, good]), name)
    assert "on_error" not in str(caught.value)


@pytest.mark.parametrize("name", ["similarity", "similarity_score", "relatedness_score", "is_duplicate"])
def test_pairs_with_a_score_are_no_positives(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"sentence1": "x", "sentence2": "y", name: 1}])
    with raises(DataError, "line 1", name, f"data.teacher={name}", "data.columns=[sentence1,sentence2]"):
        opened(path, None)
    assert opened(path, name)[0].relevance == [1.0]


@pytest.mark.parametrize("label", ["entailment", "contradiction", "-"])
@pytest.mark.parametrize(
    ("first", "second", "name"),
    [("sentence1", "sentence2", "gold_label"), ("sentence1", "sentence2", "label"), ("premise", "hypothesis", "label")],
)
def test_names_of_classes_are_no_scores(tmp_path: Path, first: str, second: str, name: str, label: str) -> None:
    """Rows of SNLI and MNLI: of contradictions the texts do not belong together."""
    path = write_lines(tmp_path / "a.jsonl", [{first: "x", second: "y", name: label}])
    with raises(DataError, "line 1", name, repr(label), "class", f"data.columns=[{first},{second}]") as caught:
        opened(path, None)
    assert "data.teacher" not in str(caught.value) and "cosent" not in str(caught.value)


@pytest.mark.parametrize("value", [0, 1, 2, "2", True])
@pytest.mark.parametrize("name", ["score", "label"])
def test_small_whole_numbers_may_be_classes(tmp_path: Path, name: str, value: object) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"sentence1": "x", "sentence2": "y", name: value}])
    with raises(DataError, "line 1", name, repr(value), "class", "entailment", f"data.teacher={name}"):
        opened(path, None)


def test_a_score_that_columns_leave_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of contradictions that train as right pairs."""
    path = write_lines(tmp_path / "a.jsonl", [{"premise": "x", "hypothesis": "y", "label": "contradiction", "n": 1}])
    opened(path, None, columns=["premise", "hypothesis"])
    assert f"{path}: data.columns leaves out label: " in capsys.readouterr().err
    opened(write_lines(tmp_path / "b.jsonl", [{"premise": "x", "hypothesis": "y"}]), None)
    opened(write_lines(tmp_path / "c.jsonl", [{"a": "x", "b": "y", "n": 1}]), None, columns=["a", "b"])
    assert "leaves out" not in capsys.readouterr().err


def test_a_column_of_a_table(tmp_path: Path) -> None:
    """Texts of numbers; also beside columns that are named."""
    table = tmp_path / "pairs.csv"
    table.write_text("left,right,how much\nx,y,0.5\nu,v,1\n")
    for columns in (["left", "right"], ["left", "right", "right"]):
        assert [row.relevance for row in opened(table, "how much", columns=columns)] == [[0.5], [1.0]]
    (tmp_path / "named.csv").write_text("anchor,positive,score\nx,y,0.5\n")
    assert [row.relevance for row in opened(tmp_path / "named.csv", "score")] == [[0.5]]
    table.write_text("left,right,how much\nx,y,1\nu,v,2\n")
    with raises(DataError, "pairs.csv", "row 2", "how much", "'2'", "'relevance=how much'"):
        opened(table, "how much", columns=["left", "right"])


def test_grades_of_judgements_are_shares_of_the_largest_of_the_file(tmp_path: Path) -> None:
    """A pair that is judged twice has the larger grade; other sources beside it have a field."""
    folder = write_beir(tmp_path / "b")
    (folder / "qrels" / "train.tsv").write_text("q7\td2\t1\nq1\td5\t4\nq7\td1\t3\nq7\td2\t2\nq3\td1\t-1\nq3\td9\t0\n")
    rows = opened(folder, "pos_scores")
    assert [[p.id for p in row.positives] for row in rows] == [["d5"], ["d1", "d2"]]
    assert [row.relevance for row in rows] == [[1.0], [0.75, 0.5]]
    assert [row.relevance for row in opened(folder, None)] == [None, None]
    both = open_questions(f"{folder}::{write_lines(tmp_path / 'a.jsonl', [FLAG])}", DataConfig(relevance="pos_scores"))
    assert both.row(2).relevance == [0.5, 1.0]
    assert both.fingerprint == open_questions(f"{folder}::{tmp_path / 'a.jsonl'}", DataConfig()).fingerprint


def test_a_batch_has_those_of_the_own_and_of_further_positives(tmp_path: Path) -> None:
    """Whatever is drawn; a hard negative has 1, a batch without further positives none but its own."""
    weights = {"a": 0.5, "b": 1.0, "d": 0.25, "e": 0.125}
    rows = [FLAG, {"query": "r", "pos": ["d"], "neg": [], "pos_scores": [0.25]}]
    rows.append({"query": "s", "pos": ["e", "e", "b"], "neg": ["g"], "pos_scores": [0.125, 0.125, 1.0]})
    path = write_lines(tmp_path / "a.jsonl", rows)
    for positives in DrawnPositives:
        for relevance in ("pos_scores", None):
            passage = PassageConfig(positives=positives, length=8)
            config = DataConfig(passage=passage, negatives=NegativesConfig(per_row=1), relevance=relevance)
            data = QuestionPassage(open_questions(str(path), config), tokenize, config, 3, None)
            drawn = [data.drawn(0, i) for i in range(3)]
            batch = data.__getitems__([(0, i) for i in range(3)])
            assert batch.extra is not None
            if relevance is None:
                assert batch.relevance is batch.extra.relevance is None
                continue
            assert batch.relevance is not None and batch.relevance.dtype == torch.float32
            assert batch.relevance.tolist() == [weights[one.positive.text] for one in drawn]
            further = [weights[p.text] if is_positive else 1.0 for one in drawn for p, is_positive in one.extra]
            assert batch.extra.relevance is not None and batch.extra.relevance.tolist() == further
            assert sum(batch.extra.positive.tolist()) == (2 if positives is DrawnPositives.all else 0)

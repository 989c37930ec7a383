"""A teacher's scores of passages, data.teacher: every format, what is refused, what a batch holds, what pack keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.data_cli import ended
from helpers.messages import raises
from helpers.rows import Fields, tokenize, write_beir, write_lines

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, DrawnPositives, NegativesConfig, PassageConfig
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.questions import QuestionRow, open_questions

FLAG = {"query": "q", "pos": ["a", "b"], "neg": ["c"], "pos_scores": [7.5, 1], "neg_scores": [-3.0]}
DPR = {
    "question": "q",
    "positive_ctxs": [{"text": "a", "score": 7.5}],
    "negative_ctxs": [{"text": "b", "score": 1}],
    "hard_negative_ctxs": [{"text": "c", "score": "-3"}],
}
LISTED = {"anchor": "q", "positive": "a", "negative_1": "b", "negative_2": "c", "labels": [7.5, 1, -3]}
PAIRED = {"query": "q", "positive": "a", "negative": "c", "label": 10.5}


def opened(path: Path, teacher: str | None, **config: Any) -> list[QuestionRow]:
    rows = open_questions(str(path), DataConfig(teacher=teacher, **config))
    return [rows.row(i) for i in range(len(rows))]


def scores(row: QuestionRow) -> list[list[float | None]]:
    return [[passage.teacher for passage in each] for each in (row.positives, row.negatives, row.hard_negatives)]


@pytest.mark.parametrize(
    ("fields", "name", "want"),
    [
        (FLAG, "scores", [[7.5, 1.0], [], [-3.0]]),
        (DPR, "score", [[7.5], [1.0], [-3.0]]),
        (LISTED, "labels", [[7.5], [], [1.0, -3.0]]),
        (PAIRED, "label", [[10.5], [], [0.0]]),
        (
            {"query": "q", "positive_passages": [{"text": "a", "s": 2}], "negative_passages": [{"text": "b", "s": 1}]},
            "s",
            [[2.0], [], [1.0]],
        ),
        (
            {"question": "q", "ctxs": [{"text": t, "score": s} for t, s in (("a", -2), ("b", 0.5), ("c", 0.9))]},
            "score",
            [[0.9], [], [0.5, -2.0]],
        ),
    ],
    ids=str,
)
def test_every_format(tmp_path: Path, fields: Fields, name: str, want: list[list[float]]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [fields])
    pools = PassageConfig(pos_pool=1)
    (row,) = opened(path, name, passage=pools)
    assert scores(row) == want
    if not {"label", "labels"} & fields.keys():
        (untaught,) = opened(path, None, passage=pools)
        assert scores(untaught) == [[None] * len(each) for each in want]


@pytest.mark.parametrize(
    ("fields", "name", "named"),
    [
        ({**FLAG, "pos_scores": [1.0]}, "scores", ("pos_scores", "1", "2")),
        ({**FLAG, "neg_scores": [float("nan")]}, "scores", ("neg_scores[0]", "nan")),
        ({**FLAG, "neg_scores": [1e39]}, "scores", ("neg_scores[0]", "1e+39")),
        ({**FLAG, "neg_scores": [True]}, "scores", ("neg_scores[0]", "True")),
        ({**LISTED, "labels": [1, 2]}, "labels", ("labels", "2", "3")),
        ({**LISTED, "labels": 1.5}, "labels", ("labels", "1.5", "3")),
        ({**PAIRED, "label": "high"}, "label", ("label", "'high'")),
        ({"query_text": "q", "positive_document_ids": ["1"], "score": [1]}, "score", ("positive_document_ids",)),
    ],
    ids=str,
)
def test_what_is_no_score_names_its_row(tmp_path: Path, fields: Fields, name: str, named: tuple[str, ...]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [fields])
    with raises(DataError, "a.jsonl", "line 1", f"teacher={name} on_error=skip", *named):
        opened(path, name)


@pytest.mark.parametrize(
    ("fields", "name", "named"),
    [
        (FLAG, "score", ("'pos_score'", "data.teacher=scores")),
        (FLAG, "pos_scores", ("'pos_pos_scores'", "data.teacher=scores")),
        ({**DPR, "positive_ctxs": [{"text": "a"}]}, "score", ("positive_ctxs[0]", "'score'")),
    ],
    ids=str,
)
def test_a_first_row_without_the_field_is_not_left_out_by_pack(
    tmp_path: Path, fields: Fields, name: str, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows lack it then; a later row alone may be left out."""
    path = write_lines(tmp_path / "a.jsonl", [fields, fields])
    with raises(DataError, "a.jsonl", "line 1", *named) as caught:
        opened(path, name)
    checked = ended(monkeypatch, "check", path, f"teacher={name}")
    assert checked.returncode == 3 and named[1] in checked.stdout
    assert "on_error" not in str(caught.value) + checked.stderr


def test_sources_without_scores_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "data.teacher=score", "data.train", "b"):
        opened(write_beir(tmp_path / "b"), "score")
    with raises(ConfigError, "data.teacher=score", "data.negatives.lists=[hard_negatives]"):
        DataConfig(teacher="score", negatives=NegativesConfig(lists=["hard_negatives", "mined"]))  # pyright: ignore[reportArgumentType]


def test_a_column_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "triples.csv"
    table.write_text("left,right,wrong,margin\nx,y,z,0.5\nu,v,w,-1\n")
    found = opened(table, "margin", columns=["left", "right", "wrong"])
    assert [scores(row) for row in found] == [[[0.5], [], [0.0]], [[-1.0], [], [0.0]]]


def test_a_batch_has_the_scores_of_what_was_drawn(tmp_path: Path) -> None:
    of_text = {"a": 7.5, "b": 1.0, "c": -3.0, "d": 2.0, "e": 4.0, "f": 5.0, "g": 6.0}
    rows = [FLAG, {"query": "r", "pos": ["d"], "neg": [], "pos_scores": [2], "neg_scores": []}]
    rows.append({"query": "s", "pos": ["e"], "neg": ["f", "g"], "pos_scores": [4], "neg_scores": [5, 6]})
    path = write_lines(tmp_path / "a.jsonl", rows)
    for positives in DrawnPositives:
        passage = PassageConfig(positives=positives, length=8)
        config = DataConfig(passage=passage, negatives=NegativesConfig(per_row=2), teacher="scores")
        data = QuestionPassage(open_questions(str(path), config), tokenize, config, 3, None)
        drawn, batch = [data.drawn(0, i) for i in range(3)], data.__getitems__([(0, 0), (0, 1), (0, 2)])
        assert batch.teacher is not None and batch.extra is not None and batch.extra.teacher is not None
        assert batch.teacher.tolist() == [of_text[one.positive.text] for one in drawn]
        assert batch.extra.teacher.tolist() == [of_text[p.text] for one in drawn for p, _ in one.extra]
        alone = data.__getitems__([(0, 1)])  # a row without negatives
        assert alone.extra is not None and torch.equal(alone.extra.teacher, torch.empty(0))  # pyright: ignore[reportArgumentType]
    config = DataConfig(passage=PassageConfig(length=8), negatives=NegativesConfig(per_row=2))
    batch = QuestionPassage(open_questions(str(path), config), tokenize, config, 3, None).__getitems__([(0, 0)])
    assert batch.teacher is None and batch.extra is not None and batch.extra.teacher is None


def test_the_scores_of_another_field_are_named(tmp_path: Path) -> None:
    """As `data check` names them, when an experiment has set data.teacher."""
    path = write_lines(tmp_path / "a.jsonl", [{"sentence1": "a", "sentence2": "b", "label": 3.5}])
    with raises(DataError, "line 1", "'score'", "data.teacher=label"):
        opened(path, "score")
    (tmp_path / "a.csv").write_text("sentence1,sentence2,label\na,b,3.5\n")
    with raises(ConfigError, "a.csv", "'score'", "data.teacher=label") as caught:
        opened(tmp_path / "a.csv", "score")
    assert "columns" not in str(caught.value)


@pytest.mark.parametrize(("to", "file", "name"), [("dpr", "train.json", "teacher"), ("flag", "train.jsonl", "scores")])
def test_pack_keeps_them_and_says_how_to_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str, file: str, name: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [FLAG])
    packed = ended(monkeypatch, "pack", path, f"out={tmp_path / 'new'}", f"to={to}", "teacher=scores")
    assert packed.returncode == 0 and f'data.teacher="{name}"\' objective=distill_kl' in packed.stdout, packed
    (row,) = opened(tmp_path / "new" / file, name)
    assert scores(row) == [[7.5, 1.0], [], [-3.0]]
    both = ended(monkeypatch, "pack", path, f"out={tmp_path / 'two'}", "to=flag", "teacher=scores", "relevance=w")
    assert both.returncode == 2 and "pos_scores" in both.stderr and not (tmp_path / "two").exists(), both
    packed = ended(monkeypatch, "pack", path, f"out={tmp_path / 'ids'}", "to=tevatron", "teacher=scores")
    assert " 3 scores of a teacher" in packed.stdout, packed


def test_scores_of_pairs_are_advised_to_be_learned_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second column that may be a score is not in the way."""
    path = write_lines(tmp_path / "a.jsonl", [{"sentence1": "a", "sentence2": "b", "score": 3.5, "label": 1}])
    for command in (("check", path), ("pack", path, f"out={tmp_path / 'new'}", "to=dpr")):
        found = ended(monkeypatch, *command, "teacher=score")
        assert found.returncode == 0 and "experiment=sts" in found.stdout, found
        assert ("; objective=cosine_mse needs objective.divisor=3.5" in found.stdout) == (command[0] == "check")
    packed = ended(monkeypatch, "pack", path, f"out={tmp_path / 'beir'}", "to=beir", "teacher=score")
    assert "scores" in packed.stdout and "python -m train" not in packed.stdout, packed


@pytest.mark.parametrize(
    ("row", "objective", "scores"),
    [
        ({"label": -1.5}, "margin_mse", "min -1.5, median -1.5, 95th percentile 0, max 0"),
        ({"label": [7, 2]}, "distill_kl", "min 2, median 2, 95th percentile 7, max 7"),
    ],
)
def test_check_names_an_objective_that_learns_the_scores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: Fields, objective: str, scores: str
) -> None:
    """One number of a row with a negative is a difference; distill_kl needs a scale where the encoder gives cosines."""
    path = write_lines(tmp_path / "a.jsonl", [{"query": "q", "positive": "a", "negative": "b", **row}])
    printed = ended(monkeypatch, "check", path, "teacher=label").stdout
    assert f"objective={objective} " in printed and f"scores          {scores}\n" in printed, printed
    assert ("objective.temperature=0.05" in printed) == (objective == "distill_kl")


def test_check_counts_what_training_would_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [FLAG])
    assert "data.teacher=FIELD" in ended(monkeypatch, "check", path).stdout
    checked = ended(monkeypatch, "check", path, "teacher=scores")
    assert "neg_scores" not in checked.stdout and "objective=distill_kl" in checked.stdout, checked

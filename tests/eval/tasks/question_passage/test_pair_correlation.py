"""Pairs of texts with a score: which are read, and the correlations of an encoder against SciPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eval import LOCAL, Words
from helpers.messages import raises
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.question_passage.pair_correlation import PairCorrelation
from dyad.eval.tasks.question_passage.pair_sets import check_pairs, equal_sides, open_pairs

stats = import_module("scipy.stats")
PAIRS = [("a b", "b a", 4.5), ("a b", "c d", 0.0), ("e", "a b", 1.0), ("f g h", "f h", 4.5), ("i", "k l m", 0.5)]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(rows: list[Mapping[str, Any]], name: str = "pairs.jsonl") -> Path:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return tmp_path / name

    return written


def rows(score: str = "score", pairs: list[Any] = PAIRS) -> list[Mapping[str, Any]]:
    return [{"sentence1": x, "sentence2": y, score: value} for x, y, value in pairs]


def letters(texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
    return torch.tensor([([ord(c) - 96 for c in text.replace(" ", "")] * length)[:6] for text in texts])


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder({"x": Words(), "y": Words()}, LOCAL, block=2)


@pytest.mark.parametrize(
    ("teacher", "field"), [(None, "score"), (None, "label"), ("score", "score"), ("gold", "gold"), ("gold", "score")]
)
def test_the_score_is_in_the_named_field_or_a_usual_one(write: Write, teacher: str | None, field: str) -> None:
    found = open_pairs(str(write(rows(field))), DataConfig(teacher=teacher), "eval.suite: sts")
    texts = [question.text for question in found.questions], [passage.text for passage in found.passages]
    assert [*zip(*texts, found.score_P.tolist(), strict=True)] == PAIRS


def test_every_passage_of_a_row_is_a_pair(write: Write) -> None:
    row = {"query": "a", "pos": ["b", "c"], "neg": ["d"], "pos_score": [3, 2.5], "neg_score": [-1]}
    found = open_pairs(str(write([row])), DataConfig(), "eval.suite: sts")
    assert found.score_P.tolist() == [3.0, 2.5, -1.0] and {question.text for question in found.questions} == {"a"}


def test_both_texts_are_made_alike() -> None:
    data = DataConfig(question=QuestionConfig(length=16, prefix="query: "), passage=PassageConfig(length=128))
    question, passage = equal_sides(data)
    assert (question.length, question.prefix, passage.length, passage.prefix) == (128, "", 128, "")
    data.passage.prefix = "query: "
    assert [side.prefix for side in equal_sides(data)] == ["query: ", "query: "]


def test_pairs_of_a_topic_are_drawn_together(write: Write) -> None:
    """The topic is that of the row, though the text x stands in rows of several topics."""
    of = [{**row, "metadata": {"topic": f"t{i}"}} for i, row in enumerate(rows())]
    data = open_pairs(str(write(of)), DataConfig(), "eval.suite: sts")
    assert [question.group for question in data.questions] == [f"t{i}" for i in range(5)]
    texts, seen = (letters, QuestionConfig(), PassageConfig()), list[int]()

    class Counting(Words):
        def forward(self, tokens_bL: Tensor) -> Tensor:
            seen.append(len(tokens_bL))
            return super().forward(tokens_bL)

    torch.manual_seed(0)
    encode = Encoder({"x": Counting(), "y": Words()}, LOCAL, block=2)
    report = PairCorrelation("val", "", data, *texts).report(encode, examples=1)
    assert report.details["intervals"]["spearman"] and sum(seen) == 4  # the text "a b" is encoded once


def test_the_correlations_are_scipys(write: Write) -> None:
    data, encode = open_pairs(str(write(rows())), DataConfig(), "eval.suite: sts"), encoder()
    evaluator = PairCorrelation("val", "pairs.jsonl", data, letters, QuestionConfig(), PassageConfig())
    report = evaluator.report(encode, examples=1)
    with torch.no_grad():
        tokens = [letters([*texts], 9) for texts in ([x for x, *_ in PAIRS], [y for _, y, _ in PAIRS])]
        scores = torch.cosine_similarity(*(encode.towers[side](t) for side, t in zip("xy", tokens, strict=True)))
    given = [score for *_, score in PAIRS]
    assert report.metrics["spearman"] == pytest.approx(stats.spearmanr(scores, given)[0], abs=1e-12)
    assert report.metrics["pearson"] == pytest.approx(stats.pearsonr(scores, given)[0], abs=1e-6)
    assert report.metrics["num_pairs"] == 5 and set(evaluator.higher_is_better()) == {"spearman", "pearson"}
    low, high = report.details["intervals"]["spearman"]
    assert low < report.metrics["spearman"] < high


def test_an_untrained_model_is_compared_pair_by_pair(write: Write) -> None:
    data = open_pairs(str(write(rows())), DataConfig(), "eval.suite: sts")
    texts = letters, QuestionConfig(), PassageConfig()
    report = PairCorrelation("val", "", data, *texts, untrained=encoder).report(encoder(), examples=1)
    before = report.details["baselines"]["untrained"]
    assert before["metrics"]["spearman"] == report.metrics["spearman"]
    assert before["difference"]["pearson"] == {"value": 0.0, "interval": [0.0, 0.0]}


def test_pairs_that_cannot_be_ordered_are_refused(write: Write, tmp_path: Path) -> None:
    same = str(write(rows(pairs=[("a", "b", 1.0), ("c", "d", 1.0)])))
    empty, margin = str(write([], "empty.jsonl")), {"anchor": "a", "positive": "b", "negative": "c", "score": 2.5}
    of_margin = str(write([margin], "margin.jsonl"))
    bare = str(write([{"sentence1": "a", "sentence2": "b"}], "bare.jsonl"))
    infinite = str(write(rows(pairs=[("a", "b", "much")]), "much.jsonl"))
    for path, kind, named in (
        (same, DataError, (same, "2")),
        (empty, DataError, (empty, "0")),
        (of_margin, DataError, (f"{of_margin}: line 1", "score", "2.5")),
        (bare, DataError, (f"{bare}: line 1", "score")),
        (infinite, DataError, (f"{infinite}: line 1", "score", "much")),
    ):
        with raises(kind, *named):
            open_pairs(path, DataConfig(), "eval.suite: sts")
    with raises(ConfigError, "eval.suite: sts", str(tmp_path / "none.jsonl")):
        check_pairs(str(tmp_path / "none.jsonl"), DataConfig(), "eval.suite: sts")
    with raises(ConfigError, "data/samples/topics", "beir:data/samples/topics"):
        check_pairs("data/samples/topics", DataConfig(), "eval.suite: sts")

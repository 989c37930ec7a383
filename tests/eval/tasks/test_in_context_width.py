"""An example before each question, chosen by one model and judged by another."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dyad.data.config import DataConfig
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.prompts import AnswerLists
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.in_context import InContext
from dyad.train.distributed.world import World


class Numbers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cos(tokens[:, :1].float() * torch.arange(1, self.width + 1))


def tokenize(texts: Any, *_: Any, **_options: Any) -> Any:
    return torch.tensor([[len(str(text))] for text in texts])


def test_cut_embeddings_choose_the_example_and_scores_stay_whole() -> None:
    """eval.width is of the model that chooses, not of the language model, whose score is one number."""
    answers = [Passage(text) for text in ("x", "y", "z", "w")]
    questions = [Question("q1", "a b"), Question("q2", "c d e")]
    of_answer, right = np.array([0, 0, 1, 1]), np.array([True, False, True, False])
    lists = AnswerLists(questions, answers, of_answer, right, tokenize, DataConfig())
    evaluator = InContext("eval/x", "", lists, ["e one", "e two"], Numbers(1), tokenize, DataConfig())
    encode = Encoder({"x": Numbers(8), "y": Numbers(8)}, World())
    report = evaluator.report(encode)
    assert set(evaluator.report(replace(encode, width=4)).metrics) == set(report.metrics)
    assert {*evaluator.higher_is_better()} == {"choice_accuracy", "log_likelihood"} < {*report.metrics}


def test_bm25_is_left_out_where_no_example_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    lists = AnswerLists([Question("q", "a")], [Passage("x")], np.array([0]), np.array([True]), tokenize, DataConfig())
    evaluator = InContext("eval/x", "", lists, ["?", "!!"], Numbers(1), tokenize, DataConfig())
    report = evaluator.report(Encoder({"x": Numbers(8), "y": Numbers(8)}, World()))
    assert evaluator.higher_is_better().keys() <= report.metrics.keys()  # not choice_accuracy: no answer is wrong
    assert [*report.details["baselines"]] == ["random", "no_prompt"]
    assert "left out: the baseline bm25: BM25: there is no word in the 2 passages" in capsys.readouterr().err

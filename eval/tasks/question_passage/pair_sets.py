"""Pairs of texts with a score, such as the similarity that people gave (STS), for evaluation. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.question_passage.formats import AnyScore
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import named_files, open_questions
from dyad.eval.tasks.question_passage.question_sets import names_beir


@dataclass(frozen=True)
class ScoredPairSet:
    """P pairs of a text x, a question, and a text y, a passage. score_P: the given scores, float64 (P,)."""

    questions: Sequence[Question]
    passages: Sequence[Passage]
    score_P: np.ndarray


def check_pairs(target: Any, config: DataConfig, key: str) -> None:
    """Raise ConfigError for a BEIR folder, and for files of scored pairs that do not exist or have an unknown ending.

    Raises DataError for a table that cannot be read. Rows are not read, except the first row of a table. key: the
    configuration key that messages name for `target`.
    """
    if names_beir(target):
        raise ConfigError(f"{key}:{target} is a BEIR folder, without scores of pairs: write beir:{target}")
    named_files(target, _with_scores(config), key)


def open_pairs(target: Any, config: DataConfig, key: str) -> ScoredPairSet:
    """Read the pairs that `target` names: of each row the question with each of its passages.

    target: files of rows with texts, in the syntax of data.train. The score is in the field data.teacher, or else in a
    usual one, such as score. key: the configuration key that messages name for `target`. Raises ConfigError for a
    target that cannot work, DataError for a row without scores, and unless two different scores are given.
    """
    rows = open_questions(target, _with_scores(config), key)
    read = map(rows.row, range(len(rows)))
    pairs = [(row.question, passage) for row in read for passage in chain(*row.lists)]
    scores = [passage.teacher for _, passage in pairs]
    if len({*scores}) < 2:
        raise DataError(f"{key}={target!s:.200}: needs pairs with two different scores; there are {len(pairs)} pairs")
    questions, passages = zip(*pairs, strict=True)
    return ScoredPairSet(questions, passages, np.array(scores, np.float64))


def equal_sides(config: DataConfig) -> tuple[QuestionConfig, PassageConfig]:
    """Return how the texts x and y of scored pairs are made, alike, as in sentence-transformers' evaluator.

    Both have the larger of the two lengths, and the prefix that both sides have; without such a prefix none.
    """
    question, passage = config.question, config.passage
    prefix = question.prefix if question.prefix == passage.prefix else ""
    length = max(question.length, passage.length)
    return replace(question, prefix=prefix, length=length), replace(passage, prefix=prefix, length=length)


def _with_scores(config: DataConfig) -> DataConfig:
    """Return the data options with which rows of any scored pairs can be read.

    The score of a pair is in the field data.teacher, by default "score", or else in a usual one, SCORES of
    data/tables/prepare.py. data.relevance is switched off, so that no field is read as a weight.
    """
    return replace(config, relevance=None, teacher=AnyScore(config.teacher or "score"))

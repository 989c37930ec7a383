"""Pairs of texts with a score, such as the similarity that people gave (STS), for evaluation. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.base.relevance import AnyScore
from dyad.data.config import DataConfig
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import named_files, open_questions


@dataclass(frozen=True)
class ScoredPairs:
    """P pairs of a text x and a text y with a score. questions, passages: the distinct texts, of the tower x and of y.
    x_P, y_P: the indices of each pair's texts in these lists, int64 (P,). score_P: the given scores, float64 (P,)."""

    questions: Sequence[Question]
    passages: Sequence[Passage]
    x_P: np.ndarray
    y_P: np.ndarray
    score_P: np.ndarray

    @property
    def groups(self) -> list[str | None]:
        """The group of each pair, the field metadata.topic of its row; None without one."""
        return [self.questions[i].group for i in self.x_P]


def check_pairs(target: Any, config: DataConfig, key: str) -> None:
    """Raise ConfigError for files of scored pairs that do not exist or that have another format. key: names `target`
    in messages."""
    named_files(target, _with_scores(config), key)


def open_pairs(target: Any, config: DataConfig, key: str) -> ScoredPairs:
    """Read the pairs that `target` names: of each row the question with each of its passages.

    target: files of rows with texts, in the syntax of data.train. The score is in the field data.teacher, or else in a
    usual one, such as score. key: names `target` in messages. Raises ConfigError for a target that cannot work,
    DataError for a row without scores, and if fewer than two different scores are given.
    """
    rows = open_questions(target, _with_scores(config), key)
    questions, passages = dict[str, Question](), dict[int, Passage]()
    pairs: list[tuple[int, int, float]] = []
    place_x, place_y = dict[str, int](), dict[int, int]()
    for row in map(rows.row, range(len(rows))):
        x = place_x.setdefault(row.question.text, len(place_x))
        questions.setdefault(row.question.text, row.question)
        for passage in chain(*row.lists):
            passages.setdefault(passage.key, passage)
            assert passage.teacher is not None
            pairs.append((x, place_y.setdefault(passage.key, len(place_y)), passage.teacher))
    x_P, y_P, score_P = (np.array(each) for each in zip(*pairs, strict=True))
    if np.ptp(score_P) == 0:
        raise DataError(
            f"{key}={target!s:.200}: all {len(pairs)} pairs have the score {score_P[0]:g}: nothing to order"
        )
    return ScoredPairs([*questions.values()], [*passages.values()], x_P, y_P, score_P)


def _with_scores(config: DataConfig) -> DataConfig:
    """Return the data options with which rows of any scored pairs can be read."""
    return replace(config, relevance=None, teacher=AnyScore(config.teacher or "score"))

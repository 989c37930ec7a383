"""Prompts and answers as rows of a causal language model: each row of files of questions is a prompt, its passages are
answers.

Letters in shapes: n prompts; N answers of all of them; L tokens of the longest prompt and answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import DataError
from dyad.data.batch import PADDING
from dyad.data.config import DataConfig
from dyad.data.question_passage.dataset import DrawnRow, QuestionPassage
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import open_questions
from dyad.data.shards.content_keys import Int64s


class PromptAnswers(QuestionPassage):
    """Rows whose y items are a prompt and one of its answers, right or wrong; x is an empty row (b, 1).

    The keys data.question.* are of prompts, data.passage.* of answers. tokenize: a tokenizer of prompts and answers,
    (prompts, answers, length of prompts, length of answers) → (n, 1 + L).
    """

    def inputs(self, drawn: Sequence[DrawnRow], passages: Sequence[tuple[int, Passage]]) -> tuple[Tensor, Tensor]:
        question, passage = self.config.question, self.config.passage
        prompts = [drawn[row].question.rendered(question)[0] for row, _ in passages]
        answers = [one.rendered(passage)[0] for _, one in passages]
        y = self.tokenize(prompts, answers, question.length, passage.length)
        return torch.zeros(len(drawn), 1, dtype=torch.int64), y


@dataclass(frozen=True)
class AnswerLists:
    """N answers to n prompts, as inputs of a tower that scores answers.

    row_N: the prompt of each answer, ascending. right_N: bool. tokenize: as of PromptAnswers.
    """

    prompts: Sequence[Question]
    answers: Sequence[Passage]
    row_N: Int64s
    right_N: np.ndarray
    tokenize: Any
    config: DataConfig

    def __len__(self) -> int:
        return len(self.answers)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the rows of answers start … stop − 1, int64 (k, 1 + L)."""
        return self.rows(np.arange(start, min(stop, len(self))))

    def rows(self, numbers_k: Int64s) -> Tensor:
        question, passage = self.config.question, self.config.passage
        prompts = [self.prompts[row].rendered(question)[0] for row in self.row_N[numbers_k].tolist()]
        answers = [self.answers[number].rendered(passage)[0] for number in numbers_k.tolist()]
        return self.tokenize(prompts, answers, question.length, passage.length)

    def token_counts(self, numbers_k: Int64s) -> Int64s:
        """Return the number of tokens of k answers, (k,)."""
        parts = np.array_split(numbers_k, -(-len(numbers_k) // 1024))
        tokens = [self.rows(part) for part in parts if len(part)]
        return np.concatenate([((rows[:, 1:] != PADDING).sum(1) - rows[:, 0]).numpy() for rows in tokens])


def answer_lists(value: str, config: DataConfig, tokenize: Any, key: str) -> AnswerLists:
    """Read the rows that `value` names: prompts, their right and their wrong answers, each once.

    A row without wrong answers has a likelihood, and nothing to choose. key: of `value`, for messages. Raises
    DataError for a row that cannot be used, ConfigError as `open_questions`.
    """
    questions = open_questions(value, config, key)
    rows = [questions.row(i) for i in range(len(questions))]
    if not rows:
        raise DataError(f"{key}={value}: has no row")
    answers, row_N, right_N = list[Passage](), list[int](), list[bool]()
    for number, row in enumerate(rows):
        found: dict[int, tuple[Passage, bool]] = {}
        for passages in row.lists:  # the right ones first: a wrong answer that is one of them is none
            for passage in passages:
                found.setdefault(passage.key, (passage, passages is row.positives))
        answers += [passage for passage, _ in found.values()]
        row_N += [number] * len(found)
        right_N += [right for _, right in found.values()]
    return AnswerLists([row.question for row in rows], answers, np.array(row_N), np.array(right_N), tokenize, config)


def rows_as_prompts(lists: AnswerLists, template: str) -> list[str]:
    """Return each row as an example that stands before a question: its question and its first right answer.

    template: a text with {question} and {answer}.
    """
    right = np.flatnonzero(lists.right_N)
    first_n = right[np.searchsorted(lists.row_N[right], np.arange(len(lists.prompts)))].tolist()
    parts = [{"question": q.text, "answer": lists.answers[i].text} for q, i in zip(lists.prompts, first_n, strict=True)]
    return [re.sub(r"\{(question|answer)\}", lambda place, of=of: of[place[1]], template) for of in parts]


def with_length(config: DataConfig, length: int | None) -> DataConfig:
    """Return the configuration with another length of prompts, in tokens; None: with its own."""
    return config if length is None else replace(config, question=replace(config.question, length=length))

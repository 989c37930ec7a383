"""Prompts and answers for a causal language model, from question–passage data: the question of a row is the prompt, its
passages are right and wrong answers.

Letters in shapes: n prompts; N answers of all prompts; L tokens of the longest prompt with answer. A row of tokens
(1 + L,) is the number of tokens of the prompt, then the tokens of prompt and answer, with PADDING at the right.
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
    """The training data set of prompts and answers. A y item is a prompt with one of its answers, right or wrong, as a
    row of tokens; x is zeros (b, 1), because the y tower alone scores the pair.

    The settings data.question.* apply to prompts, data.passage.* to answers. tokenize(prompts, answers, most tokens of
    a prompt, most tokens of an answer): returns the rows of tokens, int64 (n, 1 + L).
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

    row_N (N,) int64: index of the prompt of each answer, ascending. right_N (N,) bool: whether the answer is right.
    tokenize: as of PromptAnswers. config: gives the prefixes and lengths, data.question.* and data.passage.*.
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
        """Return the rows of tokens of the k answers start … stop − 1 with their prompts, int64 (k, 1 + L). If `stop`
        is more than N, the block ends with the last answer."""
        return self.rows(np.arange(start, min(stop, len(self))))

    def rows(self, numbers_k: Int64s) -> Tensor:
        """Return the rows of tokens of the answers with indices numbers_k (k,) and their prompts, int64 (k, 1 + L)."""
        question, passage = self.config.question, self.config.passage
        prompts = [self.prompts[row].rendered(question)[0] for row in self.row_N[numbers_k].tolist()]
        answers = [self.answers[number].rendered(passage)[0] for number in numbers_k.tolist()]
        return self.tokenize(prompts, answers, question.length, passage.length)

    def token_counts(self, numbers_k: Int64s) -> Int64s:
        """Return the number of tokens, without those of the prompt, of the answers with indices numbers_k, int64 (k,).
        k ≥ 1."""
        parts = np.array_split(numbers_k, -(-len(numbers_k) // 1024))
        tokens = [self.rows(part) for part in parts if len(part)]
        return np.concatenate([((rows[:, 1:] != PADDING).sum(1) - rows[:, 0]).numpy() for rows in tokens])


def answer_lists(value: str, config: DataConfig, tokenize: Any, key: str) -> AnswerLists:
    """Read all rows that `value` names, in the syntax of data.train: prompts, their right and their wrong answers.
    Equal answers of a prompt count once, as right if one of them is right. A prompt may have no wrong answer.

    key: the configuration key of `value`, for messages. Raises DataError for a row that cannot be used and if there is
    no row; ConfigError for a value that cannot work, such as a missing file.
    """
    questions = open_questions(value, config, key)
    rows = [questions.row(i) for i in range(len(questions))]
    if not rows:
        raise DataError(f"{key}={value}: has no row")
    answers, row_N, right_N = list[Passage](), list[int](), list[bool]()
    for number, row in enumerate(rows):
        found: dict[int, tuple[Passage, bool]] = {}
        for passages in row.lists:  # right answers first: an answer that is listed as right and as wrong is right
            for passage in passages:
                found.setdefault(passage.key, (passage, passages is row.positives))
        answers += [passage for passage, _ in found.values()]
        row_N += [number] * len(found)
        right_N += [right for _, right in found.values()]
    return AnswerLists([row.question for row in rows], answers, np.array(row_N), np.array(right_N), tokenize, config)


def rows_as_prompts(lists: AnswerLists, template: str) -> list[str]:
    """Return a text for each prompt with its first right answer, such as an example for few-shot prompts.

    template: the text, in which {question} and {answer} are replaced by the prompt and the answer, without prefixes.
    The list has the order of lists.prompts.
    """
    right = np.flatnonzero(lists.right_N)
    first_n = right[np.searchsorted(lists.row_N[right], np.arange(len(lists.prompts)))].tolist()
    parts = [{"question": q.text, "answer": lists.answers[i].text} for q, i in zip(lists.prompts, first_n, strict=True)]
    return [re.sub(r"\{(question|answer)\}", lambda place, of=of: of[place[1]], template) for of in parts]


def with_prompt_length(config: DataConfig, length: int | None) -> DataConfig:
    """Return `config` with data.question.length, the largest number of tokens of a prompt, set to `length`; None:
    return `config` unchanged."""
    return config if length is None else replace(config, question=replace(config.question, length=length))

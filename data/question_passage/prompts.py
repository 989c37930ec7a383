"""Prompts and answers as rows of a causal language model: each row of files of questions is a prompt, its passages are
answers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dyad.data.question_passage.dataset import DrawnRow, QuestionPassage
from dyad.data.question_passage.passages import Passage


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

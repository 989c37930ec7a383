"""Data sets of prompts with right and wrong answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyad.data.question_passage.questions import named_files
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.eval.encode.encoder import Evaluator


def _answers(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    from dyad.data.question_passage.prompts import answer_lists
    from dyad.eval.tasks.answers import Answers

    data = answer_lists(entry.target, inputs.config.data, inputs.model.tokenize, entry.key)
    return Answers(entry.name, entry.spec, data)


ANSWERS = SuiteKind(
    Task.language_model, "ROWS", lambda entry: named_files(entry.target, entry.data, entry.key), _answers
)

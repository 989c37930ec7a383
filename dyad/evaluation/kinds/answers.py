"""Kinds of data sets of prompts with right and wrong answers: for language models (answers), and for models that
retrieve example prompts for a language model (in_context)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyad.data.base.errors import ConfigError
from dyad.data.question_passage.questions import named_files
from dyad.eval.tasks.prompts import InContextTask, read_in_context
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.eval.encode.encoder import Evaluator
    from dyad.evaluation.find_model import FoundModel


def _answers(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry answers:ROWS, which scores all answers of the rows that it names."""
    from dyad.data.question_passage.prompts import answer_lists
    from dyad.eval.tasks.answers import Answers

    data = answer_lists(entry.target, inputs.config.data, inputs.model.tokenize, entry.key)
    return Answers(entry.name, entry.spec, data)


def _in_context(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry in_context:TASK.json, and load the language model that its task file names.

    The model of `inputs` chooses an example for each question; the language model scores the answers after it. Raises
    ConfigError if the named model scores no answers.
    """
    from dyad.data.question_passage.prompts import answer_lists, rows_as_prompts, with_prompt_length
    from dyad.eval.tasks.in_context import InContext
    from dyad.train.towers.models import LanguageModel

    task, found = _check_in_context(entry)
    scorer = found.load().model
    if not isinstance(scorer, LanguageModel):
        raise ConfigError(f"{entry.target}: language_model '{task.language_model}' scores no answers. Give lm:NAME")
    config = with_prompt_length(found.config.data, task.length)
    data = answer_lists(task.questions, config, scorer.tokenize, f"{entry.target}: questions")
    rows = answer_lists(task.examples, config, scorer.tokenize, f"{entry.target}: examples")
    own = inputs.model.tokenize, inputs.config.data
    return InContext(entry.name, entry.spec, data, rows_as_prompts(rows, task.template), scorer.towers.y_tower, *own)


def _check_in_context(entry: SuiteEntry) -> tuple[InContextTask, FoundModel]:
    """Read the task file of an entry in_context:TASK.json, and find, but not load, its rows and its language model.

    Raises ConfigError if one of the three is missing or invalid, DataError for a table that cannot be read.
    """
    from dyad.evaluation.find_model import find_model

    task = read_in_context(entry.path)
    for key in ("questions", "examples"):
        named_files(getattr(task, key), entry.data, f"{entry.target}: {key}")
    return task, find_model(task.language_model)


IN_CONTEXT = SuiteKind(Task.question_passage, "TASK.json", _check_in_context, _in_context)
ANSWERS = SuiteKind(
    Task.language_model, "ROWS", lambda entry: named_files(entry.target, entry.data, entry.key), _answers
)

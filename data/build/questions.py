"""Open the questions for which `python -m data negatives` searches hard negatives. They have answers, right passages,
or both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dyad.data.base.errors import ConfigError
from dyad.data.cli.inputs import InputKind, recognised
from dyad.data.cli.options import NegativesOptions, question_config, table_keys
from dyad.data.question_passage.answer_tables import is_answers_table, read_answers_table
from dyad.data.question_passage.corpus import Corpus, open_corpus
from dyad.data.question_passage.formats import answered_of, format_of
from dyad.data.question_passage.passages import InlinePassages, Question
from dyad.data.question_passage.questions import QuestionRow, QuestionRows, is_beir, open_questions
from dyad.data.shards.rows import SUFFIXES, Rows, open_rows
from dyad.data.shards.sources import files_of
from dyad.data.shards.storage import sha256_of
from dyad.data.tables.prepare import prepared_tables


class TableQuestions:
    """The questions of a DPR table (question and answers, tab-separated), without passages. path: the file of the
    table.

    fingerprint: a hash of the data. All are kept in memory. The constructor raises DataError for a damaged row.
    """

    def __init__(self, path: str) -> None:
        file = Path(path).expanduser()
        self.fingerprint = sha256_of(file)
        self._questions: Sequence[Question] = [*read_answers_table(file)]

    def __len__(self) -> int:
        return len(self._questions)

    def row(self, i: int) -> QuestionRow:
        return QuestionRow(self._questions[i], InlinePassages())


class AnsweredQuestions:
    """The questions of rows that have answers and no passages; `row` raises DataError for a damaged one. fingerprint: a
    hash of the data. answers: the field with the answers of a row."""

    def __init__(self, rows: Rows, answers: str) -> None:
        self.fingerprint, self._rows, self._answers = rows.fingerprint, rows, answers

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> QuestionRow:
        return QuestionRow(self._rows.read(i, lambda fields: answered_of(fields, self._answers)), InlinePassages())


Questions = TableQuestions | AnsweredQuestions | QuestionRows


def open_built_of(source: str, options: NegativesOptions) -> tuple[Questions, Corpus]:
    """Open the questions that `source` names, and the corpus to search.

    The corpus is options.corpus if it is set, else that of the source, a BEIR folder. Raises ConfigError for a source
    that cannot work or has no question, and if there is no corpus; DataError for damaged data.
    """
    if recognised([source], table_keys(options))[0] is InputKind.images:
        raise ConfigError(f"QUESTIONS {source} holds images, and no questions")
    questions, corpus = _open(source, options)
    if options.relevance is not None and not isinstance(questions, QuestionRows):
        raise ConfigError(f"relevance={options.relevance}: QUESTIONS {source} has no right passages that have one")
    if options.corpus:
        corpus = open_corpus(options.corpus, "corpus")
    if corpus is None:
        raise ConfigError("corpus=FILE is missing: the passages to search, each with an id and a text")
    if not len(questions):
        raise ConfigError(f"QUESTIONS {source}: there is no question")
    return questions, corpus


def _open(source: str, options: NegativesOptions) -> tuple[Questions, Corpus | None]:
    """Open the questions that `source` names, and its own corpus; None if it has none."""
    if is_answers_table(source, options.columns):
        return TableQuestions(source), None
    if not is_beir(source):
        rows = open_rows(files_of([source], "QUESTIONS", SUFFIXES, prepared_tables(table_keys(options))))
        if len(rows) and _is_answered(rows.fields(0), options.answers):
            return AnsweredQuestions(rows, options.answers), None
    found = open_questions(source, question_config(options), "QUESTIONS")
    return found, found.corpus


def _is_answered(fields: dict[str, Any], answers: str) -> bool:
    """Whether the row `fields` has the field `answers`, and no passages.

    Its format may read no other field as passages than this one.
    """
    read = format_of(fields)
    return answers in fields and (read is None or read.lists(fields) == [answers])

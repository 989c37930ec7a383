"""Question sets for the evaluation of passage retrieval: questions, judgements, and the passages to search.

Does not import torch. An entry of the option eval.suite has one of these forms:
beir:FOLDER[@SPLIT]   a BEIR folder (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv) or an MS MARCO folder; the default
                      split is test
dpr:FILE              a .csv or .tsv file with question <tab> ['answer', …]; or a file that data.train accepts, whose
                      rows list the right passages. Passages to search: data.passage.corpus, else those of the rows
dpr:FOLDER            one such file, and beside it the passages as psgs*.tsv, psgs*.jsonl or corpus.jsonl

A passage is right if the judgements (qrels) grade it above 0. For a file whose rows list right passages, each passage
with the content of a listed one has grade 1. Without any judgement, a passage is right if it contains an answer to the
question (Judge in passage_metrics.py).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, nearest
from dyad.data.base.relevance import if_given
from dyad.data.config import DataConfig, check_split
from dyad.data.question_passage.answer_tables import is_answers_table, read_answers_table
from dyad.data.question_passage.corpus import Corpus, open_corpus
from dyad.data.question_passage.judgements import judgements, qrels_file, queries_of
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import QuestionRow, QuestionRows, is_beir, named_files, open_questions
from dyad.data.shards.content_keys import Int64s, key_name
from dyad.data.tables.folders import tables_of
from dyad.eval.metrics.matches import positions_with

if TYPE_CHECKING:
    from dyad.eval.metrics.trec import Qrels

KEY = "eval.suite"
SearchedCorpus: TypeAlias = "Corpus | RowPassages"
QUESTION_FILES = (".json", ".jsonl", ".csv", ".tsv")
MAX_GRADE = 10_000  # largest grade that is read: trec_eval allocates a table as long as the highest grade
PASSAGE_FILES = r"psgs.*\.(tsv|jsonl)|corpus\.jsonl"


@dataclass(frozen=True)
class QuestionSet:
    """Questions, the judgements of passages for them, and the passages to search.

    qrels: question id → passage id → grade; it may also have questions that are not in `questions`. corpus: the
    passages. drop_own: whether the passage that has the id of a question is removed from the results of this question,
    unless qrels grade it for the question. This is BEIR's rule for sets like ArguAna, in which questions are passages.
    """

    questions: Sequence[Question]
    qrels: "Qrels"
    corpus: SearchedCorpus
    drop_own: bool = False

    def checked(self, where: str) -> "QuestionSet":
        """Return this question set unchanged; raise ConfigError if it cannot be evaluated.

        That is if it has no question, or neither judgements nor answers. where: the name of the set in the message.
        """
        if not self.questions:
            raise ConfigError(f"{where}: there is no question")
        if not self.qrels and not any(question.answers for question in self.questions):
            raise ConfigError(f"{where}: nothing says what is right: no answers, and no right passage is in the corpus")
        return self


# ---- BEIR ------------------------------------------------------------------------------------------------------------


def names_beir(target: Any) -> bool:
    """Whether `target` is a BEIR or MS MARCO folder, written as FOLDER or FOLDER@SPLIT; the split is not checked."""
    return isinstance(target, str) and is_beir(str(_folder_and_split(target)[0]))


def check_beir(target: str) -> tuple[Path, str]:
    """Return (folder, split) of a BEIR target, written as FOLDER or FOLDER@SPLIT; without a split, "test".

    Raises ConfigError if the folder is no BEIR (or MS MARCO) folder or has no such split.
    """
    folder, split = _folder_and_split(target)
    if not folder.is_dir():
        hint = nearest(folder.name, [path.name for path in folder.parent.glob("*")])
        raise ConfigError(f"beir:{target}: '{folder}' is no folder.{hint}")
    missing = [name for name in ("corpus.jsonl", "queries.jsonl", "qrels") if not (folder / name).exists()]
    if missing and not (folder / "collection.tsv").exists():
        raise ConfigError(f"beir:{target}: {folder} has no {missing[0]}, so it is no BEIR folder")
    check_split(split, f"{KEY}: beir:{target}: split")
    qrels_file(str(folder), split, f"{KEY}: beir:{target}: split")
    return folder, split


def open_beir(target: str, config: DataConfig) -> QuestionSet:
    """Open the BEIR target FOLDER or FOLDER@SPLIT as a question set.

    The set has the questions of the split with a right passage in the corpus, the judgements of the split, and the
    corpus of the folder. As in trec_eval, judgements of questions that are not in the folder are ignored, and a right
    passage that is not in the corpus counts as not found. config: the data options; the split, the corpus, relevance
    and teacher in it are not used. Raises ConfigError if the folder is no BEIR folder, has no such split or has no
    question, DataError for damaged judgements.
    """
    folder, split = check_beir(target)
    passage, question = replace(config.passage, corpus=None), replace(config.question, split=split)
    own = replace(config, question=question, passage=passage, relevance=None, teacher=None)
    rows = open_questions(str(folder), own, KEY)
    questions = [rows.question(i) for i in range(len(rows))]
    path = qrels_file(str(folder), split, KEY)
    judged = _judged(path)
    asked = open_corpus(queries_of(path), KEY).positions([*judged]) >= 0
    qrels = {question: judged[question] for question in compress(judged, asked)}
    return QuestionSet(questions, qrels, open_corpus(str(folder), KEY), drop_own=True).checked(f"beir:{target}")


def _judged(path: str) -> "Qrels":
    """Read all judgements of a qrels file, as question id → passage id → grade.

    Raises DataError if two lines contradict each other, if a grade is too large, or if the file has no judgement.
    """
    qrels: Qrels = {}
    for line, (question, passage), grade in judgements(path):
        if abs(grade) > MAX_GRADE:
            raise DataError(f"{path}:{line}: '{grade}' is not a grade: needs a whole number of at most {MAX_GRADE}")
        if qrels.setdefault(question, {}).setdefault(passage, grade) != grade:
            raise DataError(f"{path}:{line}: query {question!r} has document {passage!r} twice, with different values")
    if not qrels:
        raise DataError(f"{path}:1: no judgement in the file")
    return qrels


def _folder_and_split(target: str) -> tuple[Path, str]:
    """Return (folder, split) of FOLDER or FOLDER@SPLIT; without a split, "test".

    An "@" in the name of a folder is no split.
    """
    folder, at, split = target.rpartition("@")
    if not at or Path(target).expanduser().is_dir():
        return Path(target).expanduser(), "test"
    return Path(folder).expanduser(), split


# ---- DPR -------------------------------------------------------------------------------------------------------------


def check_dpr(target: Any, config: DataConfig, key: str = "dpr") -> tuple[Any, str | None]:
    """Return the files that a DPR target names, as (question file, passage file).

    For a target that is no folder, or is a folder of tables, they are (the target itself, None). key: the option that
    names the target, for messages. Raises ConfigError for a missing file, for a BEIR folder, and for any other folder
    that has not exactly one question file and one passage file; DataError for a table that cannot be read.
    """
    if not isinstance(target, str) or not Path(target).expanduser().is_dir() or tables_of(target, ()):
        if not is_answers_table(target, config.columns):
            named_files(target, _for_evaluation(config), key)
        return target, None
    if names_beir(target):
        raise ConfigError(f"dpr:{target} is a BEIR folder: write beir:{target}")
    files = sorted(p for p in Path(target).expanduser().iterdir() if p.suffix in QUESTION_FILES)
    passages = [p for p in files if re.fullmatch(PASSAGE_FILES, p.name)]
    questions = [p for p in files if p not in passages]
    if len(passages) != 1 or len(questions) != 1:
        raise ConfigError(
            f"dpr:{target}: needs one file of passages (psgs*.tsv, psgs*.jsonl or corpus.jsonl) and one of questions "
            f"({', '.join(QUESTION_FILES)}). There is: {', '.join(p.name for p in files) or 'nothing like them'}"
        )
    return str(questions[0]), str(passages[0])


def open_dpr(target: Any, config: DataConfig) -> QuestionSet:
    """Open a DPR target, a file or a folder, as a question set.

    config: the data options. If there is no passage file beside the questions, data.passage.corpus is searched, or
    without it the passages in the rows. Raises ConfigError for a target that `check_dpr` refuses, and if there are no
    passages to search, no questions, or neither answers nor right passages; DataError for damaged rows.
    """
    source, beside = check_dpr(target, config)
    passages = beside or config.passage.corpus
    corpus = None if passages is None else open_corpus(passages, KEY)
    if is_answers_table(source, config.columns):
        if corpus is None:
            raise ConfigError(
                f"dpr:{target} says answers, not passages: put psgs_w100.tsv beside it and write dpr:FOLDER, or set "
                "data.passage.corpus"
            )
        return QuestionSet(list(read_answers_table(Path(source).expanduser())), {}, corpus).checked(f"dpr:{target}")
    own = replace(_for_evaluation(config), passage=replace(config.passage, corpus=passages))
    rows = open_questions(source, own, KEY)
    questions: dict[str, Question] = {}
    right: dict[str, list[int]] = {}  # rows with the same id are one question
    answers: dict[str, dict[str, None]] = {}
    for i in range(len(rows)):
        row = rows.row(i)
        questions.setdefault(row.question.id, row.question)
        answers.setdefault(row.question.id, {}).update(dict.fromkeys(row.question.answers))
        right.setdefault(row.question.id, []).extend(row.positives.keys)
    searched = RowPassages(rows) if corpus is None else corpus
    asked = [replace(question, answers=tuple(answers[question.id])) for question in questions.values()]
    return QuestionSet(asked, _qrels(right, searched), searched).checked(f"dpr:{target}")


def _qrels(right: dict[str, list[int]], corpus: SearchedCorpus) -> "Qrels":
    """Return question id → passage id → grade 1, for all passages of the corpus whose content is right.

    right: question id → content keys of the right passages. Questions without such a passage are left out.
    """
    wanted = np.array([key for keys in right.values() for key in keys], dtype=np.int64)
    ids: dict[int, list[str]] = {}
    keys_m = corpus.keys
    for position in positions_with(keys_m, wanted).tolist():
        ids.setdefault(int(keys_m[position]), []).extend(corpus.ids(position, position + 1))
    qrels = {question: {name: 1 for key in keys for name in ids.get(key, ())} for question, keys in right.items()}
    return {question: grades for question, grades in qrels.items() if grades}


# ---- passages of rows ------------------------------------------------------------------------------------------------


class RowPassages:
    """The passages in the rows of a question file as a corpus, without duplicates, in order of first occurrence.

    It has the methods of Corpus (data/question_passage/corpus.py) that a search needs, and can be pickled. Passages
    keep their ids from the file. A passage without an id, or with an id that another passage has already, gets its
    content key as id.
    """

    def __init__(self, rows: QuestionRows) -> None:
        self._rows = rows
        self._last: tuple[int, list[Passage]] = (-1, [])
        first: dict[int, tuple[int, int]] = {}
        names: dict[str, int] = {}
        lengths = []
        for i in range(len(rows)):
            for number, passage in enumerate(_all(rows.row(i))):
                if passage.key not in first:
                    first[passage.key] = (i, number)
                    own = passage.id is not None and passage.id not in names
                    names[passage.id if own and passage.id else key_name(passage.key)] = len(names)
                    lengths.append(len(passage.title.encode()) + len(passage.text.encode()))
        self.keys, self.lengths = np.array(list(first), np.int64), np.array(lengths, np.int64)
        self._origins, self._names, self._positions = list(first.values()), list(names), names
        # the keys alone do not tell the ids apart
        self.fingerprint = hashlib.sha256(json.dumps(self._names).encode() + self.keys.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._origins)

    def __getitem__(self, i: int, /) -> Passage:
        row, number = self._origins[i]
        if self._last[0] != row:
            self._last = (row, _all(self._rows.row(row)))
        return replace(self._last[1][number], id=self._names[i])

    def ids(self, start: int, stop: int) -> list[str]:
        """Return the ids of the passages with indices start … stop − 1."""
        return self._names[start:stop]

    def positions(self, ids: Sequence[str]) -> Int64s:
        """Return the index of each of k passage ids in this corpus, as (k,) int64; −1 for unknown ids."""
        return np.array([self._positions.get(name, -1) for name in ids], np.int64)


def _all(row: QuestionRow) -> list[Passage]:
    """Return all passages of a row: right ones, negatives, hard negatives."""
    return [*row.positives, *row.negatives, *row.hard_negatives]


def _for_evaluation(config: DataConfig) -> DataConfig:
    """Return the data options for rows of an evaluation, which need no weights and no scores of a teacher.

    The field data.relevance is read only in rows that have it, the field data.teacher never.
    """
    return replace(config, relevance=if_given(config.relevance), teacher=if_given(config.teacher))

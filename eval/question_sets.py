"""What retrieval of passages is evaluated on: questions, what is right, and the passages to search. Torch-free.

beir:FOLDER[@SPLIT]   corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; the split is test unless said
dpr:FILE              .csv or .tsv: question <tab> ['answer', …]; or a file that data.train takes, whose rows say what
                      is right. Its passages are data.passage.corpus, or those of its own rows
dpr:FOLDER            one such file, and its passages beside it as psgs*.tsv, psgs*.jsonl or corpus.jsonl

Right is what the qrels judge, or every passage with the content of one that the row calls right.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data.errors import ConfigError, DataError, nearest
from data.scan import MAX_BYTES
from data.sources import parse_sources

if TYPE_CHECKING:
    from data.config import DataConfig
    from data.keys import Int64s
    from data.passages import Passage, Question
    from data.questions import QuestionRow, QuestionRows
    from eval.trec import Qrels

KEY = "eval.suite"
QUESTION_FILES = (".json", ".jsonl", ".csv", ".tsv")
SCAN = 1 << 20  # content keys of the corpus looked through at a time
PASSAGE_FILES = r"psgs.*\.(tsv|jsonl)|corpus\.jsonl"


class Passages(Protocol):
    """Passages to search, as data.corpus.Corpus has them."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def keys(self) -> Int64s: ...
    @property
    def lengths(self) -> Int64s: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Passage: ...
    def ids(self, start: int, stop: int) -> list[str]: ...
    def positions(self, ids: Sequence[str]) -> Int64s: ...


@dataclass(frozen=True)
class QuestionSet:
    """questions: those that are asked; qrels: question id → passage id → grade, of these and perhaps of others.

    drop_own: a passage with the id of its question is not found, unless it is judged for it. BEIR's rule, for sets
    like ArguAna whose questions are passages.
    """

    questions: Sequence[Question]
    qrels: Qrels
    corpus: Passages
    drop_own: bool = False

    def checked(self, place: Any) -> QuestionSet:
        """Raises ConfigError when there is nothing to score."""
        if not self.questions:
            raise ConfigError(f"{place}: there is no question")
        if not self.qrels and not any(question.answers for question in self.questions):
            raise ConfigError(f"{place}: nothing says what is right: no answers, and no right passage is in the corpus")
        return self


# BEIR -----------------------------------------------------------------------------------------------------------------


def is_beir(place: Any) -> bool:
    """Whether `place` is a BEIR folder, with or without a split."""
    return isinstance(place, str) and (_folder_and_split(place)[0] / "qrels").is_dir()


def check_beir(place: str) -> tuple[Path, str]:
    """(folder, split); raises ConfigError for a folder that is not BEIR's, or has no such split."""
    folder, split = _folder_and_split(place)
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(f"beir:{place}: '{folder}' is no folder.{nearest(folder.name, beside)}")
    missing = [name for name in ("corpus.jsonl", "queries.jsonl", "qrels") if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"beir:{place}: {folder} has no {missing[0]}, so it is no BEIR folder")
    splits = sorted(p.stem for p in (folder / "qrels").glob("*.tsv"))
    if split not in splits:
        raise ConfigError(
            f"beir:{place}: there is no {folder / 'qrels' / split}.tsv.{nearest(split, splits)} "
            f"Splits are {', '.join(splits) or 'none'}: write beir:FOLDER@SPLIT"
        )
    return folder, split


def open_beir(place: str, config: DataConfig) -> QuestionSet:
    from data.corpus import open_corpus
    from data.questions import open_questions
    from eval.trec import read_qrels

    folder, split = check_beir(place)
    own = replace(
        config,
        question=replace(config.question, split=split),
        passage=replace(config.passage, corpus=None),
    )
    rows = open_questions(str(folder), own, KEY)
    questions = [rows.question(i) for i in range(len(rows))]
    qrels = read_qrels(folder / "qrels" / f"{split}.tsv")
    return QuestionSet(questions, qrels, open_corpus(str(folder), KEY), drop_own=True).checked(f"beir:{place}")


def _folder_and_split(place: str) -> tuple[Path, str]:
    folder, at, split = place.rpartition("@")
    if not at or Path(place).expanduser().is_dir():
        return Path(place).expanduser(), "test"
    return Path(folder).expanduser(), split


# DPR ------------------------------------------------------------------------------------------------------------------


def check_dpr(place: Any) -> tuple[Any, str | None]:
    """(questions, passages beside them); ConfigError for a file that is not there, or a folder of other things."""
    if not isinstance(place, str) or not Path(place).expanduser().is_dir():
        parse_sources(place, "dpr", (*QUESTION_FILES, ".tar"))
        return place, None
    if is_beir(place):
        raise ConfigError(f"dpr:{place} is a BEIR folder: write beir:{place}")
    files = sorted(p for p in Path(place).expanduser().iterdir() if p.suffix in QUESTION_FILES)
    passages = [p for p in files if re.fullmatch(PASSAGE_FILES, p.name)]
    questions = [p for p in files if p not in passages]
    if len(passages) != 1 or len(questions) != 1:
        raise ConfigError(
            f"dpr:{place}: needs one file of passages (psgs*.tsv, psgs*.jsonl or corpus.jsonl) and one of questions "
            f"({', '.join(QUESTION_FILES)}). There is: {', '.join(p.name for p in files) or 'nothing like them'}"
        )
    return str(questions[0]), str(passages[0])


def open_dpr(place: Any, config: DataConfig) -> QuestionSet:
    from data.corpus import open_corpus
    from data.questions import open_questions

    source, beside = check_dpr(place)
    passages = beside or config.passage.corpus
    corpus = None if passages is None else open_corpus(passages, KEY)
    if isinstance(source, str) and source.endswith((".csv", ".tsv")):
        if corpus is None:
            raise ConfigError(
                f"dpr:{place} says answers, not passages: put psgs_w100.tsv beside it and write dpr:FOLDER, or train "
                "with data.passage.corpus"
            )
        return QuestionSet(list(read_answers_table(Path(source).expanduser())), {}, corpus).checked(f"dpr:{place}")
    rows = open_questions(source, replace(config, passage=replace(config.passage, corpus=passages)), KEY)
    questions: dict[str, Question] = {}
    known: dict[str, list[int]] = {}  # rows with the same id are one question
    for i in range(len(rows)):
        question = questions.setdefault(rows.question(i).id, rows.question(i))
        known.setdefault(question.id, []).extend(rows.row(i).positives.keys)
    searched = RowPassages(rows) if corpus is None else corpus
    return QuestionSet(list(questions.values()), _qrels(known, searched), searched).checked(f"dpr:{place}")


def _qrels(known: dict[str, list[int]], corpus: Passages) -> Qrels:
    """Question id → every passage that has a right content key."""
    wanted = np.unique(np.array([key for keys in known.values() for key in keys], dtype=np.int64))
    places: dict[int, list[str]] = {}
    for start in range(0, len(corpus), SCAN):
        keys = np.asarray(corpus.keys[start : start + SCAN])
        for place in np.flatnonzero(np.isin(keys, wanted)).tolist():
            places.setdefault(int(keys[place]), []).extend(corpus.ids(start + place, start + place + 1))
    right = {question: {p: 1 for key in keys for p in places.get(key, ())} for question, keys in known.items()}
    return {question: passages for question, passages in right.items() if passages}


def read_answers_table(path: Path) -> Iterator[Question]:
    """The questions of a DPR table: question <tab> Python list of answers. Their ids are the numbers of rows from 0.

    Raises DataError with the line of a row that is none.
    """
    from data.passages import Question

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.reader(file, delimiter="\t")
            for number, fields in enumerate(table):
                if len(fields) != 2 or not fields[0].strip():
                    raise DataError(f"{path}, line {table.line_num}: needs a question, a tab and a list of answers")
                answers = parse_answers(fields[1], f"{path}, line {table.line_num}")
                yield Question(str(number), fields[0].strip().replace("’", "'"), answers)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no table in UTF-8 with tabs: {error}") from error


def parse_answers(text: str, place: str) -> tuple[str, ...]:
    """The strings of a list written in Python, read as a literal: nothing in it is run."""
    try:
        if len(text) > MAX_BYTES["txt"]:
            raise ValueError("a parsed letter takes a hundred times the memory")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of '\d' in a regex answer
            answers = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
        answers = None
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{place}: {text[:60]!r} is no list of answers like ['Paris', 'City of Light']")
    return tuple(answers)


# Passages of the rows -------------------------------------------------------------------------------------------------


class RowPassages:
    """The distinct passages of some rows as a corpus: by content, where each first stands. Can be pickled.

    Ids are those of the file; a passage that has none, or whose id belongs to another content, has its content key.
    """

    def __init__(self, rows: QuestionRows) -> None:
        self._rows = rows
        self._last: tuple[int, list[Passage]] = (-1, [])
        first: dict[int, tuple[int, int]] = {}
        names: dict[str, int] = {}
        lengths = []
        for i in range(len(rows)):
            for place, passage in enumerate(_all(rows.row(i))):
                if passage.key not in first:
                    first[passage.key] = (i, place)
                    own = passage.id is not None and passage.id not in names
                    names[passage.id if own and passage.id else f"{passage.key & (1 << 64) - 1:016x}"] = len(names)
                    lengths.append(len(passage.title.encode()) + len(passage.text.encode()))
        self.keys, self.lengths = np.array(list(first), np.int64), np.array(lengths, np.int64)
        self._places, self._names, self._positions = list(first.values()), list(names), names
        named = json.dumps(self._names).encode()  # rows alone do not say which of their passages count
        self.fingerprint = hashlib.sha256(named + self.keys.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int, /) -> Passage:
        row, place = self._places[i]
        if self._last[0] != row:
            self._last = (row, _all(self._rows.row(row)))
        return replace(self._last[1][place], id=self._names[i])

    def ids(self, start: int, stop: int) -> list[str]:
        return self._names[start:stop]

    def positions(self, ids: Sequence[str]) -> Int64s:
        """(k,) positions by id, −1 where there is none."""
        return np.array([self._positions.get(name, -1) for name in ids], np.int64)


def _all(row: QuestionRow) -> list[Passage]:
    return [*row.positives, *row.negatives, *row.hard_negatives]

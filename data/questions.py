"""Training rows of question_passage, whatever their format: rows of files, or the judged questions of BEIR folders."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.config import DataConfig, PassageConfig
from data.corpus import Chosen, Corpus, corpus_files, open_corpus
from data.errors import ConfigError, DataError, nearest
from data.kept import cached_array
from data.keys import Int64s, hash_ids, key_name
from data.manifest import FileEntry, file_entries
from data.passages import Inline, Passage, Passages, Question
from data.records import Record, query_of, record_of
from data.rows import SUFFIXES, Rows, open_rows
from data.sources import local_path, parse_sources, refuse_twice, split_sources
from data.storage import sha256_of
from data.tables import BadRow

FORMAT = "1"
COLUMNS = "2"  # format of the columns of rows: its ids do not enter the fingerprint
AT_ONCE = 65_536
MAX_LINE = 1 << 20  # of judgements
HASH, CHECK, LENGTH = range(3)


LISTS = ("positives", "negatives", "hard_negatives")


@dataclass(frozen=True)
class Row:
    """A question and its passages. Those named by id are read from the corpus when they are asked for."""

    question: Question
    positives: Passages
    negatives: Passages
    hard_negatives: Passages


class Part(Protocol):
    """The rows of one source. Can be pickled; nothing but columns of numbers is held. columns: (3, n) int64, mapped:
    hash of the question's id in two halves, bytes of its text."""

    fingerprint: str
    files: list[FileEntry]

    @property
    def corpus(self) -> Corpus | None: ...
    @property
    def columns(self) -> Int64s: ...
    def __len__(self) -> int: ...
    def origin(self, i: int) -> tuple[str, str]: ...
    def question(self, i: int) -> Question: ...
    def row(self, i: int) -> Row: ...


def named_files(value: str | Sequence[str], config: DataConfig, key: str = "data.train") -> list[str]:
    """The files that hold the rows. Raises ConfigError as `open_questions` does; nothing is read or indexed."""
    if config.passage.corpus:
        corpus_files(config.passage.corpus, "data.passage.corpus")
    named: list[str] = []
    for path, _ in split_sources(value, key):
        named += [qrels_file(path, config.question.split, _asked(path, key))] if is_beir(path) else _files(path, key)
    refuse_twice(named, key)
    return named


def open_questions(value: str | Sequence[str], config: DataConfig, key: str = "data.train") -> Questions:
    """The rows that `value` names, written like data.train: files and shards of any format, and BEIR folders.

    Raises ConfigError, naming `key`, for what cannot work; DataError, naming the line, for a row that cannot be used.
    The first opening reads everything once.
    """
    named_files(value, config, key)
    shared = open_corpus(config.passage.corpus, "data.passage.corpus") if config.passage.corpus else None
    sources = split_sources(value, key)
    opened = [_part(path, config, shared, key) for path, _ in sources]
    return Questions(opened, [weight for _, weight in sources], shared)


def _part(path: str, config: DataConfig, corpus: Corpus | None, key: str) -> Part:
    if is_beir(path):
        return BeirQuestions(local_path(path), config.question.split, corpus, key)
    return RowQuestions(open_rows(_files(path, key)), config.passage, corpus)


def _files(path: str, key: str) -> list[str]:
    return [file for source in parse_sources([path], key, SUFFIXES) for file in source.shards]


def is_beir(path: str) -> bool:
    """Whether a path is a folder with judgements."""
    return os.path.isdir(os.path.join(local_path(path), "qrels"))


class Questions:
    """Rows 0 … len - 1, source by source. corpus: the one that ids of mined negatives are of, where there is one."""

    def __init__(self, sources: Sequence[Part], weights: Sequence[float], shared: Corpus | None = None) -> None:
        self.parts, self.weights = list(sources), list(weights)
        self.sizes = [len(part) for part in sources]
        self._starts = [0, *accumulate(self.sizes)]
        self.fingerprint = _digest([part.fingerprint for part in sources])
        self.files = [entry for part in sources for entry in part.files]
        own = {part.corpus.fingerprint: part.corpus for part in sources if part.corpus is not None}
        self.corpus = shared or (next(iter(own.values())) if len(own) == 1 else None)

    def __len__(self) -> int:
        return self._starts[-1]

    def question(self, i: int) -> Question:
        part, row = self._place(i)
        return part.question(row)

    def row(self, i: int) -> Row:
        part, row = self._place(i)
        return part.row(row)

    def origin(self, i: int) -> tuple[str, str]:
        """File and key of a row."""
        part, row = self._place(i)
        return part.origin(row)

    def known(self, i: int) -> list[int]:
        """Content keys of all right passages, also of those that are not drawn."""
        return self.row(i).positives.keys

    @property
    def lengths(self) -> Int64s:
        """(n,) bytes of the questions."""
        return np.concatenate([part.columns[LENGTH] for part in self.parts])

    @property
    def id_hashes(self) -> Int64s:
        """(2, n): `keys.hash_ids` of the questions' ids."""
        return np.concatenate([part.columns[: CHECK + 1] for part in self.parts], axis=1)

    def _place(self, i: int) -> tuple[Part, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} is not in [0, {len(self)})")
        part = bisect_right(self._starts, i) - 1
        return self.parts[part], i - self._starts[part]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# ---- rows of files -------------------------------------------------------------------------------------------------


class RowQuestions:
    """Each row of some files, of any format that `records` knows. The id of a question without one is made of its
    text, as `python -m data pack` makes it: wherever its file lies, and whatever that is called.
    """

    def __init__(self, rows: Rows, config: PassageConfig, corpus: Corpus | None) -> None:
        self.rows, self.config, self.corpus = rows, config, corpus
        state = [FORMAT, rows.fingerprint, corpus.fingerprint if corpus else ""]
        self.fingerprint = _digest(state)
        self.files = file_entries(rows.shards.indexes)
        others = corpus.rows.files if corpus else []
        self._mapped = cached_array(rows.files, "questions", others, [COLUMNS, *state], self._checked)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Int64s:
        return self._mapped.array

    def origin(self, i: int) -> tuple[str, str]:
        return self.rows.origin(i)

    def question(self, i: int) -> Question:
        return self._record(i).question

    def row(self, i: int) -> Row:
        record = self._record(i)
        lists = (record.positives, record.negatives, record.hard_negatives)
        return Row(record.question, *(self._resolved(passages, i) for passages in lists))

    def _record(self, i: int) -> Record:
        try:
            record = record_of(self.rows.fields(i), self.config)
        except BadRow as error:
            file = shlex.quote(self.rows.shards.locate(i)[0].path)
            raise DataError(
                f"{self.rows.where(i)}: {error}. "
                f"Rows like this one are left out by: python -m data pack {file} out=FOLDER to=dpr on_error=skip"
            ) from None
        named = record.question.id or key_name(record.question.key)
        return replace(record, question=replace(record.question, id=named))

    def _resolved(self, passages: Sequence[Passage] | Sequence[str], i: int) -> Passages:
        ids = [entry for entry in passages if isinstance(entry, str)]
        if not ids:
            return Inline([entry for entry in passages if isinstance(entry, Passage)])
        if self.corpus is None:
            raise ConfigError(f"{self.rows.where(i)} names its passages by id: set data.passage.corpus to their file.")
        positions = self.corpus.positions(ids)
        if (positions < 0).any():
            missing = ids[int(np.argmin(positions))]
            raise DataError(f"{self.rows.where(i)}: id '{missing}' is not in the corpus {_names(self.corpus)}")
        return Chosen(self.corpus, positions)

    def _checked(self) -> Int64s:
        """Every row is read once, so that a bad one is known before training starts, not in the middle of it."""
        columns = np.empty((3, len(self)), np.int64)
        for start in range(0, len(self), AT_ONCE):
            block = range(start, min(start + AT_ONCE, len(self)))
            ids = []
            for i in block:
                question = self.row(i).question
                ids.append(question.id)
                columns[LENGTH, i] = len(question.text.encode())
            columns[: CHECK + 1, start : block.stop] = hash_ids(ids)
        return columns


def _names(corpus: Corpus) -> str:
    return corpus.rows.files[0] + (f" and {len(corpus.rows.files) - 1} more" if len(corpus.rows.files) > 1 else "")


# ---- BEIR folders --------------------------------------------------------------------------------------------------


class BeirQuestions:
    """The questions of a BEIR folder with a judgement above 0 in qrels/<split>.tsv, in the order of queries.jsonl.

    corpus: another one than the folder's own corpus.jsonl. columns of the kept array, one after the other: number of
    questions n, position of each in queries.jsonl (n), where its right passages begin (n + 1), their positions.
    """

    def __init__(self, folder: str, split: str, corpus: Corpus | None, key: str) -> None:
        self.queries = open_corpus(os.path.join(folder, "queries.jsonl"), key)
        self.corpus = corpus or open_corpus(os.path.join(folder, "corpus.jsonl"), key)
        qrels = qrels_file(folder, split, _asked(folder, key))
        state = [FORMAT, self.queries.fingerprint, self.corpus.fingerprint, sha256_of(qrels)]
        self.fingerprint = _digest(state)
        files = [*self.queries.rows.files, *self.corpus.rows.files]
        self._mapped = cached_array([qrels], "judged", files, state, lambda: self._checked(qrels))
        self._count = int(self._mapped.array[0])
        name = os.path.join(os.path.basename(os.path.normpath(folder)), "qrels", f"{split}.tsv")
        self.files = [FileEntry(name, os.path.getsize(qrels), self._count, self.fingerprint)]

    def __len__(self) -> int:
        return self._count

    @property
    def columns(self) -> Int64s:
        rows = self._mapped.array[1 : 1 + self._count]
        return np.stack([*self.queries.id_hashes[:, rows], self.queries.lengths[rows]])

    def origin(self, i: int) -> tuple[str, str]:
        return self.queries.rows.origin(int(self._mapped.array[1 + i]))

    def question(self, i: int) -> Question:
        return self._query(int(self._mapped.array[1 + i]))

    def row(self, i: int) -> Row:
        starts = 1 + self._count
        begin, end = self._mapped.array[starts + i : starts + i + 2] + (starts + self._count + 1)
        right = np.array(self._mapped.array[begin:end])
        return Row(self.question(i), Chosen(self.corpus, right), Inline(()), Inline(()))

    def _query(self, row: int) -> Question:
        try:
            return query_of(self.queries.rows.fields(row))
        except BadRow as error:
            raise DataError(f"{self.queries.rows.where(row)}: {error}") from None

    def _checked(self, qrels: str) -> Int64s:
        """The kept array; every question that is asked was read once."""
        judged = _grouped(*_judgements(qrels, self.queries, self.corpus))
        for row in judged[1 : 1 + judged[0]].tolist():
            self._query(row)
        return judged


def _asked(folder: str, key: str) -> str:
    return f"{key}={folder}: data.question.split"


def qrels_file(folder: str, split: str, asked: str) -> str:
    """Where a split is judged; ConfigError, naming the key that `asked` for it, when there is no such split."""
    path = Path(local_path(folder), "qrels", f"{split}.tsv")
    if not path.is_file():
        splits = sorted(file.stem for file in path.parent.glob("*.tsv"))
        raise ConfigError(
            f"{asked}={split}: there is no {path}. Splits are {', '.join(splits) or 'none'}.{nearest(split, splits)}"
        )
    return str(path)


def judgements(path: str) -> Iterator[tuple[int, str, str, int]]:
    """(line, question id, passage id, grade) of a BEIR .tsv: 'query-id corpus-id score', tabs between. DataError."""
    with open(path, "rb") as file:
        for line, content in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if len(content) == MAX_LINE:
                raise DataError(f"{path}: line {line} is longer than {MAX_LINE - 1} bytes: no judgement")
            try:
                question, passage, grade = content.decode("utf-8").rstrip("\r\n").split("\t")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: line {line} is not UTF-8: {error.reason} at byte {error.start}") from None
            except ValueError:
                raise DataError(
                    f"{path}: line {line} is {content!r:.80}, not question id, passage id and grade with tabs between"
                ) from None
            if re.fullmatch(r"-?[0-9]{1,9}", grade):
                yield line, question, passage, int(grade)
            elif line > 1 or re.match(r"[-+]?[0-9]", grade):  # else the names of the columns
                raise DataError(f"{path}: line {line}: the grade {grade!r:.40} is no whole number")


def _judgements(path: str, queries: Corpus, corpus: Corpus) -> tuple[Int64s, Int64s]:
    """(m,), (m,): positions of question and passage of each judgement above 0."""
    found: tuple[array[int], array[int]] = (array("q"), array("q"))
    right = ((line, question, passage) for line, question, passage, grade in judgements(path) if grade > 0)
    while block := list(islice(right, AT_ONCE)):
        lines, *sides = zip(*block, strict=True)
        for column, place, ids, positions in zip((queries, corpus), ("question", "passage"), sides, found, strict=True):
            where = column.positions(ids)
            if (where < 0).any():
                wrong = int(np.argmin(where))
                raise DataError(f"{path}: line {lines[wrong]}: {place} id '{ids[wrong]}' is not in {_names(column)}")
            positions.extend(where.tolist())
    return np.asarray(found[0], np.int64), np.asarray(found[1], np.int64)


def _grouped(questions: Int64s, passages: Int64s) -> Int64s:
    """The kept array; of a judgement that is there twice, one."""
    pairs = np.unique(np.stack([questions, passages]), axis=1)
    rows, counts = np.unique(pairs[0], return_counts=True)
    return np.concatenate([[len(rows)], rows, [0], np.cumsum(counts), pairs[1]]).astype(np.int64)

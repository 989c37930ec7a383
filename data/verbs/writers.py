"""Questions and passages as files of each format that `python -m data pack` writes, one row after the other.

    shards        000000.tar …: DPR's fields as the json member of each sample
    dpr           SPLIT.json: an array {question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}
    tevatron      SPLIT.jsonl: {query_id, query, answers, positive_passages, negative_passages}
    tevatron_ids  SPLIT.jsonl: {query_id, query_text, answers, positive_document_ids, negative_document_ids}
    flag          SPLIT.jsonl: {query, pos, neg}
    beir          queries.jsonl {_id, text, metadata}, qrels/SPLIT.tsv (query-id, corpus-id, score)

All passages of a source are corpus.jsonl: {docid, title, text}, in beir {_id, title, text}, in dpr corpus.tsv with id,
text and title. tevatron_ids and beir need them; for dpr and tevatron they are written where the source has such a file.
Every row of a .jsonl has the same fields, as readers of JSON-lines into tables need it (datasets, pyarrow).
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data.corpus import Corpus
from data.errors import BadRow, DataError
from data.keys import key_name
from data.passages import Passage, Question
from data.questions import QuestionRow
from data.scan import MAX_BYTES
from data.verbs.options import PackOptions, Target
from data.verbs.outputs import shard_writer

Fields = dict[str, Any]
Write = Callable[[QuestionRow], bool]  # whether the row stays one of its own
IN_TABLE = '\t\r\n"'  # what an id in a table cannot have, since some readers split lines without csv


def json_bytes(fields: Fields) -> bytes:
    """Raises BadRow for what no reader of ours would take: ids are short, what they stand for is not."""
    content = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    if len(content) > MAX_BYTES["json"]:
        raise BadRow("json too long", f"more than {MAX_BYTES['json']} bytes")
    return content


def passage_id(passage: Passage) -> str:
    """Its id; where it has none, one made of its content, so that equal passages share it."""
    return key_name(passage.key) if passage.id is None else passage.id


def question_id(question: Question) -> str:
    return question.id or key_name(question.key)


# ---- rows as fields ------------------------------------------------------------------------------------------------


def dpr_fields(row: QuestionRow) -> Fields:
    """Fields that DPR does not know, which it passes over, are there where the source gives them."""
    lists = {"positive": row.positives, "negative": row.negatives, "hard_negative": row.hard_negatives}
    return {
        **({"query_id": row.question.id} if row.question.id else {}),
        **_metadata(row.question),
        "question": row.question.text,
        "answers": [*row.question.answers],
        **{f"{name}_ctxs": [_context(passage) for passage in passages] for name, passages in lists.items()},
    }


def _metadata(question: Question) -> Fields:
    return {} if question.group is None else {"metadata": {"topic": question.group}}


def _context(passage: Passage) -> Fields:
    fields = {"title": passage.title, "text": passage.text}
    return fields if passage.id is None else {**fields, "passage_id": passage.id}


def tevatron_fields(row: QuestionRow) -> Fields:
    return {
        "query_id": question_id(row.question),
        "query": row.question.text,
        "answers": [*row.question.answers],
        "positive_passages": [_document("docid", passage) for passage in row.positives],
        "negative_passages": [_document("docid", passage) for passage in _negatives(row)],
    }


def tevatron_ids_fields(row: QuestionRow) -> Fields:
    return {
        "query_id": question_id(row.question),
        "query_text": row.question.text,
        "answers": [*row.question.answers],
        "positive_document_ids": [passage_id(passage) for passage in row.positives],
        "negative_document_ids": [passage_id(passage) for passage in _negatives(row)],
    }


def flag_fields(row: QuestionRow) -> Fields:
    return {
        "query": row.question.text,
        "pos": [passage.text for passage in row.positives],
        "neg": [passage.text for passage in _negatives(row)],
    }


def _document(id_key: str, passage: Passage) -> Fields:
    return {id_key: passage_id(passage), "title": passage.title, "text": passage.text}


def _negatives(row: QuestionRow) -> Iterator[Passage]:
    """For formats with one list: the hard ones first."""
    yield from row.hard_negatives
    yield from row.negatives


# ---- files of rows -------------------------------------------------------------------------------------------------


def _lines(fields: Callable[[QuestionRow], Fields]) -> Callable[[Path, PackOptions], Any]:
    @contextmanager
    def opened(folder: Path, options: PackOptions) -> Iterator[Write]:
        with (folder / f"{options.split}.jsonl").open("wb") as file:
            yield lambda row: _put(file, json_bytes(fields(row)), b"\n")

    return opened


@contextmanager
def _array(folder: Path, options: PackOptions) -> Iterator[Write]:
    """A JSON array with a row on each line."""
    with (folder / f"{options.split}.json").open("wb") as file:
        separators = iter([b"[\n"])

        def write(row: QuestionRow) -> bool:
            content = json_bytes(dpr_fields(row))  # a bad row has no separator
            return _put(file, next(separators, b",\n"), content)

        yield write
        file.write(b"\n]\n")


@contextmanager
def _shards(folder: Path, options: PackOptions) -> Iterator[Write]:
    """Samples are named by their number among the good rows."""
    number = 0
    with shard_writer(folder, options) as write_sample:

        def write(row: QuestionRow) -> bool:
            nonlocal number
            write_sample({"__key__": f"{number:09d}", "json": json_bytes(dpr_fields(row))})
            number += 1
            return True

        yield write


@contextmanager
def _beir(folder: Path, options: PackOptions) -> Iterator[Write]:
    """Rows of one question become one: queries and pairs are written when they come first."""
    qrels = folder / "qrels" / f"{options.split}.tsv"
    qrels.parent.mkdir()
    with (folder / "queries.jsonl").open("wb") as queries, qrels.open("wb") as judged, seen(folder, "beir") as known:
        judged.write(b"query-id\tcorpus-id\tscore\n")

        def write(row: QuestionRow) -> bool:
            name, right = question_id(row.question), dict.fromkeys(passage_id(passage) for passage in row.positives)
            for part in (name, *right):
                _refuse_in_table(part)
            new = known.new(name, row.question.key, "question")
            if new:
                _put(queries, json_bytes({"_id": name, "text": row.question.text, **_metadata(row.question)}), b"\n")
            pairs = [pair for pair in (f"{name}\t{passage}" for passage in right) if known.new(pair, 1, "pair")]
            _put(judged, *(f"{pair}\t1\n".encode() for pair in pairs))
            return new

        yield write


def _put(file: BinaryIO, *contents: bytes) -> bool:
    file.write(b"".join(contents))
    return True


def _refuse_in_table(name: str) -> None:
    if any(character in name for character in IN_TABLE):
        raise BadRow("id that a table cannot hold", f"{name!r:.80} has a tab, line break or quote")


ROWS: dict[Target, Callable[[Path, PackOptions], Any]] = {
    Target.shards: _shards,
    Target.dpr: _array,
    Target.tevatron: _lines(tevatron_fields),
    Target.tevatron_ids: _lines(tevatron_ids_fields),
    Target.flag: _lines(flag_fields),
    Target.beir: _beir,
}


# ---- files of passages ---------------------------------------------------------------------------------------------


def _table_line(passage: Passage) -> bytes:
    name = passage_id(passage)
    _refuse_in_table(name)
    line = io.StringIO()
    # csv quotes a cell for the characters of the line's end that are in it, so both are named here
    csv.writer(line, delimiter="\t", lineterminator="\r\n").writerow([name, passage.text, passage.title])
    return line.getvalue().encode()[:-2] + b"\n"


def _outer_quotes(passage: Passage) -> int:
    """A table has none: its readers take those of a text for csv's own."""
    return sum(part != part.strip('"') for part in (passage.text, passage.title))


@dataclass(frozen=True)
class CorpusFormat:
    """lost: by name, how much of it a passage has that this file cannot hold."""

    name: str
    line: Callable[[Passage], bytes]
    header: bytes = b""
    lost: Mapping[str, Callable[[Passage], int]] = field(default_factory=dict)


_DOCUMENTS = CorpusFormat("corpus.jsonl", lambda passage: json_bytes(_document("docid", passage)) + b"\n")
CORPORA = {
    Target.dpr: CorpusFormat("corpus.tsv", _table_line, b"id\ttext\ttitle\n", {"outer quotes of texts": _outer_quotes}),
    Target.tevatron: _DOCUMENTS,
    Target.tevatron_ids: _DOCUMENTS,
    Target.beir: CorpusFormat("corpus.jsonl", lambda passage: json_bytes(_document("_id", passage)) + b"\n"),
}


class CorpusWriter:
    """A corpus that grows by the passages that are new; each id once. source: a corpus that is copied into it first."""

    def __init__(self, file: BinaryIO, form: CorpusFormat, known: Seen, source: Corpus | None) -> None:
        self.file, self.form, self.known, self.source = file, form, known, source
        self.count, self.lost = 0, Counter[str]()
        file.write(form.header)

    def copy(self, passages: Iterable[Passage]) -> None:
        """Those of `source`. Raises DataError for one that the file cannot hold: the rows need them all."""
        for passage in passages:
            try:
                self._write(passage, self.form.line(passage))
            except BadRow as bad:
                raise DataError(f"corpus: passage {self.count + 1}: {bad}") from None

    def add(self, passages: Iterable[Passage]) -> int:
        """Write the new ones, all or, when it raises BadRow, none; returns their number."""
        fresh: dict[str, tuple[Passage, bytes]] = {}
        for passage in passages:
            name = passage_id(passage)
            there = fresh[name][0].key if name in fresh else self._key(name)
            if there is None:
                fresh[name] = passage, self.form.line(passage)
            elif there != passage.key:
                raise BadRow("passage id with two texts", f"'{name}'")
        for name, (passage, line) in fresh.items():
            self._write(passage, line)
            self.known.new(name, passage.key, "passage")
        return len(fresh)

    def _key(self, name: str) -> int | None:
        """Content key of the passage with this id, if it is there."""
        if self.source is not None and (position := int(self.source.positions([name])[0])) >= 0:
            return int(self.source.keys[position])
        return self.known.key(name)

    def _write(self, passage: Passage, line: bytes) -> None:
        self.file.write(line)
        self.count += 1
        for what, lost in self.form.lost.items():
            self.lost[what] += lost(passage)


@contextmanager
def corpus_writer(folder: Path, target: Target, source: Corpus | None) -> Iterator[CorpusWriter]:
    form = CORPORA[target]
    with (folder / form.name).open("wb") as file, seen(folder, "passages") as known:
        yield CorpusWriter(file, form, known, source)


# ---- what was written ----------------------------------------------------------------------------------------------


class Seen:
    """Ids that were written, and the key of what each stands for; on disk, since there may be many millions."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self.base = base
        base.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, key INTEGER) WITHOUT ROWID")
        base.execute("BEGIN")

    def key(self, name: str) -> int | None:
        found = self.base.execute("SELECT key FROM seen WHERE id = ?", (name,)).fetchone()
        return None if found is None else int(found[0])

    def new(self, name: str, key: int, what: str) -> bool:
        """Whether the id is new; it is known afterwards. Raises BadRow when it stands for something else already."""
        there = self.key(name)
        if there is None:
            self.base.execute("INSERT INTO seen VALUES (?, ?)", (name, key))
        elif there != key:
            raise BadRow(f"{what} id with two texts", f"'{name}'")
        return there is None


@contextmanager
def seen(folder: Path, name: str) -> Iterator[Seen]:
    path = folder / f".{name}.sqlite"
    base = sqlite3.connect(path, isolation_level=None)
    try:
        base.execute("PRAGMA journal_mode = OFF")
        base.execute("PRAGMA synchronous = OFF")
        yield Seen(base)
    finally:
        base.close()
        path.unlink()

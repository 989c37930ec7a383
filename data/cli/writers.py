"""Writers of the formats of `python -m data pack` for questions and passages, one row after the other.

    shards        000000.tar …: DPR's fields as the json member of each sample
    dpr           SPLIT.json: an array {question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}
    tevatron      SPLIT.jsonl: {query_id, query, answers, positive_passages, negative_passages}
    tevatron_ids  SPLIT.jsonl: {query_id, query_text, answers, positive_document_ids, negative_document_ids}
    flag          SPLIT.jsonl: {query, pos, neg}
    beir          queries.jsonl {_id, text, metadata}, qrels/SPLIT.tsv (query-id, corpus-id, score)

The passages of a source are corpus.jsonl: {docid, title, text}, in beir {_id, title, text}; in dpr they are corpus.tsv
with id, text and title. tevatron_ids and beir need this file; dpr and tevatron get it where the source has one.
Every row of a .jsonl has the same fields: readers of JSON lines into tables need it (datasets, pyarrow).
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from dyad.data.base.errors import BadRow, DataError
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.outputs import shard_writer
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import QuestionRow
from dyad.data.shards.content_keys import key_name
from dyad.data.shards.scan_tar import MAX_BYTES

Fields = dict[str, Any]
Dropped = Counter[str]  # by name, how much of the source the new files cannot hold
RowFields = Callable[[QuestionRow, Dropped], Fields]
Write = Callable[[QuestionRow, Dropped], bool]  # False when the row was joined with an earlier one
PassageLine = Callable[[Passage, Dropped], bytes]
IN_TABLE = '\t\r\n"'  # characters that an id in a table cannot have: some readers split lines without csv


def json_bytes(fields: Fields) -> bytes:
    """The fields as JSON. Raises BadRow when it is longer than our readers take: the source may name texts by ids."""
    content = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    if len(content) > MAX_BYTES["json"]:
        raise BadRow("json too long", f"more than {MAX_BYTES['json']} bytes")
    return content


def passage_id(passage: Passage) -> str:
    """The id of a passage; without one, an id made of its content, so that equal passages share it."""
    return key_name(passage.key) if passage.id is None else passage.id


def question_id(question: Question) -> str:
    return question.id or key_name(question.key)


# ---- rows as fields ------------------------------------------------------------------------------------------------
# Each function adds to `dropped` how much of the row the format cannot hold.


def dpr_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    """The fields of DPR, and an id and metadata where the source gives them, which DPR ignores."""
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


def tevatron_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    dropped["question groups"] += row.question.group is not None
    return {
        "query_id": question_id(row.question),
        "query": row.question.text,
        "answers": [*row.question.answers],
        "positive_passages": [_document("docid", passage) for passage in row.positives],
        "negative_passages": [_document("docid", passage) for passage in _one_list(row, dropped)],
    }


def tevatron_ids_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    dropped["question groups"] += row.question.group is not None
    return {
        "query_id": question_id(row.question),
        "query_text": row.question.text,
        "answers": [*row.question.answers],
        "positive_document_ids": [passage_id(passage) for passage in row.positives],
        "negative_document_ids": [passage_id(passage) for passage in _one_list(row, dropped)],
    }


def flag_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    passages = [*row.positives, *row.negatives, *row.hard_negatives]
    dropped["question ids"] += bool(row.question.id)
    dropped["answers"] += len(row.question.answers)
    dropped["question groups"] += row.question.group is not None
    dropped["titles"] += sum(bool(passage.title) for passage in passages)
    dropped["passage ids"] += sum(passage.id is not None for passage in passages)
    return {
        "query": row.question.text,
        "pos": [passage.text for passage in row.positives],
        "neg": [passage.text for passage in _one_list(row, dropped)],
    }


def _document(id_key: str, passage: Passage) -> Fields:
    return {id_key: passage_id(passage), "title": passage.title, "text": passage.text}


def _one_list(row: QuestionRow, dropped: Dropped) -> list[Passage]:
    """The negatives for formats that have one list of them: the hard ones first."""
    dropped["marks that a negative is a plain one"] += len(row.negatives)
    return [*row.hard_negatives, *row.negatives]


# ---- files of rows -------------------------------------------------------------------------------------------------


def _lines(fields: RowFields) -> Callable[[Path, PackOptions], Any]:
    @contextmanager
    def opened(folder: Path, options: PackOptions) -> Iterator[Write]:
        with (folder / f"{options.split}.jsonl").open("wb") as file:

            def write(row: QuestionRow, dropped: Dropped) -> bool:
                file.write(json_bytes(fields(row, dropped)) + b"\n")
                return True

            yield write

    return opened


@contextmanager
def _array(folder: Path, options: PackOptions) -> Iterator[Write]:
    """A JSON array with a row on each line."""
    with (folder / f"{options.split}.json").open("wb") as file:
        separators = iter([b"[\n"])

        def write(row: QuestionRow, dropped: Dropped) -> bool:
            content = json_bytes(dpr_fields(row, dropped))  # first: a bad row must not take a separator
            file.write(next(separators, b",\n") + content)
            return True

        yield write
        file.write(b"\n]\n")


@contextmanager
def _shards(folder: Path, options: PackOptions) -> Iterator[Write]:
    """Samples are named by their number among the good rows."""
    numbers = count()
    with shard_writer(folder, options) as write_sample:

        def write(row: QuestionRow, dropped: Dropped) -> bool:
            content = json_bytes(dpr_fields(row, dropped))  # first: a bad row must not take a number
            write_sample({"__key__": f"{next(numbers):09d}", "json": content})
            return True

        yield write


@contextmanager
def _beir(folder: Path, options: PackOptions) -> Iterator[Write]:
    """Rows of one question become one: a question or a pair that was written before is not written again."""
    qrels = folder / "qrels" / f"{options.split}.tsv"
    qrels.parent.mkdir()
    with (
        (folder / "queries.jsonl").open("wb") as queries,
        qrels.open("wb") as judged,
        written_ids(folder, "beir") as written,
    ):
        judged.write(b"query-id\tcorpus-id\tscore\n")

        def write(row: QuestionRow, dropped: Dropped) -> bool:
            name = question_id(row.question)
            relevant = dict.fromkeys(passage_id(passage) for passage in row.positives)
            for part in (name, *relevant):
                _refuse_in_table(part)
            new = written.add(name, row.question.key, "question")
            if new:
                content = json_bytes({"_id": name, "text": row.question.text, **_metadata(row.question)})
                queries.write(content + b"\n")
            for pair in (f"{name}\t{passage}" for passage in relevant):
                if written.add(pair, 1, "pair"):
                    judged.write(f"{pair}\t1\n".encode())
            dropped["answers"] += len(row.question.answers)
            dropped["negatives"] += len(row.negatives)
            dropped["hard negatives"] += len(row.hard_negatives)
            return new

        yield write


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


def _table_line(passage: Passage, dropped: Dropped) -> bytes:
    name = passage_id(passage)
    _refuse_in_table(name)
    line = io.StringIO()
    # csv quotes a cell that holds a character of the line end, so both characters are named and the line is cut
    csv.writer(line, delimiter="\t", lineterminator="\r\n").writerow([name, passage.text, passage.title])
    # readers of such tables take quotes around a text for those of csv
    dropped["outer quotes of texts"] += sum(part != part.strip('"') for part in (passage.text, passage.title))
    return line.getvalue().encode()[:-2] + b"\n"


def _json_line(id_key: str) -> PassageLine:
    return lambda passage, dropped: json_bytes(_document(id_key, passage)) + b"\n"


@dataclass(frozen=True)
class CorpusFormat:
    """A file of passages: its name, what makes a line of a passage, and the first line."""

    name: str
    line: PassageLine
    header: bytes = b""


CORPORA = {
    Target.dpr: CorpusFormat("corpus.tsv", _table_line, b"id\ttext\ttitle\n"),
    Target.tevatron: CorpusFormat("corpus.jsonl", _json_line("docid")),
    Target.tevatron_ids: CorpusFormat("corpus.jsonl", _json_line("docid")),
    Target.beir: CorpusFormat("corpus.jsonl", _json_line("_id")),
}


class CorpusWriter:
    """Writes a corpus with each id once. source: a corpus whose passages are copied into it first, or None.

    count: passages written. dropped: what of them the file cannot hold.
    """

    def __init__(self, file: BinaryIO, form: CorpusFormat, written: WrittenIds, source: Corpus | None) -> None:
        self.file, self.form, self.written, self.source = file, form, written, source
        self.count, self.dropped = 0, Counter[str]()
        file.write(form.header)

    def copy(self, passages: Iterable[Passage]) -> None:
        """Write the passages of `source`. Raises DataError for one that the file cannot hold: rows may need it."""
        for passage in passages:
            try:
                self.file.write(self.form.line(passage, self.dropped))
            except BadRow as bad:
                raise DataError(f"corpus: passage {self.count + 1}: {bad}") from None
            self.count += 1

    def add(self, passages: Iterable[Passage]) -> int:
        """Write the new passages; returns their number. Raises BadRow, and writes none, when one cannot be written."""
        new: dict[str, tuple[int, bytes]] = {}
        dropped = Counter[str]()
        for passage in passages:
            name = passage_id(passage)
            key = new[name][0] if name in new else self._key(name)
            if key is None:
                new[name] = passage.key, self.form.line(passage, dropped)
            elif key != passage.key:
                raise BadRow("passage id with two texts", f"'{name}'")
        for name, (key, line) in new.items():
            self.file.write(line)
            self.written.add(name, key, "passage")
        self.count += len(new)
        self.dropped.update(dropped)
        return len(new)

    def _key(self, name: str) -> int | None:
        """Content key of the passage with this id, None where no passage has it yet."""
        if self.source is not None and (position := int(self.source.positions([name])[0])) >= 0:
            return int(self.source.keys[position])
        return self.written.key(name)


@contextmanager
def corpus_writer(folder: Path, target: Target, source: Corpus | None) -> Iterator[CorpusWriter]:
    form = CORPORA[target]
    with (folder / form.name).open("wb") as file, written_ids(folder, "passages") as written:
        yield CorpusWriter(file, form, written, source)


# ---- what was written ----------------------------------------------------------------------------------------------


class WrittenIds:
    """Ids that were written, each with the content key of what it names. On disk: there may be many millions."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self.base = base
        base.execute("CREATE TABLE written (id TEXT PRIMARY KEY, key INTEGER) WITHOUT ROWID")
        base.execute("BEGIN")

    def key(self, name: str) -> int | None:
        found = self.base.execute("SELECT key FROM written WHERE id = ?", (name,)).fetchone()
        return None if found is None else int(found[0])

    def add(self, name: str, key: int, what: str) -> bool:
        """Add an id; whether it is new. Raises BadRow when it names something else already."""
        known = self.key(name)
        if known is None:
            self.base.execute("INSERT INTO written VALUES (?, ?)", (name, key))
        elif known != key:
            raise BadRow(f"{what} id with two texts", f"'{name}'")
        return known is None


@contextmanager
def written_ids(folder: Path, name: str) -> Iterator[WrittenIds]:
    path = folder / f".{name}.sqlite"
    base = sqlite3.connect(path, isolation_level=None)
    try:
        base.execute("PRAGMA journal_mode = OFF")  # the file is deleted at the end: it needs no safety
        base.execute("PRAGMA synchronous = OFF")
        yield WrittenIds(base)
    finally:
        base.close()
        path.unlink()

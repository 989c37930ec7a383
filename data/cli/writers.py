"""Write questions and passages for `python -m data pack`, one row at a time. The files of each format:

    shards        000000.tar …: DPR's fields as the json member of each sample
    dpr           SPLIT.json: an array {question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}; a positive
                  has a field relevance, and every passage a field teacher, if the options are set
    tevatron      SPLIT.jsonl: {query_id, query, answers, positive_passages, negative_passages}
    tevatron_ids  SPLIT.jsonl: {query_id, query_text, answers, positive_document_ids, negative_document_ids}
    flag          SPLIT.jsonl: {query, pos, neg}, and pos_scores if the option relevance is set, pos_scores and
                  neg_scores if the option teacher is set
    beir          queries.jsonl {_id, text, metadata}, qrels/SPLIT.tsv (query-id, corpus-id, score, which is 1)

SPLIT is the option split. A corpus is written to corpus.jsonl: {docid, title, text}, in beir {_id, title, text}; in dpr
to corpus.tsv with the columns id, text and title. tevatron_ids and beir always have a corpus; dpr and tevatron have one
if the input has one. In shards and dpr a question with an id has a field query_id, one with a group a field metadata.
All rows of a .jsonl file have the same fields, as datasets and pyarrow need it; metadata is {} without a group.
"""

import csv
import io
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO

from dyad.data.base.errors import BadRow, DataError
from dyad.data.cli.options import PackOptions, Target, WriteOptions
from dyad.data.cli.outputs import AddSample, shard_writer
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import QuestionRow
from dyad.data.shards.content_keys import key_name
from dyad.data.tables.image_table import json_bytes

Fields = dict[str, Any]
Dropped = Counter[str]  # name of a part of the data → how many of these parts the new files cannot hold
WriteRow = Callable[[QuestionRow, Dropped], bool]  # returns False when the row was joined with an earlier one
PassageLine = Callable[[Passage, Dropped], bytes]
RELEVANCE = {Target.shards: "relevance", Target.dpr: "relevance", Target.flag: "pos_scores"}  # field with relevances
TEACHER = {Target.shards: "teacher", Target.dpr: "teacher", Target.flag: "scores"}  # values of data.teacher
IN_TABLE = '\t\r\n"'  # characters that an id in a table cannot have: some readers split lines without csv


def passage_id(passage: Passage) -> str:
    """Return the id of a passage; if it has none, an id made of its title and text, equal for equal passages."""
    return key_name(passage.key) if passage.id is None else passage.id


def question_id(question: Question) -> str:
    """Return the id of a question; if it has none, an id made of its text."""
    return question.id or key_name(question.key)


# ---- rows as fields ------------------------------------------------------------------------------------------------
# Each function adds to `dropped` the number of parts of the row that the format cannot hold.


def dpr_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    """Return a question and its passages as the fields of a DPR row.

    If the question has an id, the field query_id is added; if it has a group (its topic), the field metadata. DPR's own
    reader ignores both fields. dropped: counts of parts that the format cannot hold, which this function leaves
    unchanged, as DPR holds all parts.
    """
    lists = {"negative": row.negatives, "hard_negative": row.hard_negatives}
    relevance = row.relevance or [None] * len(row.positives)
    return {
        **({"query_id": row.question.id} if row.question.id else {}),
        **_metadata(row.question),
        "question": row.question.text,
        "answers": [*row.question.answers],
        "positive_ctxs": [_context(*told) for told in zip(row.positives, relevance, strict=True)],
        **{f"{name}_ctxs": [_context(passage) for passage in passages] for name, passages in lists.items()},
    }


def _metadata(question: Question) -> Fields:
    """Return the field metadata with the question's group as topic; {} if the question has no group."""
    return {} if question.group is None else {"metadata": {"topic": question.group}}


def _context(passage: Passage, relevance: float | None = None) -> Fields:
    """Return a passage as an entry of a list of a DPR row. relevance: its weight as a positive; None: it has none."""
    fields: Fields = {"title": passage.title, "text": passage.text}
    fields |= {} if passage.id is None else {"passage_id": passage.id}
    fields |= {} if passage.teacher is None else {TEACHER[Target.dpr]: passage.teacher}
    return fields if relevance is None else {**fields, RELEVANCE[Target.dpr]: relevance}


def tevatron_fields(key: str, kind: str, entry: Callable[[Passage], Any], row: QuestionRow, dropped: Dropped) -> Fields:
    """Return a question and its passages as the fields of a row in one of the two Tevatron formats.

    key: name of the field for the question's text. kind: ending of the names of the two fields for passages, which
    begin with positive_ and negative_. entry: converts a passage to an entry of these fields. dropped: counts of the
    parts that the format cannot hold, which this function increases.
    """
    dropped["question groups"] += row.question.group is not None
    dropped["relevances"] += len(row.relevance or ())
    dropped["scores of a teacher"] += sum(passage.teacher is not None for each in row.lists for passage in each)
    return {
        "query_id": question_id(row.question),
        key: row.question.text,
        "answers": [*row.question.answers],
        f"positive_{kind}": [entry(passage) for passage in row.positives],
        f"negative_{kind}": [entry(passage) for passage in _one_list(row, dropped)],
    }


def flag_fields(row: QuestionRow, dropped: Dropped) -> Fields:
    """Return a question and its passages as the fields of a FlagEmbedding row, which has only texts and scores.

    Counts in `dropped` the parts that are lost: ids, titles, answers, question groups (topics), and the difference
    between hard and other negatives.
    """
    passages = [*row.positives, *row.negatives, *row.hard_negatives]
    dropped["question ids"] += bool(row.question.id)
    dropped["answers"] += len(row.question.answers)
    dropped["question groups"] += row.question.group is not None
    dropped["titles"] += sum(bool(passage.title) for passage in passages)
    dropped["passage ids"] += sum(passage.id is not None for passage in passages)
    lists = {"pos": row.positives, "neg": _one_list(row, dropped)}
    taught = any(passage.teacher is not None for passage in row.positives)
    return {
        "query": row.question.text,
        **{name: [passage.text for passage in each] for name, each in lists.items()},
        **({} if row.relevance is None else {RELEVANCE[Target.flag]: [*row.relevance]}),
        **({f"{name}_scores": [passage.teacher for passage in each] for name, each in lists.items()} if taught else {}),
    }


def _document(id_key: str, passage: Passage) -> Fields:
    """Return a passage as an object with id, title and text. id_key: the name of the field for the id."""
    return {id_key: passage_id(passage), "title": passage.title, "text": passage.text}


def _one_list(row: QuestionRow, dropped: Dropped) -> list[Passage]:
    """Return all negatives of a question row, the hard negatives first, for formats with only one list of negatives.

    Counts in `dropped` the negatives that were not hard, because the new file does not tell them from hard ones.
    """
    dropped["marks that a negative is a plain one"] += len(row.negatives)
    return [*row.hard_negatives, *row.negatives]


# ---- files of rows -------------------------------------------------------------------------------------------------
# The first three are context managers that yield a function, which adds the json member of a sample to a new file.


@contextmanager
def _lines(file: BinaryIO) -> Iterator[AddSample]:
    """Context manager that yields a function to add a sample's json member to `file` as a line of JSON-lines."""
    yield lambda sample: file.write(sample["json"] + b"\n")


@contextmanager
def _array(file: BinaryIO) -> Iterator[AddSample]:
    """Context manager that yields a function to add a sample's json member to `file` as an element of a JSON array.
    Without a sample the file is no valid JSON."""
    separators = chain([b"[\n"], repeat(b",\n"))
    yield lambda sample: file.write(next(separators) + sample["json"])
    file.write(b"\n]\n")


@contextmanager
def _json_file(suffix: str, folder: Path, options: WriteOptions) -> Iterator[AddSample]:
    """Context manager that opens a new file in `folder`, named options.split + `suffix`, and yields a function. The
    function adds the json member of a sample to the file. suffix: ".jsonl" or ".json"."""
    with (folder / f"{options.split}{suffix}").open("wb") as file, JSON_ROWS[suffix](file) as add:
        yield add


@contextmanager
def _beir(folder: Path, options: PackOptions, written: "WrittenIds") -> Iterator[WriteRow]:
    """Context manager that opens the files of questions and judgements of a new BEIR folder, and yields a function.

    The function writes one question row, and returns whether the question was new. It deduplicates: a question, or a
    judgement (pair of question and passage), that an earlier row has written is not written again. What BEIR cannot
    hold, such as answers and negatives, is only counted. written: the ids of the questions and pairs written before.
    Errors as of `row_writer`.
    """
    qrels = folder / "qrels" / f"{options.split}.tsv"
    qrels.parent.mkdir()
    with (folder / "queries.jsonl").open("wb") as queries, qrels.open("wb") as judged:
        judged.write(b"query-id\tcorpus-id\tscore\n")

        def write(row: QuestionRow, dropped: Dropped) -> bool:
            name = question_id(row.question)
            relevant = dict.fromkeys(passage_id(passage) for passage in row.positives)
            for part in (name, *relevant):
                _refuse_in_table(part)
            new = written.add("question", name, row.question.key)
            if new:
                fields = {"_id": name, "text": row.question.text, "metadata": {}, **_metadata(row.question)}
                queries.write(json_bytes(fields) + b"\n")
            for pair in (f"{name}\t{passage}" for passage in relevant):
                if written.add("pair", pair, 1):
                    judged.write(f"{pair}\t1\n".encode())
            dropped["answers"] += len(row.question.answers)
            dropped["relevances"] += len(row.relevance or ())
            dropped["scores of a teacher"] += sum(passage.teacher is not None for passage in row.positives)
            dropped["negatives"] += len(row.negatives)
            dropped["hard negatives"] += len(row.hard_negatives)
            return new

        yield write


def _refuse_in_table(name: str) -> None:
    """Raise BadRow for an id with a tab, a line break or a quote, which would break a table."""
    if any(character in name for character in IN_TABLE):
        raise BadRow("id that a table cannot hold", f"{name!r:.80} has a tab, line break or quote")


JSON_ROWS = {".jsonl": _lines, ".json": _array}  # suffix → context manager that writes a file of this suffix
ROW_FILES = {".tar": shard_writer} | {suffix: partial(_json_file, suffix) for suffix in JSON_ROWS}  # for split
ROWS = {
    Target.shards: (shard_writer, dpr_fields),
    Target.dpr: (ROW_FILES[".json"], dpr_fields),
    Target.tevatron: (ROW_FILES[".jsonl"], partial(tevatron_fields, "query", "passages", partial(_document, "docid"))),
    Target.tevatron_ids: (ROW_FILES[".jsonl"], partial(tevatron_fields, "query_text", "document_ids", passage_id)),
    Target.flag: (ROW_FILES[".jsonl"], flag_fields),
}


@contextmanager
def row_writer(folder: Path, options: PackOptions, written: "WrittenIds") -> Iterator[WriteRow]:
    """Context manager that yields a function to write a question and its passages to `folder` as `options.to` asks.

    The function returns whether it wrote the question: False only in the format beir, when an earlier row had the same
    question. New judgements of such a row are written nevertheless. The function raises BadRow as `json_bytes` does; in
    the format beir also for an id that a table cannot hold, and for a question id with two texts. written: the ids that
    were written before, which only the format beir uses.
    """
    if options.to is Target.beir:
        with _beir(folder, options, written) as write:
            yield write
        return
    opened, fields = ROWS[options.to]
    with opened(folder, options) as add:

        def write_json(row: QuestionRow, dropped: Dropped) -> bool:
            add({"json": json_bytes(fields(row, dropped))})
            return True

        yield write_json


# ---- files of passages ---------------------------------------------------------------------------------------------


def _table_line(passage: Passage, dropped: Dropped) -> bytes:
    """Return a passage as a line of a tab-separated table with the columns id, text and title.

    Counts in `dropped` each title or text that begins or ends with a quote, because readers of such tables remove these
    quotes. Raises BadRow for an id that would break the table.
    """
    name = passage_id(passage)
    _refuse_in_table(name)
    line = io.StringIO()
    # csv quotes a cell that holds a character of the line end, so both characters are named and the line is cut
    csv.writer(line, delimiter="\t", lineterminator="\r\n").writerow([name, passage.text, passage.title])
    # readers of such tables take quotes around a text for those of csv
    dropped["outer quotes of texts"] += sum(part != part.strip('"') for part in (passage.text, passage.title))
    return line.getvalue().encode()[:-2] + b"\n"


def _json_line(id_key: str, passage: Passage, dropped: Dropped) -> bytes:
    """Return a passage as a line of JSON-lines. id_key: the name of the field for the id. dropped: not used."""
    return json_bytes(_document(id_key, passage)) + b"\n"


CORPORA = {  # format → name of its file of passages, first line of the file, function that makes a passage's line
    Target.dpr: ("corpus.tsv", b"id\ttext\ttitle\n", _table_line),
    Target.tevatron: ("corpus.jsonl", b"", partial(_json_line, "docid")),
    Target.tevatron_ids: ("corpus.jsonl", b"", partial(_json_line, "docid")),
    Target.beir: ("corpus.jsonl", b"", partial(_json_line, "_id")),
}


@dataclass
class CorpusWriter:
    """Writes passages to a new corpus file, each id only once.

    file: the new corpus file. line: converts a passage to a line of it. written: the ids that were written before.
    source: an existing corpus whose passages the caller copies to the file first, by `copy`, or None. dropped: takes
    counts of the parts that the file cannot hold. count: number of passages written so far.
    """

    file: BinaryIO
    line: PassageLine
    written: "WrittenIds"
    source: Corpus | None
    dropped: Dropped
    count: int = 0

    def copy(self, passages: Iterable[Passage]) -> None:
        """Write `passages`, which must be all passages of `source`, in order, to the new corpus file.

        Raises DataError for a passage that the file cannot hold. Such a passage cannot simply be left out, because a
        question row may name it by its id.
        """
        for passage in passages:
            try:
                self.file.write(self.line(passage, self.dropped))
            except BadRow as bad:
                raise DataError(f"corpus: passage {self.count + 1}: {bad}") from None
            self.count += 1

    def add(self, passages: Iterable[Passage]) -> int:
        """Write to the new corpus file the passages whose ids it does not have yet, and return how many were written.

        Raises BadRow, and writes no passage, when an id is already used for another passage, or when the file cannot
        hold a passage.
        """
        new: dict[str, tuple[int, bytes]] = {}
        dropped = Counter[str]()
        for passage in passages:
            name = passage_id(passage)
            key = new[name][0] if name in new else self._key(name)
            if key is None:
                new[name] = passage.key, self.line(passage, dropped)
            elif key != passage.key:
                raise BadRow("passage id with two texts", f"'{name}'")
        for name, (key, line) in new.items():
            self.file.write(line)
            self.written.add("passage", name, key)
        self.count += len(new)
        self.dropped.update(dropped)
        return len(new)

    def _key(self, name: str) -> int | None:
        """Return the content key (a hash of title and text) of the passage that the new file has under the id `name`.
        None: there is none."""
        if self.source is not None and (position := int(self.source.positions([name])[0])) >= 0:
            return int(self.source.keys[position])
        return self.written.key("passage", name)


@contextmanager
def corpus_writer(
    folder: Path, target: Target, written: "WrittenIds", source: Corpus | None, dropped: Dropped
) -> Iterator[CorpusWriter]:
    """Context manager that opens the corpus file of the format `target` in `folder`, and yields a CorpusWriter for it.

    target: a format in CORPORA. written: the ids written before, so that each passage is written once. source: the
    corpus that the caller will copy to the file first, whose ids then count as written; None if there is none. dropped:
    counts of the parts that the file cannot hold, which the writer increases.
    """
    name, first_line, line = CORPORA[target]
    with (folder / name).open("wb") as file:
        file.write(first_line)
        yield CorpusWriter(file, line, written, source, dropped)


# ---- what was written ----------------------------------------------------------------------------------------------


class WrittenIds:
    """Stores the ids of questions, passages and pairs (question and passage) that were written to new files. Each has
    the content key (a hash) of its question or passage; 1 for a pair. The ids are in a file on disk, because there may
    be many millions. database: an empty database, in which the table is made."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        # the file is deleted at the end: it needs no safety
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;")
        database.execute("CREATE TABLE written (kind, id, key INTEGER, PRIMARY KEY (kind, id)) WITHOUT ROWID")

    def key(self, kind: str, name: str) -> int | None:
        """Return the content key (a hash) that was stored with the id `name`; None if the id is not stored yet. kind:
        "question", "passage" or "pair" (question and passage)."""
        found = self._database.execute("SELECT key FROM written WHERE kind = ? AND id = ?", (kind, name)).fetchone()
        return None if found is None else int(found[0])

    def add(self, kind: str, name: str, key: int) -> bool:
        """Store the written id `name` with the content key `key` (a hash), and return whether the id is new.

        kind: "question", "passage" or "pair" (question and passage). Raises BadRow when the id is already stored with
        another key.
        """
        known = self.key(kind, name)
        if known is None:
            self._database.execute("INSERT INTO written VALUES (?, ?, ?)", (kind, name, key))
        elif known != key:
            raise BadRow(f"{kind} id with two texts", f"'{name}'")
        return known is None


@contextmanager
def written_ids(folder: Path) -> Iterator[WrittenIds]:
    """Context manager that yields an empty WrittenIds, a table on disk of the ids written to new files. The file of the
    table lies in `folder`, and is deleted when the with block ends without an error."""
    path = folder / ".written.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        yield WrittenIds(database)
    path.unlink()

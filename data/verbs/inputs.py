"""What `python -m data pack` and `check` read: questions or passages of any format, row by row, the bad ones too.

Training refuses a source with a bad row; here each is told with its line, and the good ones go on.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from io import BufferedReader
from itertools import islice, pairwise
from typing import Any, BinaryIO

import numpy as np

from data.config import PassageConfig
from data.corpus import Corpus, CorpusPassages, PassageList, open_corpus
from data.errors import BadRow, ConfigError
from data.index import ShardIndex, index_shards
from data.json_text import parse_json
from data.passages import InlinePassages
from data.passages import Passage
from data.questions import QuestionRow, judgements, qrels_file
from data.records import (
    NAMED,
    PASSAGE_FIELDS,
    PASSAGE_IDS,
    QUESTION_FIELDS,
    format_of,
    passage_of,
    printable,
    query_of,
    record_of,
    unknown_format,
)
from data.rows import SUFFIXES, Rows
from data.scan import MAX_BYTES, PICTURES, Problem
from data.scan_rows import cells
from data.shards import Shards
from data.sources import PACKED, ShardSource, local_path, parse_sources, split_sources
from data.sources import SUFFIXES as SHARDS
from data.storage import open_stream, shard_name
from data.verbs.options import CheckOptions, PackOptions

LOOKED_AT = 20  # lines of a file, to tell what it holds
READ_OF_QUERIES = (*PASSAGE_IDS, "text", "contents", "metadata")
AT_ONCE = 65_536
COUNTED = 1_000  # names of fields without a use; those of a table of ids would have no end
OTHERS = "other fields"

Entries = Iterator[tuple[str, QuestionRow | BadRow]]
Judgement = tuple[int, str, str, int]  # line, question id, passage id, grade


class Kind(Enum):
    pictures = "pictures"
    questions = "questions"
    passages = "passages"


@dataclass(frozen=True)
class Questions:
    """rows() starts anew: (where, row). The id of a question is '' where the source gives none. corpus: all passages,
    where they are in a file of their own. unread: how many fields of which name no format has a use for, as they come.
    """

    corpus: Corpus | None
    rows: Callable[[], Entries]
    unread: Counter[str] = field(default_factory=Counter)

    def passages(self) -> Iterator[Passage]:
        """Those of the corpus."""
        for i in range(len(self.corpus or ())):
            assert self.corpus is not None
            fields = self.corpus.rows.fields(i)
            _count_unread_of_passage(self.unread, fields)
            yield passage_of(fields)


def unread_fields(unread: Counter[str]) -> str:
    found = sorted((-count, what) for what, count in unread.items() if count)
    listed = [f"{printable(what)} ({-count:,})" for count, what in found[:NAMED]]
    return ", ".join([*listed, *([f"{len(found) - NAMED:,} more fields"] if len(found) > NAMED else [])])


def _count(unread: Counter[str], names: Iterable[str]) -> None:
    for name in names:
        unread[name if name in unread or len(unread) < COUNTED else OTHERS] += 1


# ---- pictures, questions or passages? ------------------------------------------------------------------------------


def kind_of(sources: Sequence[str]) -> Kind:
    """What the first of some sources holds, by its first rows; pictures, when these do not tell."""
    path = local_path(sources[0])
    if os.path.isfile(os.path.join(path, "queries.jsonl")) or path.endswith(PACKED):
        return Kind.questions  # whose reader says what is missing, or how to unpack it
    file = _first_file(sources)
    with suppress(ConfigError, OSError):
        return KINDS[os.path.splitext(shard_name(file))[1]](file) if file else Kind.pictures
    return Kind.pictures


def _first_file(sources: Sequence[str]) -> str | None:
    for suffixes in (SHARDS, SUFFIXES):  # a folder of shards may have a manifest.json
        with suppress(ConfigError, OSError):
            return parse_sources(sources[0], "INPUT", suffixes)[0].shards[0]
    return None


def refuse_unknown(sources: Sequence[str]) -> None:
    """Raise ConfigError, naming its fields, when the first of some sources has rows that are of no known format."""
    file, fields = _first_file(sources), None
    with suppress(OSError):
        fields = _first_fields(file) if file and shard_name(file).endswith(".jsonl") else None
    if fields is not None:
        raise ConfigError(
            f"{file}: {unknown_format(fields)}; passages: text, and one of {', '.join(PASSAGE_IDS)}."
            " Pairs of a picture and its caption are checked when they are packed."
        )


def _kind_of_fields(fields: Mapping[str, Any]) -> Kind:
    if format_of(fields):
        return Kind.questions
    known = any(name in fields for name in PASSAGE_IDS) or not set(fields).difference(PASSAGE_FIELDS)
    return Kind.passages if known and ("text" in fields or "contents" in fields) else Kind.pictures


def _kind_of_lines(file: str) -> Kind:
    fields = _first_fields(file)
    return Kind.pictures if fields is None else _kind_of_fields(fields)


def _first_fields(file: str) -> dict[str, Any] | None:
    """The first row of a file of lines that can be read."""
    with BufferedReader(open_stream(file)) as stream:  # type: ignore[arg-type]  # else it is read byte by byte
        for _ in range(LOOKED_AT):
            with suppress(ValueError):
                fields = parse_json(_line(stream))
                if isinstance(fields, dict):
                    return fields
    return None


def _kind_of_array(file: str) -> Kind:
    rows = _open([file])
    found = _kind_of_fields(rows.fields(0)) if len(rows) else Kind.questions
    return Kind.questions if found is Kind.pictures else found


def _kind_of_table(file: str) -> Kind:
    with BufferedReader(open_stream(file)) as stream:  # type: ignore[arg-type]
        try:
            return Kind.passages if {"id", "text"} <= set(cells(_line(stream))) else Kind.pictures
        except (ValueError, csv.Error):
            return Kind.pictures


def _kind_of_tar(file: str) -> Kind:
    """By its members, since questions in a tar have no picture beside them."""
    (index,) = index_shards([file])
    return Kind.pictures if set(PICTURES) & set(index.suffixes) or "json" not in index.suffixes else Kind.questions


def _line(stream: BinaryIO) -> bytes:
    """One line; no more of a file that has none than a row may have."""
    return stream.readline(MAX_BYTES["json"]).rstrip(b"\r\n")


KINDS: dict[str, Callable[[str], Kind]] = {
    ".jsonl": _kind_of_lines,
    ".json": _kind_of_array,
    ".tsv": _kind_of_table,
    ".tar": _kind_of_tar,
}


# ---- questions -----------------------------------------------------------------------------------------------------


def open_input(source: str | Sequence[str], options: PackOptions | CheckOptions, key: str) -> Questions:
    """The questions that `source` names, written like data.train. Raises ConfigError for what cannot work."""
    named = split_sources(source, key)
    if any(weight != 1 for _, weight in named):
        raise ConfigError(f"{key}={source}: weights are for training; leave them out here.")
    folders = [path for path, _ in named if os.path.isfile(os.path.join(local_path(path), "queries.jsonl"))]
    if folders and len(named) > 1:
        raise ConfigError(f"{key}={source}: {folders[0]} is a BEIR folder, which goes alone.")
    corpus = open_corpus(options.corpus, "corpus") if options.corpus else None
    return _beir(local_path(folders[0]), options.split, corpus) if folders else _rows(source, options, corpus, key)


def _open(files: Sequence[str]) -> Rows:
    """The rows that can be read; `_unreadable` tells of the others."""
    return Rows(Shards([ShardSource(tuple(files))], list(index_shards(files))))


def _unreadable(indexes: Sequence[ShardIndex]) -> Iterator[tuple[str, BadRow]]:
    for index in indexes:
        for i in range(index.problem_count):
            problem = index.problems[i] if i < len(index.problems) else "python -m data index lists the first 100"
            last = isinstance(problem, Problem) and problem.last
            yield index.path, BadRow("unreadable rest of a file" if last else "unreadable row", str(problem))


def _rows(
    source: str | Sequence[str], options: PackOptions | CheckOptions, corpus: Corpus | None, key: str
) -> Questions:
    files = [file for each in parse_sources(source, key, SUFFIXES) for file in each.shards]
    rows = _open(files)
    config, unread = PassageConfig(pos_pool=options.pos_pool, neg_pool=options.neg_pool), Counter[str]()

    def found() -> Entries:
        yield from _unreadable(rows.shards.indexes)
        for i in range(len(rows)):
            try:
                fields = rows.parse(i)
                record = record_of(fields, config)
                lists = (record.positives, record.negatives, record.hard_negatives)
                row = QuestionRow(record.question, *(_resolved(passages, corpus, rows.where(i)) for passages in lists))
            except BadRow as error:
                yield rows.where(i), error
                continue
            _count_unread(unread, fields, row)
            yield rows.where(i), row

    return Questions(corpus, found, unread)


def _resolved(entries: Sequence[Passage] | Sequence[str], corpus: Corpus | None, where: str) -> PassageList:
    ids = [entry for entry in entries if isinstance(entry, str)]
    if not ids:
        return InlinePassages([entry for entry in entries if isinstance(entry, Passage)])
    if corpus is None:
        raise ConfigError(f"{where} names its passages by id: set corpus= to their file.")
    positions = corpus.positions(ids)
    if (positions < 0).any():
        raise BadRow("id that is not in the corpus", f"'{ids[int(np.argmin(positions))]}'")
    return CorpusPassages(corpus, positions)


def _count_unread(unread: Counter[str], fields: Mapping[str, Any], row: QuestionRow) -> None:
    """Fields that the row's format has no use for, and scored candidates between the best and the worst."""
    read = format_of(fields)
    assert read is not None
    _count(unread, (name for name in fields if name not in (read.question, *read.lists, *QUESTION_FIELDS)))
    _count_unread_of_metadata(unread, fields)
    entries = [entry for name in read.lists for entry in fields.get(name) or ()]
    for entry in entries:
        _count_unread_of_passage(unread, entry if isinstance(entry, Mapping) else {}, read.passage_fields)
    if middle := len(entries) - len(row.positives) - len(row.negatives) - len(row.hard_negatives):
        unread["candidates in the middle"] += middle


def _count_unread_of_metadata(unread: Counter[str], fields: Mapping[str, Any]) -> None:
    metadata = fields.get("metadata")
    if isinstance(metadata, Mapping):
        topic = ("topic",) if isinstance(metadata.get("topic"), str) else ()
        _count(unread, (f"metadata.{name}" for name in metadata if name not in topic))
    elif metadata is not None:
        _count(unread, ["metadata"])


def _count_unread_of_passage(
    unread: Counter[str], fields: Mapping[str, Any], read: Sequence[str] = PASSAGE_FIELDS
) -> None:
    _count(unread, (f"{name} of passages" for name in fields if name not in read))


def _beir(folder: str, split: str, corpus: Corpus | None) -> Questions:
    qrels = qrels_file(folder, split, "split")
    queries = open_corpus(os.path.join(folder, "queries.jsonl"), "INPUT")
    passages = corpus or open_corpus(os.path.join(folder, "corpus.jsonl"), "INPUT")
    unread = Counter[str]()

    def rows() -> Entries:
        judged: tuple[array[int], array[int]] = (array("q"), array("q"))
        for block in _blocks(judgements(qrels)):
            yield from _resolve_block(block, qrels, (queries, passages), judged, unread)
        pairs = np.unique(np.asarray(judged, np.int64), axis=1)  # in the order of queries.jsonl and corpus.jsonl
        ends = np.flatnonzero(np.diff(pairs[0], append=-1)) + 1
        for begin, end in pairwise([0, *ends.tolist()]):
            number = int(pairs[0, begin])
            where, fields = queries.rows.where(number), queries.rows.fields(number)
            try:
                row = QuestionRow(
                    query_of(fields),
                    CorpusPassages(passages, pairs[1, begin:end]),
                    InlinePassages(()),
                    InlinePassages(()),
                )
            except BadRow as error:
                yield where, error
                continue
            _count(unread, (name for name in fields if name not in READ_OF_QUERIES))
            _count_unread_of_metadata(unread, fields)
            yield where, row

    return Questions(passages, rows, unread)


def _blocks(judged: Iterator[Judgement]) -> Iterator[list[Judgement]]:
    while block := list(islice(judged, AT_ONCE)):
        yield block


def _resolve_block(
    block: list[Judgement],
    path: str,
    sides: tuple[Corpus, Corpus],
    judged: tuple[array[int], array[int]],
    unread: Counter[str],
) -> Entries:
    """Add positions of question and passage of each judgement that says right; yields those that name what is not."""
    columns = [side.positions([str(entry[1 + i]) for entry in block]) for i, side in enumerate(sides)]
    for (line, question, passage, grade), *positions in zip(block, *columns, strict=True):
        if grade <= 0:
            unread["judgements of 0 or less"] += 1
        elif min(positions) < 0:
            what, name = ("question", question) if positions[0] < 0 else ("passage", passage)
            yield f"{path}: line {line}", BadRow(f"{what} id that is not in the folder", f"'{name}'")
        else:
            unread["grades above 1"] += grade > 1
            for column, position in zip(judged, positions, strict=True):
                column.append(int(position))


# ---- passages ------------------------------------------------------------------------------------------------------


def open_passages(
    source: str | Sequence[str], key: str, unread: Counter[str]
) -> Iterator[tuple[str, Passage | BadRow]]:
    """The passages that `source` names, in order: (where, passage). A passage may lack an id here."""
    rows = _open([file for each in parse_sources(source, key, SUFFIXES) for file in each.shards])
    yield from _unreadable(rows.shards.indexes)
    for i in range(len(rows)):
        try:
            fields = rows.parse(i)
            passage = passage_of(fields)
        except BadRow as error:
            yield rows.where(i), error
            continue
        _count_unread_of_passage(unread, fields)
        yield rows.where(i), passage

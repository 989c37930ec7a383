"""Read the inputs of the verbs of `python -m data`: recognise their kind, and yield questions or passages.

Training refuses an input with a bad row. The readers in this module yield a BadRow (the error) in place of such a row,
and go on with the next row.
"""

import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby, islice, pairwise
from typing import Any, TypeVar

from dyad.data.base.errors import BadRow, ConfigError
from dyad.data.cli.options import PackOptions, ReadOptions, TableKeys, table_keys
from dyad.data.config import PassageConfig
from dyad.data.question_passage import fields as row_fields, formats, judgements, questions
from dyad.data.question_passage.corpus import Corpus, corpus_of, open_corpus
from dyad.data.question_passage.formats import PASSAGE_FIELDS, PASSAGE_IDS, format_of, passage_of
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.questions import QuestionRow, is_beir
from dyad.data.shards.index import index_shards
from dyad.data.shards.rows import SUFFIXES, Rows
from dyad.data.shards.scan_tar import IMAGES, Problem, Scan, stream_tar
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import PACKED, SHARDS, ShardSource, files_of, local_path, parse_sources, written_sources
from dyad.data.shards.storage import open_buffered, shard_name, suffix_of
from dyad.data.tables.folders import ALWAYS, tables_of
from dyad.data.tables.image_table import TableOptions, image_column
from dyad.data.tables.prepare import left_out, named_texts, prepared_tables
from dyad.data.tables.readers import Fields, Table, open_table

LOOKED_AT = 20  # number of first samples of a shard, or rows, by which the kind of data is recognised
PACKED_TARS = (".tgz", *(f".tar{suffix}" for suffix in PACKED))
QUERY_FIELDS = (*PASSAGE_IDS, "text", "contents", "metadata")  # fields of a line of queries.jsonl that are read
COUNTED = 1_000  # most names of unread fields that are counted separately: objects keyed by ids may have any number
OTHERS = "other fields"
TEACHER = {"pos_scores", "neg_scores"}  # fields in which FlagEmbedding has the scores of a teacher

S = TypeVar("S")
T = TypeVar("T")
Located = Iterator[tuple[str, T | BadRow]]  # location of a row, for messages, and what the row holds

InputKind = StrEnum("InputKind", ["images", "questions", "passages"])  # what an input holds


class UnreadFields(Counter[str]):
    """Counts, by name, of what the readers do not use: fields of rows, judgements, grades and candidates."""

    def add(self, fields: Mapping[str, Any], read: Container[str], suffix: str = "") -> None:
        """Count the fields of one row that are not in `read`, the fields that the readers use.

        suffix: text appended to each counted name. If `read` has "metadata" and this field is an object, its entries
        are counted one by one, except a text in `topic`, which the readers use; metadata of another type is counted as
        one field. After COUNTED different names, all further new names are counted together as OTHERS.
        """
        names, metadata = [name for name in fields if name not in read], fields.get("metadata")
        if isinstance(metadata, Mapping) and "metadata" in read:
            names += [f"metadata.{name}" for name in metadata if name != "topic" or not isinstance(metadata[name], str)]
        elif metadata is not None and "metadata" in read:
            names.append("metadata")
        for what in (name + suffix for name in names):
            self[what if what in self or len(self) < COUNTED else OTHERS] += 1

    def __str__(self) -> str:
        """Return the most frequent names of unused fields, each with its count, and, if such are among them, how to
        learn a teacher's scores. The text is "" if no field was counted."""
        found = sorted((-count, what) for what, count in self.items() if count)
        listed = [f"{row_fields.short_name(what)} ({-count:,})" for count, what in found[: row_fields.NAMED]]
        if len(found) > row_fields.NAMED:
            listed.append(f"{len(found) - row_fields.NAMED:,} more fields")
        of_teacher = "; to learn a teacher's scores: data.teacher=FIELD" if TEACHER & self.keys() else ""
        return ", ".join(listed) + of_teacher


@dataclass(frozen=True)
class InputQuestions:
    """The questions of an input, and the corpus of passages that its rows may name by id.

    corpus: None if the input has none. rows: yields each row's location with a QuestionRow or, for a bad row, a BadRow;
    it can be read only once. A question without an id has the id ''. unread: counts of the unused fields in the rows
    read so far.
    """

    corpus: Corpus | None
    rows: Located[QuestionRow]
    unread: UnreadFields

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """Yield (location, Passage) for all passages of the input's corpus, in order; nothing if the input has no
        corpus. Counts in `unread` the fields of these passages that the reader does not use."""
        if self.corpus is not None:
            for i, fields in enumerate(map(self.corpus.rows.fields, range(len(self.corpus)))):
                self.unread.add(fields, PASSAGE_FIELDS, " of passages")
                yield self.corpus.rows.where(i), passage_of(fields)


def shards_of(
    source: str | Sequence[str], options: TableKeys, key: str, suffixes: Sequence[str] = SHARDS
) -> list[ShardSource]:
    """Return the shards and files that `source` names, in the syntax of data.train; tables are converted to shards. The
    new shards lie in the cache, as for training. key: name of the command-line argument `source`, for messages.
    suffixes: the suffixes that a file may have, except tables. Raises ConfigError for a source that cannot work, such
    as one that matches nothing; DataError for a table with a bad row."""
    return parse_sources(source, key, suffixes, prepared_tables(table_keys(options)))


# ---- images, questions or passages? ------------------------------------------------------------------------------


def tables_and_tars(source: str | Sequence[str], options: TableKeys) -> tuple[list[Table], list[str]]:
    """Return the tables (also .jsonl, .json and .tsv files) and the paths of the tar shards that `source` names. Raises
    ConfigError when it names another file, DataError for a table that cannot be read."""
    tables, others = tables_and_files(source, options, "INPUT")
    tars = [file for file in others if shard_name(file).endswith(".tar")]
    return [*tables, *(open_table(file) for file in others if file not in tars)], tars


def tables_and_files(
    source: str | Sequence[str], options: TableKeys | TableOptions, key: str
) -> tuple[list[Table], list[str]]:
    """Return the tables that `source` names, and the paths of all other files that it names, which are read by offset.
    key: name of the command-line argument `source`, for messages. Errors as of `parse_sources` and `tables_of`."""
    named = _named(source, options, key)
    return [each for each in named if isinstance(each, Table)], [each for each in named if isinstance(each, str)]


def _named(source: str | Sequence[str], options: TableKeys | TableOptions, key: str) -> list[Table | str]:
    """Return the tables, and the paths of the other files, in the order of `source`. Arguments and errors as of
    `tables_and_files`."""
    tables: dict[str, Table] = {}

    def found(path: str) -> list[str]:
        here = {table.path: table for table in tables_of(path, options.columns)}
        tables.update(here)
        return list(here)

    return [tables.get(path, path) for path in files_of(source, key, (*SUFFIXES, *ALWAYS), found)]


def kind_of(sources: Sequence[str], options: TableKeys) -> InputKind:
    """Return the kind of data in the sources, as `recognised` finds it; `images` also if it finds none. A compressed
    file is not read: a compressed .tar counts as images, any other as questions. Errors as of `recognised`."""
    if sources[0].endswith(PACKED):  # the reader of this kind then says how to unpack the file
        return InputKind.images if sources[0].endswith(PACKED_TARS) else InputKind.questions
    return recognised(sources, table_keys(options))[0] or InputKind.images


def recognised(sources: Sequence[str], options: TableOptions) -> tuple[InputKind | None, str]:
    """Return the kind of data in the sources, and a text about the evidence for messages, such as the column names.

    Only the first rows of the first source are read. The kind is None if these rows have no known format, or for a
    fault that is a ConfigError or an OSError, such as a compressed file or a missing column that the user named; the
    reader of the data reports it later. Raises DataError for a table that cannot be read at all.
    """
    with suppress(ConfigError, OSError):
        if any(is_beir(each.path) for each in written_sources(sources, "INPUT")):
            return InputKind.questions, "a folder of BEIR or MS MARCO"
        tables, files = tables_and_files(sources[0], options, "INPUT")
        if not tables:
            return _kind_of_file(_first_of(files))
        options.checked(tables[0])
        images = image_column(tables[0], options.columns)
        kind = InputKind.images if images else _kind_of_fields(named_texts(first_row(tables[0]), options))
        return kind, f"columns {row_fields.named(tables[0].columns)}"
    return None, ""


def _first_of(files: Sequence[str]) -> str:
    """Return the first of `files` that is a shard, or the first if none is."""
    return min(files, key=lambda file: not file.endswith(SHARDS))  # a folder of shards may also have a manifest.json


def first_row(table: Table) -> Fields:
    """Return the first readable row among the first 20 of a table; if there is none, a dict: column → None."""
    return next(iter(table.head()), dict.fromkeys(table.columns))


def require_images(sources: Sequence[str], options: TableKeys, key: str) -> None:
    """Raise ConfigError for a source that `kind_of` takes for images only because it recognises nothing in it.

    Its first part is a table without a column of images, or a .jsonl or .tsv file with a readable row. The message
    calls its columns or fields unknown, so call it only for the kind images. Tars pass. key: name of the argument, for
    messages. Also raises ConfigError for a missing column of options.columns, and as `tables_and_files` does.
    """
    tables, files = tables_and_files(sources[0], options, key)
    if tables:
        table_keys(options).checked(tables[0])
    if tables and not image_column(tables[0], options.columns):
        raise ConfigError(
            f"{tables[0].path}: its columns {row_fields.named(tables[0].columns)} have no known names. Name those of "
            f"images and captions, or of questions and passages: columns=[…]{_of_urls(first_row(tables[0]))}"
        )
    top = "If the first line is a row, put a line of column names on top, such as question<TAB>positive."
    advice = {".tsv": top, ".jsonl": "Pairs of an image and its caption are checked when they are packed."}
    if not tables and (suffix := suffix_of(file := _first_of(files))) in advice:
        with suppress(OSError):
            if fields := first_row(open_table(file)):
                passages = f"; passages: text, and one of {', '.join(PASSAGE_IDS)}{_of_urls(fields)}. {advice[suffix]}"
                raise ConfigError(f"{file}: {formats.unknown_format(fields, passages)}")


def _of_urls(fields: Mapping[str, Any]) -> str:
    """Return a clause for a row with a URL, or with one as a column's name, which is a first row taken for names."""
    urls = any(str(text).startswith(("http://", "https://")) for text in (*fields, *fields.values()))
    return "; URLs of images are not downloaded: img2dataset makes shards of such a table" if urls else ""


def _kind_of_file(file: str) -> tuple[InputKind | None, str]:
    """Return the kind of data in a file, by its suffix and first rows, and the evidence, as `recognised` does."""
    suffix = suffix_of(file)
    if suffix == ".tar":
        with open_buffered(file) as stream:
            members = {name for _, found in islice(stream_tar(stream, Scan()), LOOKED_AT) for name in found}
        kind = InputKind.images if members & set(IMAGES) else InputKind.questions if "json" in members else None
        return kind, f"members {row_fields.named(sorted(members))}"
    if suffix == ".json":  # an array, which holds questions unless its first row is a passage
        rows = _open([file])
        fields = rows.fields(0) if len(rows) else {}
        return _kind_of_fields(fields) or InputKind.questions, f"fields {row_fields.named(fields)}"
    fields = first_row(open_table(file))
    return _kind_of_fields(fields), f"fields {row_fields.named(fields)}"


def _kind_of_fields(fields: Mapping[str, Any]) -> InputKind | None:
    """Return the kind of data in a row, questions or passages, by the names of its fields; None if they are unknown."""
    if format_of(fields):
        return InputKind.questions
    known = any(name in fields for name in PASSAGE_IDS) or not set(fields).difference(PASSAGE_FIELDS)
    return InputKind.passages if known and ("text" in fields or "contents" in fields) else None


# ---- questions -----------------------------------------------------------------------------------------------------


def open_input(source: str | Sequence[str], options: PackOptions | ReadOptions, key: str) -> InputQuestions:
    """Open the questions that `source` names, and the corpus of passages if there is one.

    source: as data.train. options: give the corpus, the split of a BEIR folder, and how rows are read. key: the name of
    `source` in messages. Raises ConfigError for a source with a sampling weight (path@2), for a BEIR folder among other
    sources, for missing files, and at a row that names passages by id without a corpus; DataError for a bad passage of
    the corpus, and for a line of queries.jsonl without text or id. Other bad rows are yielded.
    """
    named = written_sources(source, key)
    if any(each.weight != 1 for each in named):
        raise ConfigError(f"{key}={source}: weights are for training; leave them out here.")
    folders = [each.path for each in named if is_beir(each.path)]
    if folders and len(named) > 1:
        raise ConfigError(f"{key}: {folders[0]} is a BEIR folder, which goes alone here.")
    corpus, unread = open_corpus(options.corpus, "corpus") if options.corpus else None, UnreadFields()
    if not folders:
        rows = _open_source(source, key, options, unread)
        return InputQuestions(corpus, _rows(rows, options, corpus, unread), unread)
    folder = local_path(folders[0])
    qrels = judgements.qrels_file(folder, options.split, "split")
    queries = open_corpus(judgements.queries_of(qrels), "INPUT")
    corpus = corpus or open_corpus(corpus_of(folder) or os.path.join(folder, "corpus.jsonl"), "INPUT")
    return InputQuestions(corpus, _judged(qrels, queries, corpus, unread, options.relevance is not None), unread)


def first_rows(source: Sequence[str], options: ReadOptions) -> list[QuestionRow]:
    """Return the sound rows among the first LOOKED_AT rows of questions in `source`. Errors as of `open_input`."""
    rows = (row for _, row in islice(open_input(source, options, "SOURCE").rows, LOOKED_AT))
    return [row for row in rows if isinstance(row, QuestionRow)]


def _open(files: Sequence[str]) -> Rows:
    """Open the rows of files for access by row index. Rows that could not be indexed are left out; the shard indexes
    list them as problems, and `_located` yields a BadRow (error) for each."""
    return Rows(Shards([ShardSource(tuple(files))], list(index_shards(files))))


def _open_source(source: str | Sequence[str], key: str, options: TableKeys, unread: UnreadFields) -> Located[Fields]:
    """Yield the location and the fields, or the BadRow, of each row of the files and tables that `source` names, in its
    order. Rows of files that could not be indexed come before the other rows of these files, with the path of the file
    as location. unread: see `_of_table`."""
    parts: list[Located[dict[str, Any]]] = []
    for _, group in groupby(_named(source, options, key), type):
        each = list(group)
        tables = [_of_table(table, table_keys(options), unread) for table in each if isinstance(table, Table)]
        parts += tables or [_located(_open([file for file in each if isinstance(file, str)]))]
    return chain(*parts)


def _of_table(table: Table, options: TableOptions, unread: UnreadFields) -> Located[dict[str, Any]]:
    """Yield the location and the fields, or the BadRow, of each row of a table; named columns are renamed, others are
    counted in `unread`."""
    options.checked(table)
    for where, fields in table.rows():
        unread.update([] if isinstance(fields, BadRow) else left_out(fields, options))
        yield f"{table.path}: {where}", fields if isinstance(fields, BadRow) else named_texts(fields, options)


def _located(rows: Rows) -> Located[dict[str, Any]]:
    """Yield the location and the fields, or the BadRow, of each row: first those that could not be indexed."""
    for index in rows.shards.indexes:
        for i in range(index.problem_count):
            problem = index.problems[i] if i < len(index.problems) else "python -m data index lists the first 100"
            last = isinstance(problem, Problem) and problem.last
            yield index.path, BadRow("unreadable rest of a file" if last else "unreadable row", str(problem))
    yield from _read(((rows.where(i), i) for i in range(len(rows))), lambda i, where: rows.parse(i))


def _read(rows: Located[S], convert: Callable[[S, str], T]) -> Located[T]:
    """Yield, for each row, its location and the result of `convert(row, location)`, or the error (a BadRow) instead."""
    for where, row in rows:
        try:
            yield where, row if isinstance(row, BadRow) else convert(row, where)
        except BadRow as error:
            yield where, error


def _rows(
    rows: Located[dict[str, Any]], options: PackOptions | ReadOptions, corpus: Corpus | None, unread: UnreadFields
) -> Located[QuestionRow]:
    """Yield, for each row in files of questions, its location and its QuestionRow, or the error (a BadRow) instead.

    options: give how rows of scored candidates are read, and the fields of relevance and teacher. corpus: has the
    passages that rows name by id; None if there is none. unread: counts of unused fields, which this function
    increases.
    """
    config = PassageConfig(pos_pool=options.pos_pool, neg_pool=options.neg_pool)

    def convert(fields: dict[str, Any], where: str) -> QuestionRow:
        try:
            record = formats.record_of(fields, config, options.relevance, options.teacher)
            row = questions.row_of(record, corpus, where, "corpus=")
        except KeyError as error:
            raise BadRow("id that is not in the corpus", f"'{error.args[0]}'") from None
        _count_unread(unread, fields, row, (options.relevance, *formats.teacher_fields(options.teacher)))
        return row

    return _read(rows, convert)


def _count_unread(
    unread: UnreadFields, fields: Mapping[str, Any], row: QuestionRow, named: Sequence[str | None]
) -> None:
    """Count in `unread` the fields of a row, and of the passages inside the row, that the readers do not use.
    named: further fields that are used, of relevance and of a teacher's scores; None stands for no field."""
    read = format_of(fields)
    assert read is not None
    lists = read.lists(fields)
    unread.add(fields, (read.question, *lists, *formats.QUESTION_FIELDS, *named))
    entries = [entry for name in lists if isinstance(fields[name], list) for entry in fields[name]]
    for entry in entries:
        if isinstance(entry, Mapping):
            unread.add(entry, (*read.passage_fields, *named), " of passages")
    if "score" in read.passage_fields:
        unread["candidates in the middle"] += len(entries) - sum(len(getattr(row, name)) for name in questions.LISTS)


def _judged(qrels: str, queries: Corpus, corpus: Corpus, unread: UnreadFields, graded: bool) -> Located[QuestionRow]:
    """Yield the location and the QuestionRow of each question in a BEIR folder that has a relevant passage.

    These have a grade above 0. The order is that of queries.jsonl. qrels: path of the judgements. queries, corpus:
    queries.jsonl and corpus.jsonl. unread: counts of unused fields and grades and of judgements with an unknown id,
    which this function increases. graded: whether rows get the relevance grade / largest grade, as in training. Raises
    DataError when most judgements have an unknown id.
    """
    left_out, numbers, starts, positions, grades = judgements.find_judged(qrels, (queries, corpus))
    for side, count in zip(judgements.SIDES, left_out, strict=True):
        unread[f"judgements of an unknown {side}"] += count
    unread["grades above 1"] += 0 if graded else int((grades > 1).sum())
    ranges = zip(numbers.tolist(), pairwise(starts.tolist()), strict=True)
    found, largest = {number: slice(*part) for number, part in ranges}, grades.max(initial=1) if graded else None

    def convert(number: int, where: str) -> QuestionRow:
        fields, judged = queries.rows.fields(number), found[number]
        unread.add(fields, QUERY_FIELDS)
        return questions.judged_row(formats.query_of(fields), corpus, positions[judged], grades[judged], largest)

    yield from _read(((queries.rows.where(number), number) for number in found), convert)


# ---- passages ------------------------------------------------------------------------------------------------------


def open_passages(source: str | Sequence[str], key: str, unread: UnreadFields, options: TableKeys) -> Located[Passage]:
    """Open the files of passages that `source` names, and return an iterator over (location, Passage or BadRow).

    source: paths or URLs, in the syntax of data.train. key: its name in messages. unread: counts of unused fields,
    which reading increases. options: how tables are read. Raises ConfigError for a source that names no file, DataError
    for a file that cannot be read; the iteration raises ConfigError for a table without a column of `options`.
    """

    def convert(fields: dict[str, Any], where: str) -> Passage:
        passage = passage_of(fields)
        unread.add(fields, PASSAGE_FIELDS, " of passages")
        return passage

    return _read(_open_source(source, key, options, unread), convert)

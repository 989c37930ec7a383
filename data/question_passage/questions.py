"""The rows of question–passage data: rows of files in any format, or the judged questions of BEIR and MS MARCO folders.

Shape letter: n rows of a source.
"""

import os
import shlex
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from dyad.data.base.errors import BadFormat, BadRow, ConfigError, DataError
from dyad.data.base.progress import print_on_rank_0
from dyad.data.config import DataConfig, DrawnPositives, PassageConfig
from dyad.data.question_passage import judgements
from dyad.data.question_passage.corpus import Corpus, CorpusPassages, PassageList, corpus_files, corpus_of, open_corpus
from dyad.data.question_passage.formats import AnyScore, PairScore, Record, query_of, record_of
from dyad.data.question_passage.passages import InlinePassages, Passage, Question
from dyad.data.shards.content_keys import Int64s, hash_ids, json_digest, key_name
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.manifest import FileEntry, file_entries
from dyad.data.shards.rows import SUFFIXES, Rows, open_rows
from dyad.data.shards.sources import WrittenSource, check_unique, files_of, local_path, refuse_prefixes, written_sources
from dyad.data.shards.storage import sha256_of
from dyad.data.tables.folders import JUDGED
from dyad.data.tables.image_table import TableOptions
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options

FORMAT = "1"
COLUMNS = "3"  # format of RowQuestions.columns; it does not enter the fingerprint
JUDGED_FORMAT = "4"  # format of the array of `BeirQuestions._judged`; it does not enter the fingerprint
HEADER = 4  # count of the numbers at the start of this array
LENGTH, KEY = 2, 3  # rows of RowQuestions.columns, after the two of `hash_ids`
PREFIXED = ("data.train", "queries")  # queries: what eval.mine reads, by default data.train
LISTS = ("positives", "negatives", "hard_negatives")


@dataclass(frozen=True)
class QuestionRow:
    """A question and its lists of passages. Passages that the file names by id are read from the corpus on access.
    passage_prefix: text that begins the passages; None: data.passage.prefix. relevance: the weight in (0, 1] of each
    positive; None: no weights were read."""

    question: Question
    positives: PassageList
    negatives: PassageList = InlinePassages()
    hard_negatives: PassageList = InlinePassages()
    passage_prefix: str | None = field(default=None, kw_only=True)
    relevance: Sequence[float] | None = field(default=None, kw_only=True)

    @property
    def lists(self) -> tuple[PassageList, ...]:
        """(positives, negatives, hard negatives) of the question: its lists of passages, in the order of LISTS."""
        return self.positives, self.negatives, self.hard_negatives

    def draws(self, drawn: DrawnPositives) -> list[float]:
        """Return how many times training is expected to draw each of the positives when it draws the row once.

        drawn: the setting data.passage.positives. With "one" this is 1 / number of positives for each entry. With
        "first" it is 1 for the first and 0 for the others. With "all" it is 1 for each, but 0 for one that repeats the
        content of an earlier one.
        """
        keys, count = self.positives.keys, len(self.positives)
        if drawn is DrawnPositives.one:
            return [1 / count] * count
        return [float(keys.index(key) == i and (i == 0 or drawn is DrawnPositives.all)) for i, key in enumerate(keys)]


def named_files(value: str | Sequence[str], config: DataConfig, key: str = "data.train") -> list[str]:
    """Return the paths of the files of question rows that `value` names, in the syntax of data.train.

    For a BEIR or MS MARCO folder this is the path of its judgements. Files are not indexed, and tables are only checked
    by their first row. key: the configuration key of `value`, for messages; only those in PREFIXED may have prefixes of
    sources. Raises ConfigError for a value that cannot work, also in data.passage.corpus, and for a path that appears
    twice; DataError for a table that cannot be read.
    """
    if config.passage.corpus:
        corpus_files(config.passage.corpus, "data.passage.corpus", checked_tables(TableOptions()))
    named, tables = list[str](), checked_tables(table_options(config), _row_check(config))
    written = written_sources(value, key)
    if key not in PREFIXED:
        refuse_prefixes(written, key)
    for path in (source.path for source in written):
        beir = is_beir(path)
        named += [_qrels_of(path, config.question.split, key)] if beir else files_of([path], key, SUFFIXES, tables)
    check_unique(named, key)
    return named


def open_questions(value: str | Sequence[str], config: DataConfig, key: str = "data.train") -> "QuestionRows":
    """Open the question rows that `value` names: files and shards of any format, and BEIR or MS MARCO folders, in the
    syntax of the setting data.train.

    key: the configuration key of `value`, for messages. Raises ConfigError for a value that cannot work, and for a
    folder if data.teacher is set; DataError, naming the line, for a row that cannot be used. The first call for a file
    reads all of it and stores an index. The process of rank 0 prints how many judgements of a folder are left out, if
    any.
    """
    named_files(value, config, key)
    shared = open_corpus(config.passage.corpus, "data.passage.corpus") if config.passage.corpus else None
    prepared, written = prepared_tables(table_options(config), _row_check(config)), written_sources(value, key)

    def opened(path: str) -> QuestionSource:
        if is_beir(path):
            if config.teacher is not None:
                raise ConfigError(
                    f"data.teacher={config.teacher}: {key}={path} is a folder of judgements, without scores of a "
                    "teacher. Give rows of texts with their scores"
                )
            graded = config.relevance is not None
            return BeirQuestions(local_path(path), config.question.split, shared, key, graded)
        rows = open_rows(files_of([path], key, SUFFIXES, prepared))
        return RowQuestions(rows, config.passage, shared, config.relevance, config.teacher)

    rows = QuestionRows([opened(source.path) for source in written], written, shared)
    for line in filter(None, (source.left_out for source in rows.sources)):
        print_on_rank_0(line)
    return rows


def _row_check(config: DataConfig) -> Callable[[dict[str, Any]], object]:
    return lambda fields: record_of(fields, config.passage, config.relevance, config.teacher)


def is_beir(path: str) -> bool:
    """Whether `path` is a local BEIR or MS MARCO folder: True if it has one of the entries JUDGED, such as `qrels`. The
    file of judgements itself may be missing. False for ""."""
    return path != "" and any(os.path.exists(os.path.join(local_path(path), name)) for name in JUDGED)


class QuestionRows:
    """The question rows of several sources, numbered consecutively from 0 through all of them.

    written: the weight and the prefixes of each source, as the user wrote them. shared: the corpus that all sources
    use; None: each has its own, or none. Attribute `corpus`: the corpus in which mined negatives are looked up, which
    is `shared`, or the only corpus among the sources, otherwise None.
    """

    def __init__(self, sources: list["QuestionSource"], written: list[WrittenSource], shared: Corpus | None) -> None:
        self.sources, self.written, self.weights = sources, written, [source.weight for source in written]
        self.sizes = [len(source) for source in sources]
        self._starts = [0, *accumulate(self.sizes)]
        pairs = list(zip(sources, written, strict=True))
        self.fingerprint = json_digest([each.digest(source.fingerprint) for source, each in pairs])
        self.files = [replace(file, digest=each.digest(file.digest)) for source, each in pairs for file in source.files]
        own = {source.corpus.fingerprint: source.corpus for source in sources if source.corpus is not None}
        self.corpus = shared or (next(iter(own.values())) if len(own) == 1 else None)

    def __len__(self) -> int:
        return self._starts[-1]

    def question(self, i: int) -> Question:
        """Return the question of row i, with the prefix of its source."""
        source, row, written = self._locate(i)
        return replace(source.question(row), prefix=written.question_prefix)

    def passage_config(self, config: PassageConfig) -> PassageConfig:
        """Return the settings of passages that stand in no row, as those of a corpus.

        The prefix is the one with which training reads the passages of all sources. If sources have several, it is
        config.prefix.
        """
        written = (source.passage_prefix for source in self.written)
        prefixes = {config.prefix if prefix is None else prefix for prefix in written}
        return replace(config, prefix=prefixes.pop()) if len(prefixes) == 1 else config

    def row(self, i: int) -> QuestionRow:
        """Return row i, with the prefixes of its source."""
        source, number, written = self._locate(i)
        row = source.row(number)
        question = replace(row.question, prefix=written.question_prefix)
        return replace(row, question=question, passage_prefix=written.passage_prefix)

    def origin(self, i: int) -> tuple[str, str]:
        """Return the location of question row i: the path of its file, and its key there (the line or row number as
        text; in a tar shard the name of the sample)."""
        source, row, _ = self._locate(i)
        return source.origin(row)

    @property
    def lengths(self) -> Int64s:
        """The number of bytes of each question, int64 (number of rows,): of its text and, in a BEIR folder, its
        title."""
        return np.concatenate([source.columns[LENGTH] for source in self.sources])

    @property
    def text_keys(self) -> Int64s:
        """The hash of each question, int64 (number of rows,): `Passage.key` of its text and, in a BEIR folder, its
        title."""
        return np.concatenate([source.columns[KEY] for source in self.sources])

    @property
    def id_hashes(self) -> Int64s:
        """The 128-bit hashes of the ids of all questions, each in two integers, as `hash_ids` makes them: int64 (2,
        number of rows)."""
        return np.concatenate([source.columns[:LENGTH] for source in self.sources], axis=1)

    def _locate(self, i: int) -> tuple["QuestionSource", int, WrittenSource]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} is not in [0, {len(self)})")
        number = bisect_right(self._starts, i) - 1
        return self.sources[number], i - self._starts[number], self.written[number]


# ---- rows of files -------------------------------------------------------------------------------------------------


class RowQuestions:
    """The question rows of files in any of the formats in formats.FORMATS. Can be pickled.

    rows: the rows of the files. config: the settings of passages. corpus: where passages that rows name by id are
    looked up; None: there is none. relevance, teacher: the settings data.relevance and data.teacher, as `record_of`
    takes them. The constructor reads every row if the cache has no index of it. It raises DataError, naming the row,
    for a bad one, and ConfigError for rows that name passages by id if there is no corpus.

    A question without an id gets the name of its content key as id, as `python -m data pack` does, so the id does not
    depend on the name or folder of the file. columns, int64 (4, n), memory-mapped: two rows with the 128-bit hash of
    each question's id, one with the number of bytes of its text, one with the hash of its text. left_out: "", as there
    are no judgements.
    """

    left_out = ""

    def __init__(
        self,
        rows: Rows,
        config: PassageConfig,
        corpus: Corpus | None,
        relevance: str | None = None,
        teacher: str | None = None,
    ) -> None:
        self.rows, self.config, self.corpus, self.relevance, self.teacher = rows, config, corpus, relevance, teacher
        state = [FORMAT, rows.fingerprint, corpus.fingerprint if corpus else ""]
        self.fingerprint = json_digest(state)
        self.files = file_entries(rows.shards.indexes)
        others = corpus.rows.files if corpus else []
        self.paths = rows.files
        # the types, such as IfGiven, say whether rows may lack the fields
        checked = [COLUMNS, *state, *([] if relevance is None else [f"{type(relevance).__name__} {relevance}"])]
        checked += [] if teacher is None else [f"teacher {type(teacher).__name__} {teacher}"]
        self._mapped = cached_array(rows.files, "questions", others, checked, self._columns)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Int64s:
        return self._mapped.array

    def origin(self, i: int) -> tuple[str, str]:
        return self.rows.shards.origin(i)

    def question(self, i: int) -> Question:
        return self._record(i).question

    def row(self, i: int) -> QuestionRow:
        try:
            return row_of(self._record(i), self.corpus, self.rows.where(i), "data.passage.corpus")
        except KeyError as error:
            assert self.corpus is not None
            unknown = f"id '{error.args[0]}' is not in the corpus {_names(self.corpus)}"
            raise DataError(f"{self.rows.where(i)}: {unknown}") from None

    def _record(self, i: int) -> Record:
        try:
            record = record_of(self.rows.fields(i), self.config, self.relevance, self.teacher)
        except BadRow as error:
            file = shlex.quote(self.rows.shards.locate(i)[0].path)
            told = {"relevance": self.relevance, "teacher": self.teacher}
            key = "".join(f" {name}={shlex.quote(value)}" for name, value in told.items() if value is not None)
            pack = f"python -m data pack {file} out=packed to=dpr{key} on_error=skip"
            # pack reads scores of one field, of rows with negatives too
            by_pack = not isinstance(self.teacher, AnyScore | PairScore) and (i > 0 or not isinstance(error, BadFormat))
            hint = f". Rows like this one are left out by: {pack}" if by_pack else ""
            raise DataError(f"{self.rows.where(i)}: {error}{hint}") from None
        question_id = record.question.id or key_name(record.question.key)
        return replace(record, question=replace(record.question, id=question_id))

    def _columns(self) -> Int64s:
        """Compute an array int64 (4, n) for n question rows: the hash of each question's id in two integers, the number
        of bytes of its text, and the hash of its text. Reads every row once, so that a bad row is reported before
        training starts."""
        columns = np.empty((4, len(self)), np.int64)

        def read_id(i: int) -> str:
            question = self.row(i).question
            columns[LENGTH:, i] = len(question.text.encode()), Passage(question.text).key
            return question.id

        columns[:LENGTH] = hash_ids(map(read_id, range(len(self))))
        return columns


def row_of(record: Record, corpus: Corpus | None, where: str, key: str) -> QuestionRow:
    """Convert a parsed record to a question row. Passages that the record names by id are looked up in `corpus`.

    where: location of the record, for messages. key: the setting that names the corpus, for messages. Raises
    ConfigError when there are ids but no corpus; KeyError, with the first unknown id of a list, when the corpus lacks
    an id.
    """

    def passages(entries: Sequence[Passage] | Sequence[str]) -> PassageList:
        ids = [entry for entry in entries if isinstance(entry, str)]
        if not ids:
            return InlinePassages(entry for entry in entries if isinstance(entry, Passage))
        if corpus is None:
            raise ConfigError(f"{where} names its passages by id: set {key} to their file.")
        positions = corpus.positions(ids)
        if (positions < 0).any():
            raise KeyError(ids[int(np.argmin(positions))])
        return CorpusPassages(corpus, positions)

    lists = map(passages, (record.positives, record.negatives, record.hard_negatives))
    return QuestionRow(record.question, *lists, relevance=record.relevance)


def _names(corpus: Corpus) -> str:
    return corpus.rows.files[0] + (f" and {len(corpus.rows.files) - 1} more" if len(corpus.rows.files) > 1 else "")


# ---- BEIR folders --------------------------------------------------------------------------------------------------


class BeirQuestions:
    """The questions of a BEIR or MS MARCO folder that have a relevant passage, in the order of the file of questions.

    A passage is relevant if the judgements of the split give it a grade above 0. Can be pickled. corpus: used in place
    of the folder's own passages; None: these are used. key: the configuration key of the folder, for messages. graded:
    whether rows have the relevance of their positives.
    columns: as in `RowQuestions`, but number and hash are of title and text. left_out: a message about judgements
    (grade above 0) of unknown ids; "" if there are none. The constructor reads all files if the cache has no index of
    them. It raises ConfigError for a split or a file that the folder lacks; DataError for a damaged file, and when more
    judgements name unknown ids than known ones.
    """

    def __init__(self, folder: str, split: str, corpus: Corpus | None, key: str, graded: bool = False) -> None:
        qrels = _qrels_of(folder, split, key)
        self.queries = open_corpus(judgements.queries_of(qrels), key)
        self.corpus = corpus or open_corpus(corpus_of(folder) or os.path.join(folder, "corpus.jsonl"), key)
        state = [FORMAT, self.queries.fingerprint, self.corpus.fingerprint, sha256_of(qrels)]
        self.fingerprint = json_digest(state)
        self.paths = files = [*self.queries.rows.files, *self.corpus.rows.files]
        self._mapped = cached_array([qrels], "judged", files, [JUDGED_FORMAT, *state], lambda: self._judged(qrels))
        self._count, *counts, largest = self._mapped.array[:HEADER].tolist()
        self._largest = largest if graded else None
        self.left_out = judgements.left_out_line(qrels, counts)
        name = os.path.join(os.path.basename(os.path.normpath(folder)), os.path.relpath(qrels, folder))
        self.files = [FileEntry(name, os.path.getsize(qrels), self._count, self.fingerprint)]

    def __len__(self) -> int:
        return self._count

    @property
    def columns(self) -> Int64s:
        rows = self._mapped.array[HEADER : HEADER + self._count]
        return np.stack([*self.queries.id_hashes[:, rows], self.queries.lengths[rows], self.queries.keys[rows]])

    def origin(self, i: int) -> tuple[str, str]:
        return self.queries.rows.shards.origin(int(self._mapped.array[HEADER + i]))

    def question(self, i: int) -> Question:
        return self.queries.rows.read(int(self._mapped.array[HEADER + i]), query_of)

    def row(self, i: int) -> QuestionRow:
        starts = HEADER + self._count
        passages, grades = self._mapped.array[starts + self._count + 1 :].reshape(2, -1)
        judged = slice(*self._mapped.array[starts + i : starts + i + 2].tolist())
        return judged_row(self.question(i), self.corpus, passages[judged], grades[judged], self._largest)

    def _judged(self, qrels: str) -> Int64s:
        """Compute one array from the judgements in the file `qrels`: the number of questions with a known relevant
        passage (grade above 0), the two counts of `left_out`, the largest grade, and the four arrays of `find_judged`.

        Reads every judged question once, so that a bad one is reported before training starts.
        """
        counts, rows, starts, passages, grades = judgements.find_judged(qrels, (self.queries, self.corpus))
        for row in rows.tolist():
            self.queries.rows.read(row, query_of)
        header = [len(rows), *counts, grades.max(initial=1)]
        return np.concatenate([header, rows, starts, passages, grades]).astype(np.int64)


def judged_row(question: Question, corpus: Corpus, found: Int64s, grades: Int64s, largest: int | None) -> QuestionRow:
    """Return the row of a question with judged passages, at the positions `found` of the corpus: those of a grade above
    0 are positives, with the relevance grade / largest (None: without relevance), the others negatives."""
    right = grades > 0
    relevance = None if largest is None else (grades[right] / largest).tolist()
    parts = (CorpusPassages(corpus, found[part]) for part in (right, ~right))
    return QuestionRow(question, *parts, relevance=relevance)


QuestionSource = RowQuestions | BeirQuestions


def _qrels_of(folder: str, split: str, key: str) -> str:
    return judgements.qrels_file(folder, split, f"{key}={folder}: data.question.split")

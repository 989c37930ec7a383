"""`python -m data check`: reads all data of a source, prints statistics and lists everything that training would
refuse.

Shards of pictures: the SHA-256 of every file is compared with the one in its index, and every picture is decoded.
Questions and passages: every row is read as training reads it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import iadd
from typing import TYPE_CHECKING

import numpy as np

from dyad.data.base.errors import BadRow, DataError, SampleError
from dyad.data.base.parallel import parallel_map
from dyad.data.base.progress import print_line, tracked
from dyad.data.cli.index import index_sources, report_problems
from dyad.data.cli.inputs import InputKind, UnreadFields, kind_of, open_input, open_passages, refuse_unknown
from dyad.data.cli.options import CheckOptions, table_keys
from dyad.data.image_text.pictures import read_header
from dyad.data.question_passage.passages import InlinePassages, Passage
from dyad.data.question_passage.questions import LISTS, QuestionRow
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.index import ShardIndex
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource, parse_sources
from dyad.data.shards.storage import sha256_of
from dyad.data.tables.prepare import prepared_tables

if TYPE_CHECKING:
    from dyad.data.image_text.sample import ShardSample

BLOCK = 512  # samples per task
TASKS_PER_PROCESS = 16  # a process that gets fewer spends more time on its imports
SHOWN = 20  # bad lines that are printed
INTEGERS = partial(array, "q")  # 64 bits each: there may be many millions


def run(arguments: Sequence[str], options: CheckOptions) -> None:
    """Check all data that the arguments (paths or URLs) name, and print statistics. Raises DataError at the end if
    anything is wrong."""
    checks = {
        InputKind.pictures: check_shards,
        InputKind.questions: check_questions,
        InputKind.passages: check_passages,
    }
    checks[kind_of(arguments, options)](arguments, options)


@dataclass
class BadLines:
    """Messages about bad data. Stores only the first SHOWN messages, because nearly every row may be bad. count: number
    of all messages."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.lines.append(f"bad: {line}")

    def __iadd__(self, other: BadLines) -> BadLines:
        self.lines += other.lines[: SHOWN - len(self.lines)]
        self.count += other.count
        return self

    def print(self) -> None:
        """Print the messages about bad data that this object (BadLines) stores, the first SHOWN at most. If there were
        more, print also how many were not stored."""
        more = [f"… and {self.count - SHOWN:,} more"] if self.count > SHOWN else []
        for line in [*self.lines, *more]:
            print_line(line)


def count_repeated(keys: array[int]) -> int:
    """Return how many of the keys are equal to an earlier key in the array."""
    return len(keys) - len(np.unique(np.array(keys, np.int64)))


# ---- pictures ------------------------------------------------------------------------------------------------------


@dataclass
class PictureFindings:
    """Statistics of samples in shards of pictures. `a += b` adds the statistics b of other samples to a.

    formats, modes: number of pictures by file suffix and by PIL's name of the colour format. widths, heights: of each
    picture, in pixels. words: number of words of each caption. pictures, texts: content keys (64-bit hashes) of the
    pictures and of the captions. bad: messages about bad samples.
    """

    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: array[int] = field(default_factory=INTEGERS)
    heights: array[int] = field(default_factory=INTEGERS)
    words: array[int] = field(default_factory=INTEGERS)
    pictures: array[int] = field(default_factory=INTEGERS)
    texts: array[int] = field(default_factory=INTEGERS)
    bad: BadLines = field(default_factory=BadLines)

    def __iadd__(self, other: PictureFindings) -> PictureFindings:
        for part in fields(self):
            setattr(self, part.name, iadd(getattr(self, part.name), getattr(other, part.name)))
        return self


def check_shards(values: Sequence[str], options: CheckOptions) -> None:
    """Check all shards of pictures that `values` (paths or URLs) name, and print statistics.

    Each shard is indexed first. If its index lists problems (damaged places in the file), they are printed and the
    samples of this shard are not read. Raises DataError at the end when anything is damaged, or when there is no
    sample.
    """
    refuse_unknown(values, options)
    indexes = index_sources(
        parse_sources(values, "SOURCE", tables=prepared_tables(table_keys(options))), options.workers
    )
    sound = [index for index in indexes if not index.problems]
    tasks = [
        (index, range(index.samples)[start : start + BLOCK], options)
        for index in sound
        for start in range(0, index.samples, BLOCK)
    ]
    found = PictureFindings()
    with parallel_map(options.workers, len(tasks) // TASKS_PER_PROCESS) as run_all:
        for index, digest in zip(sound, run_all(sha256_of, [index.path for index in sound]), strict=True):
            if digest != index.sha256:
                found.bad.add(f"{index.path}: its SHA-256 is not as indexed")
        for part in tracked(run_all(examine, tasks), "decoding", len(tasks)):
            found += part
    print(f"samples     {found.samples:,} in {len(sound)} shards, {sum(index.size for index in sound) / 1e6:,.1f} MB")
    print_line(f"pictures    {_counts(found.formats)}; modes {_counts(found.modes)}")
    print(f"width       {_range(found.widths)}")
    print(f"height      {_range(found.heights)}")
    print(f"captions    {len(found.words):,}; words {_range(found.words)}")
    print(f"duplicates  {count_repeated(found.pictures):,} pictures, {count_repeated(found.texts):,} texts")
    print(f"damage      {found.bad.count:,}")
    found.bad.print()
    report_problems(indexes)
    if not found.samples:
        raise DataError("there is no sample.")
    if found.bad.count:
        raise DataError(f"{found.bad.count:,} findings of damage in {found.samples:,} samples.")


def examine(task: tuple[ShardIndex, range, CheckOptions]) -> PictureFindings:
    """Read and decode samples of one shard, and return their statistics, which list the bad samples.

    task: the index of the shard, the positions of the samples in the shard, and the options of the command.
    """
    from dyad.data.image_text.sample import ShardSample

    index, rows, options = task
    shards, found = Shards([ShardSource((index.path,))], [index]), PictureFindings(samples=len(rows))
    for row in rows:
        try:
            sample = ShardSample.read(shards, row)
            sample.decoded(options.image_key, options.max_image_pixels)
            encoded = sample.picture(options.image_key)
            header = read_header(encoded, options.max_image_pixels)
            found.formats[header.suffix] += 1
            found.modes[header.mode] += 1
            found.widths.append(header.width)
            found.heights.append(header.height)
            found.pictures.append(content_key(encoded))
            for text in _captions(sample, options.captions.split(",")):
                found.words.append(len(text.split()))
                found.texts.append(content_key(text.encode()))
        except DataError as error:
            found.bad.add(str(error))
    return found


def _captions(sample: ShardSample, names: Sequence[str]) -> Sequence[str]:
    """Return the captions of a sample. They are read from the first entry of `names` that the sample has: "txt" is its
    text member, another name is a field of its json member.

    If this entry is "cls", the class number is checked and no caption is returned. Raises SampleError when the sample
    has no entry of `names`, or when the captions cannot be used for training.
    """
    there = {*sample.members, *sample.fields} - {"json"}
    name = next((name for name in names if name in there), None)
    if name is None:
        has = ", ".join(sorted(there))
        raise SampleError(f"{sample.where} has no caption: captions={','.join(names)}, it has {has:.200}.")
    if name == "cls":
        sample.label(name)
        return ()
    return sample.captions(name)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


def _range(values: array[int]) -> str:
    return f"min {min(values)}, median {np.median(values):g}, max {max(values)}" if values else "none"


# ---- questions and passages ----------------------------------------------------------------------------------------


@dataclass
class PassageStatistics:
    """Statistics of passages. id_hashes: 64-bit hashes of the ids. keys: content keys (hashes of title and text).
    sizes: bytes of each text. titles: number of passages with a title."""

    id_hashes: array[int] = field(default_factory=INTEGERS)
    keys: array[int] = field(default_factory=INTEGERS)
    sizes: array[int] = field(default_factory=INTEGERS)
    titles: int = 0

    def add(self, passage: Passage) -> None:
        self.keys.append(passage.key)
        self.sizes.append(len(passage.text.encode()))
        self.titles += bool(passage.title)
        if passage.id is not None:
            self.id_hashes.append(content_key(passage.id.encode()))

    def __str__(self) -> str:
        return (
            f"{len(self.keys):,}, {self.titles:,} with a title, {count_repeated(self.keys):,} repeat another;"
            f" bytes {_quantiles(self.sizes)}"
        )


def _contradictions(row: QuestionRow) -> Iterator[str]:
    """Yield a message for each passage that a question row lists both as positive and as negative."""
    positives = {key: i for i, key in reversed(list(enumerate(row.positives.keys)))}
    for name in LISTS[1:]:
        for i, key in enumerate(getattr(row, name).keys):
            if key in positives:
                yield f"right and wrong at once: positives[{positives[key]}] is {name}[{i}]"


def check_questions(values: Sequence[str], options: CheckOptions) -> None:
    """Read every question row of the files that `values` (paths or URLs) name, and the corpus of passages if there is
    one, and print statistics.

    Raises DataError at the end when training would refuse a row, when a row lists a passage both as positive and as
    negative, when the corpus has an empty passage, or when there is no row.
    """
    source, bad, rows = open_input(values, options, "SOURCE"), BadLines(), 0
    lengths = {name: INTEGERS() for name in LISTS}  # of the lists of each row
    answers, inline = INTEGERS(), PassageStatistics()  # number of answers; passages that stand in the rows themselves
    questions, positives = INTEGERS(), INTEGERS()  # content keys; positives: of those among `inline`
    for where, row in source.rows:
        rows += 1
        if isinstance(row, BadRow):
            bad.add(f"{where}: {row}")
            continue
        for message in _contradictions(row):
            bad.add(f"{where}: {message}")
        for name in LISTS:
            passages = getattr(row, name)
            lengths[name].append(len(passages))
            for passage in passages if isinstance(passages, InlinePassages) else ():
                inline.add(passage)
        if isinstance(row.positives, InlinePassages):
            positives.extend(row.positives.keys)
        questions.append(row.question.key)
        answers.append(len(row.question.answers))
    corpus = PassageStatistics()
    for i, passage in enumerate(source.passages()):
        corpus.add(passage)
        if source.corpus and _is_empty(passage):
            bad.add(f"{source.corpus.rows.where(i)}: empty passage")
    print(f"questions       {len(questions):,} of {rows:,} rows, {count_repeated(questions):,} repeat another")
    for name, per_row in lengths.items():
        print(f"{name.replace('_', ' '):15} {sum(per_row):,}; per row {_quantiles(per_row)}")
    print(f"answers         {sum(answers):,}, of {len(answers) - answers.count(0):,} questions")
    if inline.keys:
        print(f"passages        {inline}")
    if source.corpus:
        print(f"corpus          {corpus}")
    if source.corpus and positives:
        missing = np.isin(np.array(positives, np.int64), source.corpus.keys, invert=True).sum()
        print(f"not in corpus   {missing:,} of the {len(positives):,} positives that are in the rows")
    _finish(source.unread, bad, rows)


def check_passages(values: Sequence[str], options: CheckOptions) -> None:
    """Read every passage of the files that `values` (paths or URLs) name, and print statistics. The files hold passages
    only, no questions.

    Raises DataError at the end when a passage is empty, cannot be read, has no id or repeats the id of another one, or
    when there is no row.
    """
    found, bad, unread, rows = PassageStatistics(), BadLines(), UnreadFields(), 0
    for where, passage in open_passages(values, "SOURCE", unread, options):
        rows += 1
        if isinstance(passage, BadRow):
            bad.add(f"{where}: {passage}")
            continue
        found.add(passage)
        if passage.id is None:
            bad.add(f"{where}: no id")
        if _is_empty(passage):
            bad.add(f"{where}: empty passage")
    for line in _repeated_ids(values, found, options) if count_repeated(found.id_hashes) else ():
        bad.add(line)
    print(f"passages        {found}")
    _finish(unread, bad, rows)


def _repeated_ids(values: Sequence[str], found: PassageStatistics, options: CheckOptions) -> Iterator[str]:
    """Yield a message for each passage that repeats the id of an earlier one. Reads all files again, because the
    statistics in `found` have only hashes of the ids."""
    hashes, counts = np.unique(np.array(found.id_hashes, np.int64), return_counts=True)
    repeated, first = set(hashes[counts > 1].tolist()), dict[str, str]()
    for where, passage in open_passages(values, "SOURCE", UnreadFields(), options):
        if isinstance(passage, Passage) and passage.id and content_key(passage.id.encode()) in repeated:
            if passage.id in first:
                yield f"{where}: id '{passage.id}' again, first at {first[passage.id]}"
            first.setdefault(passage.id, where)


def _is_empty(passage: Passage) -> bool:
    return not passage.text.strip() and not passage.title.strip()


def _quantiles(values: array[int]) -> str:
    if not values:
        return "none"
    low, median, high, most = np.quantile(np.array(values), [0, 0.5, 0.95, 1], method="nearest")
    return f"min {low:g}, median {median:g}, 95 % {high:g}, max {most:g}"


def _finish(unread: UnreadFields, bad: BadLines, rows: int) -> None:
    """Print the last part of the report on questions or passages: the fields that the readers did not use, and the
    messages about bad rows.

    Raises DataError when there is a bad row, or no row at all. rows: number of rows that were read.
    """
    print(f"not read        {str(unread) or 'nothing'}")
    if bad.count:
        bad.print()
        raise DataError(f"{bad.count:,} problems in {rows:,} rows.")
    if not rows:
        raise DataError("there is no row.")

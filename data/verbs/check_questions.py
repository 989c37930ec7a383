"""`python -m data check` for questions and passages: counts them and lists rows that training would refuse."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from data.errors import BadRow, DataError, printable
from data.keys import content_key
from data.passages import InlinePassages, Passage
from data.questions import LISTS, QuestionRow
from data.verbs.inputs import open_input, open_passages, unread_fields
from data.verbs.listing import BadLines, count_repeated
from data.verbs.options import CheckOptions

NUMBERS = partial(array, "q")


@dataclass
class PassageStatistics:
    """What passages hold, as numbers: 64-bit hashes of their ids, content keys, bytes of their texts."""

    id_hashes: array[int] = field(default_factory=NUMBERS)
    keys: array[int] = field(default_factory=NUMBERS)
    sizes: array[int] = field(default_factory=NUMBERS)
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
            f" bytes {_range(self.sizes)}"
        )


@dataclass
class QuestionFindings:
    """What the rows hold. lengths: for each list of passages, its length in each row. questions: content keys.

    inline: the passages that stand in the rows themselves. positives: content keys of the positives among them.
    """

    lengths: dict[str, array[int]] = field(default_factory=lambda: {name: NUMBERS() for name in LISTS})
    questions: array[int] = field(default_factory=NUMBERS)
    inline: PassageStatistics = field(default_factory=PassageStatistics)
    positives: array[int] = field(default_factory=NUMBERS)
    answered: int = 0
    answers: int = 0

    def add(self, row: QuestionRow) -> None:
        for name, lengths in self.lengths.items():
            passages = getattr(row, name)
            lengths.append(len(passages))
            for passage in passages if isinstance(passages, InlinePassages) else ():
                self.inline.add(passage)
        if isinstance(row.positives, InlinePassages):
            self.positives.extend(row.positives.keys)
        self.questions.append(row.question.key)
        self.answers += len(row.question.answers)
        self.answered += bool(row.question.answers)


def _contradictions(row: QuestionRow) -> Iterator[str]:
    """Messages about passages that the row lists as positive and as negative."""
    positives = {key: i for i, key in reversed(list(enumerate(row.positives.keys)))}
    for name in LISTS[1:]:
        for i, key in enumerate(getattr(row, name).keys):
            if key in positives:
                yield f"right and wrong at once: positives[{positives[key]}] is {name}[{i}]"


def check_questions(values: Sequence[str], options: CheckOptions) -> None:
    """Read every row and its corpus and print a summary.

    Raises DataError at the end when training would refuse a row, or a row lists a passage as positive and as negative.
    """
    source, found, bad, rows = open_input(values, options, "SOURCE"), QuestionFindings(), BadLines(), 0
    for where, row in source.rows():
        rows += 1
        if isinstance(row, BadRow):
            bad.add(f"{where}: {row}")
            continue
        found.add(row)
        for message in _contradictions(row):
            bad.add(f"{where}: {message}")
    corpus = PassageStatistics()
    for i, passage in enumerate(source.passages()):
        corpus.add(passage)
        if source.corpus and _is_empty(passage):
            bad.add(f"{source.corpus.rows.where(i)}: empty passage")
    repeated = count_repeated(found.questions)
    print(f"questions       {len(found.questions):,} of {rows:,} rows, {repeated:,} repeat another")
    for name, lengths in found.lengths.items():
        print(f"{name.replace('_', ' '):15} {sum(lengths):,}; per row {_range(lengths)}")
    print(f"answers         {found.answers:,}, of {found.answered:,} questions")
    if found.inline.keys:
        print(f"passages        {found.inline}")
    if source.corpus:
        print(f"corpus          {corpus}")
    if source.corpus and found.positives:
        missing = np.isin(np.array(found.positives, np.int64), source.corpus.keys, invert=True).sum()
        print(f"not in corpus   {missing:,} of the {len(found.positives):,} positives that are in the rows")
    _finish(source.unread, bad, rows)


def check_passages(values: Sequence[str], options: CheckOptions) -> None:
    """Read every passage of files without questions and print a summary.

    Raises DataError at the end when a passage is empty or cannot be read, or has no id or the id of another one.
    """
    found, bad, unread, rows = PassageStatistics(), BadLines(), Counter[str](), 0
    for where, passage in open_passages(values, "SOURCE", unread):
        rows += 1
        if isinstance(passage, BadRow):
            bad.add(f"{where}: {passage}")
            continue
        found.add(passage)
        if passage.id is None:
            bad.add(f"{where}: no id")
        if _is_empty(passage):
            bad.add(f"{where}: empty passage")
    for line in _repeated_ids(values, found) if count_repeated(found.id_hashes) else ():
        bad.add(line)
    print(f"passages        {found}")
    _finish(unread, bad, rows)


def _repeated_ids(values: Sequence[str], found: PassageStatistics) -> Iterator[str]:
    """Messages about ids that stand twice. Reads all passages again, since only hashes of the ids were kept."""
    hashes, counts = np.unique(np.array(found.id_hashes, np.int64), return_counts=True)
    first: dict[int, str] = dict.fromkeys(hashes[counts > 1].tolist(), "")
    for where, passage in open_passages(values, "SOURCE", Counter()):
        if isinstance(passage, BadRow) or passage.id is None:
            continue
        if (key := content_key(passage.id.encode())) in first:
            if first[key]:
                yield f"{where}: id '{passage.id}' again, first at {first[key]}"
            first[key] = first[key] or where


def _is_empty(passage: Passage) -> bool:
    return not passage.text.strip() and not passage.title.strip()


def _range(values: array[int]) -> str:
    if not values:
        return "none"
    low, median, high, most = np.quantile(np.array(values), [0, 0.5, 0.95, 1], method="nearest")
    return f"min {low:g}, median {median:g}, 95 % {high:g}, max {most:g}"


def _finish(unread: Counter[str], bad: BadLines, rows: int) -> None:
    """Print the fields that were not read and the bad lines. Raises DataError for a bad line or no row at all."""
    print(f"not read        {unread_fields(unread) or 'nothing'}")
    if bad.count:
        print(printable(str(bad)))
        raise DataError(f"{bad.count:,} problems in {rows:,} rows.")
    if not rows:
        raise DataError("there is no row.")

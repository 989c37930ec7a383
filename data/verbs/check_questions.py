"""`python -m data check` for questions and passages: what is in there, and which rows training would refuse."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from data.errors import DataError, printable
from data.keys import content_key
from data.passages import Inline, Passage
from data.questions import LISTS, Row
from data.tables import BadRow
from data.verbs.inputs import open_input, open_passages, unread_fields
from data.verbs.options import CheckOptions

SHOWN = 20


def _numbers() -> array[int]:
    return array("q")


@dataclass
class Texts:
    """What passages hold, kept as numbers: 64-bit ids of their ids and contents, bytes of their texts."""

    names: array[int] = field(default_factory=_numbers)
    keys: array[int] = field(default_factory=_numbers)
    sizes: array[int] = field(default_factory=_numbers)
    titles: int = 0

    def add(self, passage: Passage) -> None:
        self.keys.append(passage.key)
        self.sizes.append(len(passage.text.encode()))
        self.titles += bool(passage.title)
        if passage.id is not None:
            self.names.append(content_key(passage.id.encode()))

    def line(self) -> str:
        return (
            f"{len(self.keys):,}, {self.titles:,} with a title, {_repeated(self.keys):,} repeat another;"
            f" bytes {_range(self.sizes)}"
        )


@dataclass
class Bad:
    """What is wrong: the first lines, and how many there are; nearly every row of a file may be bad."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.lines.append(line)


@dataclass
class Findings:
    """What the rows hold: how many passages each has in which list, content keys of questions and of the right
    passages that are in the rows."""

    counts: dict[str, array[int]] = field(default_factory=lambda: {name: _numbers() for name in LISTS})
    questions: array[int] = field(default_factory=_numbers)
    inline: Texts = field(default_factory=Texts)
    right: array[int] = field(default_factory=_numbers)
    answered: int = 0
    answers: int = 0
    bad: Bad = field(default_factory=Bad)

    def add(self, row: Row, where: str) -> None:
        for name, count in self.counts.items():
            passages = getattr(row, name)
            count.append(len(passages))
            for passage in passages if isinstance(passages, Inline) else ():
                self.inline.add(passage)
        if isinstance(row.positives, Inline):
            self.right.extend(row.positives.keys)
        self.questions.append(row.question.key)
        self.answers += len(row.question.answers)
        self.answered += bool(row.question.answers)
        for what in _contradictions(row):
            self.bad.add(f"{where}: {what}")


def _contradictions(row: Row) -> Iterator[str]:
    """Passages that the row calls right and wrong."""
    right = {key: i for i, key in reversed(list(enumerate(row.positives.keys)))}
    for name in LISTS[1:]:
        for i, key in enumerate(getattr(row, name).keys):
            if key in right:
                yield f"right and wrong at once: positives[{right[key]}] is {name}[{i}]"


def check_questions(values: Sequence[str], options: CheckOptions) -> None:
    """Read every row and its corpus, print a summary; raises DataError at the end when training would refuse a row, or
    one calls a passage right and wrong.
    """
    source, found, rows = open_input(values, options, "SOURCE"), Findings(), 0
    for where, row in source.rows():
        rows += 1
        if isinstance(row, BadRow):
            found.bad.add(f"{where}: {row}")
        else:
            found.add(row, where)
    corpus = Texts()
    for i, passage in enumerate(source.passages()):
        corpus.add(passage)
        if source.corpus and not passage.text.strip() and not passage.title.strip():
            found.bad.add(f"{source.corpus.rows.where(i)}: empty passage")
    print(f"questions       {len(found.questions):,} of {rows:,} rows, {_repeated(found.questions):,} repeat another")
    for name, count in found.counts.items():
        print(f"{name.replace('_', ' '):15} {sum(count):,}; per row {_range(count)}")
    print(f"answers         {found.answers:,}, of {found.answered:,} questions")
    if found.inline.keys:
        print(f"passages        {found.inline.line()}")
    if source.corpus:
        print(f"corpus          {corpus.line()}")
    if source.corpus and found.right:
        missing = np.isin(np.array(found.right, np.int64), source.corpus.keys, invert=True).sum()
        print(f"not in corpus   {missing:,} of the {len(found.right):,} positives that are in the rows")
    print(f"not read        {unread_fields(source.unread) or 'nothing'}")
    _finish(found.bad, rows)


def check_passages(values: Sequence[str], options: CheckOptions) -> None:
    """The same for passages alone, of which each needs an id of its own."""
    found, bad, unread, rows = Texts(), Bad(), Counter[str](), 0
    for where, passage in open_passages(values, "SOURCE", unread):
        rows += 1
        if isinstance(passage, BadRow):
            bad.add(f"{where}: {passage}")
            continue
        found.add(passage)
        if passage.id is None:
            bad.add(f"{where}: no id")
        if not passage.text.strip() and not passage.title.strip():
            bad.add(f"{where}: empty passage")
    for line in _repeated_ids(values, found) if _repeated(found.names) else ():
        bad.add(line)
    print(f"passages        {found.line()}")
    print(f"not read        {unread_fields(unread) or 'nothing'}")
    _finish(bad, rows)


def _repeated_ids(values: Sequence[str], found: Texts) -> Iterator[str]:
    """Reads everything again, to say where they are."""
    names, counts = np.unique(np.array(found.names, np.int64), return_counts=True)
    first: dict[int, str] = dict.fromkeys(names[counts > 1].tolist(), "")
    for where, passage in open_passages(values, "SOURCE", Counter()):
        name = -1 if isinstance(passage, BadRow) or passage.id is None else content_key(passage.id.encode())
        if isinstance(passage, Passage) and name in first:
            if first[name]:
                yield f"{where}: id '{passage.id}' again, first at {first[name]}"
            first[name] = first[name] or where


def _range(values: array[int]) -> str:
    if not values:
        return "none"
    low, median, high, most = np.quantile(np.array(values), [0, 0.5, 0.95, 1], method="nearest")
    return f"min {low:g}, median {median:g}, 95 % {high:g}, max {most:g}"


def _repeated(keys: array[int]) -> int:
    """How many have an equal one before them."""
    return len(keys) - len(np.unique(np.array(keys, np.int64)))


def _finish(bad: Bad, rows: int) -> None:
    """List what is bad; DataError when there is anything, or nothing at all."""
    for line in bad.lines:
        print(printable(f"bad: {line}"))
    if bad.count > SHOWN:
        print(f"… and {bad.count - SHOWN:,} more")
    if bad.count:
        raise DataError(f"{bad.count:,} problems in {rows:,} rows.")
    if not rows:
        raise DataError("there is no row.")

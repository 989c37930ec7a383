"""`python -m data check` for questions and passages: what is in there, and which rows training would refuse."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from data.errors import DataError
from data.inputs import open_input, open_passages, unread_fields
from data.keys import content_key
from data.options import CheckOptions
from data.passages import Inline, Passage
from data.questions import Row
from data.tables import BadRow

SHOWN = 20
LISTS = ("positives", "negatives", "hard_negatives")


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
class Findings:
    """What the rows hold: how many passages each has in which list, content keys of questions and of the right
    passages that are in the rows; bad: lines to print."""

    counts: dict[str, array[int]] = field(default_factory=lambda: {name: _numbers() for name in LISTS})
    questions: array[int] = field(default_factory=_numbers)
    inline: Texts = field(default_factory=Texts)
    right: array[int] = field(default_factory=_numbers)
    answered: int = 0
    answers: int = 0
    bad: list[str] = field(default_factory=list)

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
        self.bad += [f"{where}: {what}" for what in _contradictions(row)]


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
            found.bad.append(f"{where}: {row}")
        else:
            found.add(row, where)
    corpus = Texts()
    for i, passage in enumerate(source.passages()):
        corpus.add(passage)
        if source.corpus and not passage.text.strip() and not passage.title.strip():
            found.bad.append(f"{source.corpus.rows.where(i)}: empty passage")
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
    found, bad, unread, rows = Texts(), list[str](), Counter[str](), 0
    for where, passage in open_passages(values, "SOURCE", unread):
        rows += 1
        if isinstance(passage, BadRow):
            bad.append(f"{where}: {passage}")
            continue
        found.add(passage)
        if passage.id is None:
            bad.append(f"{where}: no id")
        if not passage.text.strip() and not passage.title.strip():
            bad.append(f"{where}: empty passage")
    bad += _repeated_ids(values, found) if _repeated(found.names) else []
    print(f"passages        {found.line()}")
    print(f"not read        {unread_fields(unread) or 'nothing'}")
    _finish(bad, rows)


def _repeated_ids(values: Sequence[str], found: Texts) -> list[str]:
    """Reads everything again, to say where they are."""
    names, counts = np.unique(np.array(found.names, np.int64), return_counts=True)
    first: dict[int, str] = dict.fromkeys(names[counts > 1].tolist(), "")
    bad = []
    for where, passage in open_passages(values, "SOURCE", Counter()):
        name = -1 if isinstance(passage, BadRow) or passage.id is None else content_key(passage.id.encode())
        if isinstance(passage, Passage) and name in first:
            bad += [f"{where}: id '{passage.id}' again, first at {first[name]}"] if first[name] else []
            first[name] = first[name] or where
    return bad


def _range(values: array[int]) -> str:
    if not values:
        return "none"
    low, median, high, most = np.quantile(np.array(values), [0, 0.5, 0.95, 1], method="nearest")
    return f"min {low:g}, median {median:g}, 95 % {high:g}, max {most:g}"


def _repeated(keys: array[int]) -> int:
    """How many have an equal one before them."""
    return len(keys) - len(np.unique(np.array(keys, np.int64)))


def _finish(bad: Sequence[str], rows: int) -> None:
    """List what is bad; DataError when there is anything, or nothing at all."""
    for line in bad[:SHOWN]:
        print(f"bad: {line}")
    if len(bad) > SHOWN:
        print(f"… and {len(bad) - SHOWN:,} more")
    if bad:
        raise DataError(f"{len(bad):,} problems in {rows:,} rows.")
    if not rows:
        raise DataError("there is no row.")

"""A corpus: passages by position or id, read by offset; what is held of them are columns of numbers on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.errors import ConfigError, DataError
from data.kept import cached_array
from data.keys import Int64s, hash_ids
from data.passages import Passage, Passages
from data.records import named, passage_of
from data.rows import SUFFIXES, Rows, open_rows
from data.sources import local_path, parse_sources
from data.tables import BadRow

FORMAT = "1"
HASH, CHECK, ORDER, KEY, LENGTH = range(5)  # rows of the table; ORDER sorts passages by the hash of their id
AT_ONCE = 65_536


def open_corpus(value: str | Sequence[str], key: str) -> Corpus:
    """The passages of .jsonl, .json, .tsv files or shards, or of a BEIR folder, written like data.train.

    A row has an id (_id, docid, id, psg_id, passage_id), a text and perhaps a title. Raises ConfigError, naming `key`,
    for what matches nothing or has a weight; DataError, naming the line, for a row that is no passage and an id that
    comes twice. The first opening reads everything once.
    """
    return Corpus(open_rows(corpus_files(value, key)))


def corpus_files(value: str | Sequence[str], key: str) -> list[str]:
    """The files that `value` names; nothing is read. Raises ConfigError as `open_corpus`."""
    if isinstance(value, str) and os.path.isfile(inside := os.path.join(local_path(value), "corpus.jsonl")):
        return [inside]
    sources = parse_sources(value, key, SUFFIXES)
    if any(source.weight != 1 for source in sources):
        raise ConfigError(f"{key}={value}: a corpus has no weights.")
    return [file for source in sources for file in source.shards]


class Corpus:
    """Passages 0 … len - 1. Can be pickled; columns are mapped and files opened by every process on its own."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.fingerprint = rows, rows.fingerprint
        self._mapped = cached_array(rows.files, "passages", [], [FORMAT, rows.fingerprint], lambda: _table(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Passage:
        return _read(self.rows, i)

    def __iter__(self) -> Iterator[Passage]:
        return (self[i] for i in range(len(self)))

    @property
    def keys(self) -> Int64s:
        """(n,) int64 content keys, mapped."""
        return self._mapped.array[KEY]

    @property
    def lengths(self) -> Int64s:
        """(n,) bytes of title and text, mapped: to sort by length without reading."""
        return self._mapped.array[LENGTH]

    def ids(self, start: int, stop: int) -> list[str]:
        """Ids of passages [start, stop)."""
        return [str(self[i].id) for i in range(start, min(stop, len(self)))]

    def position(self, name: str) -> int:
        """The passage with this id; KeyError when there is none."""
        found = int(self.positions([name])[0])
        if found < 0:
            raise KeyError(name)
        return found

    @property
    def id_hashes(self) -> Int64s:
        """(2, n): `keys.hash_ids` of the ids, mapped."""
        return self._mapped.array[: CHECK + 1]

    def positions(self, ids: Sequence[str]) -> Int64s:
        """(k,) positions of passages by id, −1 where there is none. Nothing is read: ids are known by 128 bits."""
        table, wanted = self._mapped.array, hash_ids(ids)
        found = np.full(len(ids), -1, np.int64)
        place = np.searchsorted(table[HASH], wanted[0], sorter=table[ORDER])
        left = np.flatnonzero(place < len(self))
        while len(left):
            here = table[ORDER][place[left]]
            same = table[HASH][here] == wanted[0][left]
            hit = same & (table[CHECK][here] == wanted[1][left])
            found[left[hit]] = here[hit]
            place[left] += 1
            left = left[same & ~hit & (place[left] < len(self))]  # ids of one hash lie side by side
        return found


@dataclass(frozen=True)
class Chosen(Passages):
    """Passages of a corpus by position, read when they are asked for."""

    corpus: Corpus
    positions: Int64s

    @property
    def keys(self) -> list[int]:
        return self.corpus.keys[self.positions].tolist()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: Any, /) -> Any:
        return [self[j] for j in range(len(self))[i]] if isinstance(i, slice) else self.corpus[int(self.positions[i])]


def _read(rows: Rows, i: int) -> Passage:
    fields = rows.fields(i)
    try:
        passage = passage_of(fields)
        if passage.id is None:
            raise BadRow("no id", f"its fields are {named(fields)}")
    except BadRow as error:
        raise DataError(f"{rows.where(i)}: {error}") from None
    return passage


def _table(rows: Rows) -> Int64s:
    """(5, n): what the constants at the top name. Everything is read once, in order."""
    table = np.empty((5, len(rows)), np.int64)
    for start in range(0, len(rows), AT_ONCE):
        block = range(start, min(start + AT_ONCE, len(rows)))
        ids = []
        for i in block:
            passage = _read(rows, i)
            ids.append(str(passage.id))
            table[KEY, i], table[LENGTH, i] = passage.key, len(passage.title.encode()) + len(passage.text.encode())
        table[: CHECK + 1, start : block.stop] = hash_ids(ids)
    table[ORDER] = np.lexsort((table[CHECK], table[HASH]))
    _refuse_twice(rows, table)
    return table


def _refuse_twice(rows: Rows, table: Int64s) -> None:
    order = table[ORDER]
    same = (table[: CHECK + 1, order[1:]] == table[: CHECK + 1, order[:-1]]).all(axis=0)
    if same.any():
        at = int(np.argmax(same))
        first, second = sorted(order[at : at + 2].tolist())
        raise DataError(f"{rows.where(second)}: id '{_read(rows, first).id}' again, first at {rows.where(first)}")

"""A corpus: passages by position or id, read by offset. Only columns of numbers about them are kept, in mapped files.

n passages; k ids to look up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyad.data.base.errors import BadRow, ConfigError, DataError
from dyad.data.question_passage.formats import named, passage_of
from dyad.data.question_passage.passages import InlinePassages, Passage
from dyad.data.shards.content_keys import Int64s, hash_ids
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.rows import SUFFIXES, Rows, open_rows
from dyad.data.shards.sources import local_path, parse_sources

FORMAT = "1"
HASH, CHECK, ORDER, KEY, LENGTH = range(5)  # rows of the table; ORDER sorts passages by HASH, then CHECK


def open_corpus(value: str | Sequence[str], key: str) -> Corpus:
    """The passages of .jsonl, .json, .tsv files or shards, or of a BEIR folder, written like data.train.

    A row has an id (_id, docid, id, psg_id, passage_id), a text and perhaps a title. Raises ConfigError, naming `key`,
    when `value` matches nothing or has a weight; DataError, naming the line, for a row that is no passage and for a
    repeated id. The first call for some files reads all of them.
    """
    return Corpus(open_rows(corpus_files(value, key)))


def corpus_files(value: str | Sequence[str], key: str) -> list[str]:
    """The paths of the files that `value` names. The files are not read. Raises ConfigError as `open_corpus`."""
    if isinstance(value, str) and os.path.isfile(beir := os.path.join(local_path(value), "corpus.jsonl")):
        return [beir]
    sources = parse_sources(value, key, SUFFIXES)
    if any(source.weight != 1 for source in sources):
        raise ConfigError(f"{key}={value}: a corpus has no weights.")
    return [file for source in sources for file in source.shards]


class Corpus:
    """Passages 0 … n - 1. Can be pickled: each process maps the columns and opens the files itself."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.fingerprint = rows, rows.fingerprint
        self._mapped = cached_array(rows.files, "passages", [], [FORMAT, rows.fingerprint], lambda: _table(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Passage:
        return self.rows.read(i, _passage_with_id)

    @property
    def keys(self) -> Int64s:
        """(n,) content ids, mapped."""
        return self._mapped.array[KEY]

    @property
    def lengths(self) -> Int64s:
        """(n,) bytes of title and text, mapped: passages can be sorted by length without reading them."""
        return self._mapped.array[LENGTH]

    def ids(self, start: int, stop: int) -> list[str]:
        """Ids of passages [start, stop)."""
        return [str(self[i].id) for i in range(start, min(stop, len(self)))]

    @property
    def id_hashes(self) -> Int64s:
        """(2, n): `hash_ids` of the ids, mapped."""
        return self._mapped.array[: CHECK + 1]

    def positions(self, ids: Sequence[str]) -> Int64s:
        """(k,) positions of the passages with these ids, −1 where there is none. Nothing is read: 128 bits of hash
        identify an id."""
        return find_hashes(self.id_hashes, self._mapped.array[ORDER], hash_ids(ids))


@dataclass(frozen=True)
class CorpusPassages(Sequence[Passage]):
    """The passages at some positions (k,) of a corpus, read on access."""

    corpus: Corpus
    positions: Int64s

    @property
    def keys(self) -> list[int]:
        """Their content ids."""
        return self.corpus.keys[self.positions].tolist()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: Any, /) -> Any:
        return self.corpus[int(self.positions[i])]


PassageList = InlinePassages | CorpusPassages


def _passage_with_id(fields: dict[str, Any]) -> Passage:
    """The passage of a row. Raises BadRow for a row that is no passage or has no id."""
    passage = passage_of(fields)
    if passage.id is None:
        raise BadRow("no id", f"its fields are {named(fields)}")
    return passage


def _table(rows: Rows) -> Int64s:
    """(5, n): the rows HASH, CHECK, ORDER, KEY and LENGTH of a corpus. Reads every passage once, in order."""
    table = np.empty((5, len(rows)), np.int64)

    def read_id(i: int) -> str:
        passage = rows.read(i, _passage_with_id)
        table[KEY, i], table[LENGTH, i] = passage.key, len(passage.title.encode()) + len(passage.text.encode())
        return str(passage.id)

    ids = table[: CHECK + 1]
    ids[:] = hash_ids(map(read_id, range(len(rows))))

    def repeated(i: int, j: int) -> str:
        return f"{rows.where(j)}: id '{passage_of(rows.fields(i)).id}' again, first at {rows.where(i)}"

    table[ORDER] = unique_order(ids, repeated)
    return table


# ---- columns of id hashes (2, n), as `hash_ids` makes them -----------------------------------------------------------


def unique_order(hashes: Int64s, repeated: Callable[[int, int], str]) -> Int64s:
    """(n,) positions that sort the ids by HASH, then CHECK.

    Raises DataError for an id that occurs twice. repeated(i, j): the message, for the positions i < j of that id.
    """
    order = np.lexsort((hashes[CHECK], hashes[HASH]))
    same = (hashes[:, order[1:]] == hashes[:, order[:-1]]).all(axis=0)
    if same.any():
        start = int(np.argmax(same))
        raise DataError(repeated(*sorted(order[start : start + 2].tolist())))
    return order


def find_hashes(hashes: Int64s, order: Int64s, wanted: Int64s) -> Int64s:
    """(k,) position in `hashes` (2, n) of each column of `wanted` (2, k), −1 where it is missing.

    order: the result of `unique_order` for `hashes`.
    """
    found = np.full(wanted.shape[1], -1, np.int64)
    rank = np.searchsorted(hashes[HASH], wanted[HASH], sorter=order)
    left = np.flatnonzero(rank < len(order))
    while len(left):
        here = order[rank[left]]
        same = hashes[HASH, here] == wanted[HASH, left]
        hit = same & (hashes[CHECK, here] == wanted[CHECK, left])
        found[left[hit]] = here[hit]
        rank[left] += 1
        left = left[same & ~hit & (rank[left] < len(order))]  # ids with equal HASH are neighbours in the order
    return found

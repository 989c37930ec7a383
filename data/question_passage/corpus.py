"""A corpus of passages, which are read from files by position or by id. Only hashes and lengths of the passages are
kept, in memory-mapped files.

Shape letters: n passages; k ids or positions to look up.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyad.data.base.errors import BadFormat, DataError
from dyad.data.question_passage.fields import named
from dyad.data.question_passage.formats import passage_of
from dyad.data.question_passage.passages import InlinePassages, Passage
from dyad.data.shards.content_keys import Int64s, hash_ids
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.rows import SUFFIXES, Rows, open_rows
from dyad.data.shards.sources import Tables, local_path, unweighted_files
from dyad.data.tables.image_table import TableOptions
from dyad.data.tables.prepare import prepared_tables

FORMAT = "1"
HASH, CHECK, ORDER, KEY, LENGTH = range(5)  # rows of the table of a corpus, which `_table` explains


def open_corpus(value: str | Sequence[str], key: str) -> "Corpus":
    """Open a corpus: the passages of .jsonl, .json or .tsv files, of tables such as CSV or Parquet, of shards, or of a
    BEIR or MS MARCO folder. value: their paths or URLs, in the syntax of the setting data.train.

    Each row must have an id (in the field _id, docid, id, psg_id, passage_id or pid) and a text (in the field text or
    contents), and may have a title. The first call for a file reads all of it and stores an index.

    Raises ConfigError, naming the configuration key `key`, when `value` matches no file or has a sampling weight
    (path@2), which a corpus must not have. Raises DataError, naming the line, for a row that is no such passage and for
    a repeated id.
    """
    return Corpus(open_rows(corpus_files(value, key, prepared_tables(TableOptions(), _passage_with_id))))


def corpus_files(value: str | Sequence[str], key: str, tables: Tables) -> list[str]:
    """Return the paths of the corpus files that `value` names: paths or URLs, or a BEIR or MS MARCO folder.

    tables: a function that returns the paths of the files to read for the path of a table, such as shards to which it
    converts the table. Files that are no tables are not opened. Raises ConfigError, naming the configuration key `key`,
    when `value` matches no file or has a sampling weight (path@2), which a corpus must not have.
    """
    if isinstance(value, str) and (file := corpus_of(local_path(value))):
        return [file]
    return unweighted_files(value, key, SUFFIXES, "a corpus has no weights.", tables)


def corpus_of(folder: str) -> str | None:
    """Return the path of the file of passages in a BEIR or MS MARCO folder; None for any other folder."""
    files = (os.path.join(folder, name) for name in ("corpus.jsonl", "collection.tsv"))
    return next(filter(os.path.isfile, files), None)


class Corpus:
    """The n passages of a corpus, numbered from 0; corpus[i] reads a Passage. Can be pickled: each process opens the
    files and memory maps itself.

    rows: the rows of its files. fingerprint: a hash of their names and contents. The first Corpus of given files reads
    all of them and stores an index; this raises DataError for a row that is no passage with an id, and for a repeated
    id.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, self.fingerprint = rows, rows.fingerprint
        self._mapped = cached_array(rows.files, "passages", [], [FORMAT, rows.fingerprint], lambda: _table(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Passage:
        return self.rows.read(i, _passage_with_id)

    @property
    def keys(self) -> Int64s:
        """The content keys (64-bit hashes of title and text) of all n passages, int64 (n,), memory-mapped."""
        return self._mapped.array[KEY]

    @property
    def lengths(self) -> Int64s:
        """The number of bytes of title and text of each of the n passages, int64 (n,), memory-mapped. By it passages
        can be sorted by length without being read."""
        return self._mapped.array[LENGTH]

    def ids(self, start: int, stop: int) -> list[str]:
        """Return the ids of the passages at positions start … stop - 1 of a corpus. If `stop` is more than the number
        of passages, the list ends with the last passage."""
        return [str(self[i].id) for i in range(start, min(stop, len(self)))]

    @property
    def id_hashes(self) -> Int64s:
        """The 128-bit hashes of the ids of all n passages of a corpus, each in two integers, as `hash_ids` makes them:
        int64 (2, n), memory-mapped."""
        return self._mapped.array[: CHECK + 1]

    def positions(self, ids: Sequence[str]) -> Int64s:
        """Return the positions in the corpus of the passages with the k given ids, int64 (k,); −1 for an unknown id.

        Reads no passage: ids are compared by their 128-bit hashes.
        """
        return find_hashes(self.id_hashes, self._mapped.array[ORDER], hash_ids(ids))


@dataclass(frozen=True)
class CorpusPassages(Sequence[Passage]):
    """The passages at k positions of a corpus, read on access."""

    corpus: Corpus
    positions: Int64s

    @property
    def keys(self) -> list[int]:
        """The content keys (64-bit hashes of title and text) of the passages in this sequence, in order. Reads no
        passage, because the corpus stores these hashes."""
        return self.corpus.keys[self.positions].tolist()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: Any, /) -> Any:
        return self.corpus[int(self.positions[i])]


PassageList = InlinePassages | CorpusPassages


def _passage_with_id(fields: dict[str, Any]) -> Passage:
    """Convert the fields of a row to a passage. Raises BadRow for a row that is no passage or has no id."""
    passage = passage_of(fields)
    if passage.id is None:
        raise BadFormat("no id", f"its fields are {named(fields)}")
    return passage


def _table(rows: Rows) -> Int64s:
    """Compute the table of a corpus of n passages, int64 (5, n). Reads every passage once, in order. Raises DataError
    for a row that is no passage with an id, and for a repeated id.

    The rows of the table: HASH and CHECK, the two halves of the 128-bit hash of each id; ORDER, the positions sorted by
    HASH, then CHECK; KEY, the content keys (64-bit hashes of title and text); LENGTH, the bytes of title and text.
    """
    table = np.empty((5, len(rows)), np.int64)

    def read_id(i: int) -> str:
        passage = rows.read(i, _passage_with_id)
        table[KEY, i], table[LENGTH, i] = passage.key, len(passage.title.encode()) + len(passage.text.encode())
        return str(passage.id)

    table[: CHECK + 1] = hash_ids(map(read_id, range(len(rows))))

    def repeated(i: int, j: int) -> str:
        return f"{rows.where(j)}: id '{passage_of(rows.fields(i)).id}' again, first at {rows.where(i)}"

    table[ORDER] = unique_order(table[: CHECK + 1], repeated)
    return table


# ---- columns of id hashes (2, n), as `hash_ids` makes them -----------------------------------------------------------


def unique_order(hashes: Int64s, repeated: Callable[[int, int], str]) -> Int64s:
    """Return the positions that sort n ids by their hashes, int64 (n,). hashes, int64 (2, n): the two halves of each
    hash; the first row is compared first.

    Raises DataError when an id occurs twice. repeated(i, j): returns the error message for an id at positions i < j.
    """
    order = np.lexsort((hashes[CHECK], hashes[HASH]))
    same = (hashes[:, order[1:]] == hashes[:, order[:-1]]).all(axis=0)
    if same.any():
        start = int(np.argmax(same))
        raise DataError(repeated(*sorted(order[start : start + 2].tolist())))
    return order


def find_hashes(hashes: Int64s, order: Int64s, wanted: Int64s) -> Int64s:
    """Find k ids among n ids by their hashes: return the position of each, int64 (k,); −1 for an id that is missing.

    hashes, int64 (2, n), and wanted, int64 (2, k): the hashes of the ids, made by `hash_ids`. order: the result of
    `unique_order` for `hashes`.
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

"""Mined hard negatives: what `python -m eval.mine` wrote, as passages of a corpus for each training row.

mined.jsonl has one line per question: {"query_id": id, "negatives": [passage ids, best ranked first], "scores": [...]}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from data.corpus import Corpus
from data.errors import ConfigError, DataError
from data.kept import MemmapArray, cached_array
from data.keys import Int64s, hash_ids
from data.manifest import file_entries
from data.questions import Questions
from data.records import named
from data.rows import Rows, open_rows
from data.sources import parse_sources

FORMAT = "1"


class Mined:
    """Positions in `corpus` for every row of some questions, as two mapped columns. Can be pickled.

    files: the file's name and content.
    """

    def __init__(self, corpus: Corpus, mapped: MemmapArray, count: int, rows: Rows) -> None:
        self.corpus, self._mapped, self._count = corpus, mapped, count
        self.fingerprint, self.files = rows.fingerprint, file_entries(rows.shards.indexes)

    @staticmethod
    def open(path: str, questions: Questions, corpus: Corpus | None = None) -> Mined:
        """The file `path`, for the rows of `questions`, whose own corpus is meant when none is given.

        Raises ConfigError when there is no such file or corpus, or none of its questions is among the rows; DataError,
        naming the line, for a row of another form, a question that comes twice, and an id that is not in the corpus.
        """
        corpus = corpus or questions.corpus
        if corpus is None:
            raise ConfigError("data.negatives.file names passages by id: set data.passage.corpus to their file.")
        source, *others = parse_sources([path], "data.negatives.file")
        if others or source.weight != 1:
            raise ConfigError(f"data.negatives.file={path}: write one file, without a weight.")
        rows = open_rows(source.shards)
        state = [FORMAT, rows.fingerprint, questions.fingerprint, corpus.fingerprint]
        mapped = cached_array(rows.files, "mined", corpus.rows.files, state, lambda: _by_row(rows, questions, corpus))
        return Mined(corpus, mapped, len(questions), rows)

    def positions(self, i: int) -> Int64s:
        """(k,) corpus positions of row i, best ranked first; none when the file has no line for its question."""
        starts = self._mapped.array[: self._count + 1]
        return self._mapped.array[self._count + 1 :][starts[i] : starts[i + 1]]

    def row(self, i: int) -> list[int]:
        return self.positions(i).tolist()


def _by_row(rows: Rows, questions: Questions, corpus: Corpus) -> Int64s:
    """One array: where each row's positions begin (n + 1), then the positions."""
    ids, lists = [], []
    for i, (name, negatives) in enumerate(_lines(rows)):
        positions = corpus.positions(negatives)
        if (positions < 0).any():
            missing = negatives[int(np.argmin(positions))]
            raise DataError(f"{rows.where(i)}: id '{missing}' is not in the corpus {corpus.rows.files[0]}")
        ids.append(name)
        lists.append(positions)
    line = _line_of_each(rows, hash_ids(ids), questions.id_hashes)
    if len(rows) and (line < 0).all():
        raise ConfigError(f"{rows.files[0]}: none of its questions is among the training rows: it was mined of others.")
    chosen = [lists[j] if j >= 0 else np.empty(0, np.int64) for j in line.tolist()]
    starts = np.cumsum([0, *map(len, chosen)])
    return np.concatenate([starts, *chosen]).astype(np.int64)


def _lines(rows: Rows) -> Iterator[tuple[str, list[str]]]:
    for i in range(len(rows)):
        fields = rows.fields(i)
        name, negatives = fields.get("query_id"), fields.get("negatives")
        if not _is_text(name) or not isinstance(negatives, list) or not all(map(_is_text, negatives)):
            raise DataError(
                f'{rows.where(i)} is not {{"query_id": text, "negatives": [passage ids]}}: its fields are '
                f"{named(fields)}"
            )
        yield name, negatives  # type: ignore[misc]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)  # which UTF-8 cannot hold


def _line_of_each(rows: Rows, given: Int64s, wanted: Int64s) -> Int64s:
    """(n,) the line whose id hash (2, l) is that of each row (2, n), −1 where there is none."""
    pair = np.dtype([("hash", "<i8"), ("check", "<i8")])
    have = np.ascontiguousarray(given.T).view(pair).ravel()
    want = np.ascontiguousarray(wanted.T).view(pair).ravel()
    order = np.argsort(have, kind="stable")
    ordered = have[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise DataError(f"{rows.where(second)}: its question is there already, {rows.where(first)}")
    found = np.full(len(want), -1, np.int64)
    if len(ordered):
        place = np.minimum(np.searchsorted(ordered, want), len(ordered) - 1)
        hit = ordered[place] == want
        found[hit] = order[place[hit]]
    return found

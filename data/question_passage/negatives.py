"""Draw hard negatives for a training row, and read the file of mined negatives that `python -m eval.mine` writes.

The file mined.jsonl has one line per question: {"query_id": id, "negatives": [passage ids, best ranked first],
"scores": [...]}.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import NegativeList, NegativesConfig
from dyad.data.loading.negatives import draw_entries, first_indices, is_text, open_mined
from dyad.data.question_passage.corpus import Corpus, CorpusPassages, find_hashes, unique_order
from dyad.data.question_passage.fields import named
from dyad.data.question_passage.passages import InlinePassages, Passage
from dyad.data.question_passage.questions import QuestionRow, QuestionRows
from dyad.data.shards.content_keys import Int64s, hash_ids
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.manifest import file_entries
from dyad.data.shards.rows import Rows

FORMAT = "1"
LINE = '{"query_id": text, "negatives": [passage ids]}'


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw_negatives(
    row: QuestionRow, i: int, mined: MinedNegatives | None, config: NegativesConfig, draws: Sequence[float] | np.ndarray
) -> list[Passage]:
    """Draw hard negatives for a training row, at most one for each random number in `draws`, all in [0, 1).

    All are from the first list in data.negatives.lists that has a candidate for the row; the result is empty if none
    has. Positive passages of the row are never drawn, and no passage is drawn twice. i: index of the row in the data
    set. mined: the mined negatives; None: there are none.
    """
    lists = {
        NegativeList.hard_negatives: row.hard_negatives,
        NegativeList.negatives: row.negatives,
        NegativeList.mined: mined.passages(i) if mined else InlinePassages(()),
    }
    positives = set(row.positives.keys)
    for passages in (lists[name] for name in config.lists):
        if pool := first_indices(passages.keys, positives):
            return [passages[j] for j in draw_entries(pool, draws)]
    return []


def no_negatives_message(rows: int) -> str:
    """Return the end of a warning: none of `rows` inspected rows has hard negatives, what follows, and how to get some.
    The rows must be spaced evenly in the data."""
    count = f"none of {rows:,} rows, evenly spaced," if rows > 1 else "its row"
    others = "the negatives of a question are the passages of the other rows, with objective.candidates=list none"
    found = "python -m eval.mine finds some; of judgements, data.negatives.lists=[negatives] takes those of 0"
    return f"{count} has hard negatives: {others}. {found}"


# ---- mined negatives -----------------------------------------------------------------------------------------------


class MinedNegatives:
    """The mined hard negatives of each question row, stored as positions in the corpus in a memory-mapped file. Can be
    pickled. files: entries that describe the file of mined negatives in the manifest of a run."""

    def __init__(self, path: str, questions: QuestionRows) -> None:
        """Open the file `path` of mined negatives for the rows of `questions`. The negatives are passages of the corpus
        questions.corpus.

        The first call for given data reads the whole file and stores the negatives in a cache file. Raises ConfigError
        when the file or the corpus is missing, or when no question of the file is among the rows. Raises DataError,
        naming the line, when a line is not of the form {"query_id": id, "negatives": [passage ids]}, repeats a
        question, or has an id that the corpus lacks.
        """
        if (corpus := questions.corpus) is None:
            raise ConfigError(f"data.negatives.file={path} names passages by id. {_corpus_to_set(path)}")
        rows = open_mined(path)
        self.corpus, self.fingerprint, self.files = corpus, rows.fingerprint, file_entries(rows.shards.indexes)
        others, state = corpus.rows.files, [FORMAT, rows.fingerprint, questions.fingerprint, corpus.fingerprint]
        self._count = len(questions)
        self._mapped = cached_array(rows.files, "mined", others, state, lambda: _by_row(rows, questions, corpus))

    def passages(self, i: int) -> CorpusPassages:
        """Return the mined hard negatives of question row i, best ranked first. The result is empty when the file of
        mined negatives has no line for the question."""
        starts, positions = np.split(self._mapped.array, [self._count + 1])
        return CorpusPassages(self.corpus, positions[starts[i] : starts[i + 1]])


def _by_row(rows: Rows, questions: QuestionRows, corpus: Corpus) -> Int64s:
    """Build one int64 array with the mined hard negatives of all n question rows. rows: the lines of the file of mined
    negatives.

    The array has two parts: n + 1 offsets into the second part, and the positions in the corpus of all negatives. The
    negatives of question row i are the entries offsets[i] … offsets[i + 1] − 1 of the second part. Raises DataError for
    a bad line, and ConfigError when no question of the file is among the rows.
    """
    ids, lists = [], []
    for i in range(len(rows)):
        fields = rows.fields(i)
        name, negatives = fields.get("query_id"), fields.get("negatives")
        if not is_text(name) or not isinstance(negatives, list) or not all(map(is_text, negatives)):
            raise DataError(f"{rows.where(i)} is not {LINE}: its fields are {named(fields)}")
        positions = corpus.positions(negatives)
        if (positions < 0).any():
            missing = negatives[int(np.argmin(positions))]
            where = f"id '{missing}' is not in the corpus {corpus.rows.files[0]}"
            raise DataError(f"{rows.where(i)}: {where}. {_corpus_to_set(rows.files[0])}")
        ids.append(name)
        lists.append(positions)
    hashes = hash_ids(ids)
    order = unique_order(hashes, lambda i, j: f"{rows.where(j)}: its question is there already, {rows.where(i)}")
    line = find_hashes(hashes, order, questions.id_hashes)
    if len(rows) and (line < 0).all():
        raise ConfigError(f"{rows.files[0]}: none of its questions is among the training rows: it was mined of others.")
    chosen = [lists[j] if j >= 0 else np.empty(0, np.int64) for j in line.tolist()]
    return np.concatenate([np.cumsum([0, *map(len, chosen)]), *chosen]).astype(np.int64)


def _corpus_to_set(mined: str) -> str:
    """Return the end of an error message: which file of passages to set for the file of mined negatives `mined`."""
    beside = os.path.join(os.path.dirname(mined), "corpus.jsonl")
    return (
        "Set data.passage.corpus to the passages that python -m eval.mine searched; those in the rows of questions it "
        f"wrote to {beside}"
    )

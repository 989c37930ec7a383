"""Read a file of question–passage scores, for example of a cross-encoder, in JSONL or TSV.

A line is one of

    {"query_id": "q1", "docid": "p7", "score": 3.2}
    q1 <tab> p7 <tab> 3.2            a first line that ends in "score" is a header
A pair takes twelve bytes of memory, however long its ids are.
"""

import json
from array import array
from collections.abc import Sequence

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.sources import local_path
from dyad.data.shards.text_files import open_text

MAX_FLOAT32 = float(np.finfo(np.float32).max)
LONGEST_LINE = 1 << 16  # bytes: two ids and a number


class PairScores:
    """Scores of question–passage pairs, looked up by question id and passage id.

    If a pair occurs several times, its last score counts.
    """

    def __init__(self, keys: np.ndarray, scores: np.ndarray) -> None:
        """Sort the scores of n question–passage pairs for look-up.

        keys (n,): the hash of the two ids of each pair; scores (n,): its score; both in the order of the file.
        """
        order = np.argsort(keys, kind="stable")
        self._keys, self._scores = keys[order], scores[order]

    def of(self, question: str, passages: Sequence[str]) -> np.ndarray:
        """Return the scores of k passages for one question, float32 (k,); NaN for a pair that has no score.

        The question and the passages are given by their ids.
        """
        wanted = np.array([_key(question, passage) for passage in passages], dtype=np.int64)
        if not len(self._keys):
            return np.full(len(wanted), np.nan, dtype=np.float32)
        slot = np.maximum(np.searchsorted(self._keys, wanted, side="right") - 1, 0)
        return np.where(self._keys[slot] == wanted, self._scores[slot], np.float32(np.nan))


def read_pair_scores(path: str) -> PairScores:
    """Read a file of question–passage scores, in one of the formats in the module docstring.

    Blank lines are skipped. Raises ConfigError if there is no such file, DataError if it cannot be read, with the
    number of the first line that has another format.
    """
    keys, scores = array("q"), array("f")
    with open_text(local_path(path)) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise DataError(f"{where}: longer than {LONGEST_LINE:,} bytes, which no pair of ids and a score is")
            if line.strip() and not (number == 1 and line.rstrip(b"\r\n").endswith(b"\tscore")):
                key, score = _pair(line, where)
                keys.append(key)
                scores.append(score)
    return PairScores(np.frombuffer(keys, dtype=np.int64), np.frombuffer(scores, dtype=np.float32))


def _pair(line: bytes, where: str) -> tuple[int, float]:
    """Parse one line of a score file (JSON, or three fields with tabs between) into (hash of the two ids, score).

    Raises DataError for another format, and for a score that is no finite float32. where: path and line number, with
    which the message begins.
    """
    try:
        if line.startswith(b"{"):
            row = json.loads(line)
            question, passage, score = row["query_id"], row["docid"], float(row["score"])
        else:
            question, passage, text = line.decode().strip("\r\n").split("\t")
            score = float(text)
        key = _key(question, passage)  # JSON may hold half a surrogate pair
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DataError(
            f'{where}: must be {{"query_id": …, "docid": …, "score": number}} or three fields with tabs between: '
            f"question id, passage id, score, in UTF-8; it is {line[:60].rstrip().decode(errors='replace')!r}"
        ) from None
    if not (isinstance(question, str) and isinstance(passage, str)):
        raise DataError(f"{where}: query_id and docid must be strings")
    if not abs(score) <= MAX_FLOAT32:
        raise DataError(f"{where}: the score is {score}: must be a finite float32")
    return key, score


def _key(question: str, passage: str) -> int:
    """Return the hash of a pair of ids, by which its score is found."""
    return content_key(f"{question}\n{passage}".encode())

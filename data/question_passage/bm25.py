"""BM25 search, a baseline without a model: Lucene's formula on words stemmed by Snowball English (bm25s, PyStemmer).

The score of a query q and a passage d is the sum over the words t of q, repeated words counted each time, of ln(1 + (N
− df + ½) / (df + ½)) · (tf / (tf + k1 (1 − b + b |d| / average length))). N: number of passages; df: number of passages
with t; tf: count of t in d; |d|: number of words of d. This is "accurate" Lucene of Kamphuis et al. 2020: true lengths,
without the constant factor k1 + 1, which does not change the order. A word is two or more letters, digits or
underscores, in lower case; in scripts without spaces between words, and in Korean, each pair of neighbouring characters
is one, as in Lucene's CJKBigramFilter. Lucene's 33 English stop words are left out: on the development questions of
data/samples/topics nDCG@10 is .306 without them and .298 with them.
"""

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import regex
import Stemmer
from bm25s.stopwords import STOPWORDS_EN

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.base.files import checked_path, remove_dead, whole_folder, write_errors
from dyad.data.shards.content_keys import json_digest

K1, B = 0.9, 0.4  # Anserini's defaults
FORMAT = 2
_WORD = regex.compile(r"\w{2,}")  # in regex, unlike in re, \w has the vowel signs of Indic scripts
_WITHOUT_SPACES = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]+")
_STOP = frozenset(STOPWORDS_EN)


@dataclass(frozen=True)
class BM25:
    """A BM25 index of n passages, which have the indices 0 … n − 1. index: the index of the library bm25s."""

    index: Any  # bm25s.BM25

    def search(self, queries: Sequence[str], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Find the k passages with the highest BM25 scores for each query. Return (scores, passage indices) for each
        query.

        Both are arrays of at most k entries, float32 and int64, scores descending. Only passages that share a stemmed
        word with the query are found, so both may be empty. If scores are equal, the lower index is first.
        """
        stems = _stemmer()
        return [self._best(stems(query), k) for query in queries]

    def _best(self, words: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        score_n = self.index.get_scores_from_ids(self.index.get_tokens_ids(words))
        matched = np.flatnonzero(score_n > 0)
        if len(matched) > k:  # all ties with the k-th stay until they are sorted
            worst = np.partition(score_n[matched], len(matched) - k)[len(matched) - k]
            matched = matched[score_n[matched] >= worst]
        best = matched[np.argsort(-score_n[matched], kind="stable")[:k]]
        return score_n[best], best


def build_bm25(texts: Iterable[str], k1: float = K1, b: float = B) -> BM25:
    """Build the BM25 index of passage texts in memory. k1, b: the two constants of BM25's formula.

    Memory: about 30 bytes per word while the index is built, then 8 bytes per distinct word of each text. Raises
    ConfigError if no text has a word.
    """
    stems = _stemmer()
    vocabulary: dict[str, int] = {}
    rows = [array("i", [vocabulary.setdefault(w, len(vocabulary)) for w in stems(text)]) for text in texts]
    if not vocabulary:
        raise ConfigError(f"BM25: there is no word in the {len(rows)} passages of the corpus")
    index = bm25s.BM25(k1=k1, b=b, method="lucene")
    index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    return BM25(index)


def open_bm25(texts: Iterable[str], folder: Path, identity: str, k1: float = K1, b: float = B) -> BM25:
    """Open the BM25 index in `folder` memory-mapped; if it is missing, first build it from the texts and write it.

    identity: names the corpus and how its texts are made, for example a fingerprint; each identity has its own index.
    k1, b: the two constants of BM25's formula. `texts` is not read if the index exists. Several processes may open an
    index at the same time. The files are JSON and arrays without pickle. Raises DataError for a damaged index,
    ConfigError if no text has a word, and HardwareError if the index cannot be written.
    """
    name = json_digest([FORMAT, identity, k1, b, bm25s.__version__, Stemmer.version()])
    path = folder / f"bm25-{name[:16]}"
    if not path.exists():
        built = build_bm25(texts, k1, b)
        try:
            remove_dead(folder, ".bm25-*")
            with write_errors(folder), whole_folder(path, folder / f".bm25-{secrets.token_hex(4)}") as temporary:
                built.index.save(temporary, show_progress=False)
        except HardwareError:
            if not path.exists():  # else another process was first, with the same index
                raise
    try:
        for file in path.iterdir():  # the library bm25s opens these files by their paths
            checked_path(file, folder=path)
        return BM25(bm25s.BM25.load(path, mmap=True, show_progress=False))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the BM25 index is damaged ({error}); delete this folder") from error


def _stemmer() -> Callable[[str], list[str]]:
    """Return a function that converts a text to its stemmed words, without stop words.

    The returned function keeps the stem of every word that it has seen in memory, so that each is computed once.
    """
    stemmer = Stemmer.Stemmer("english")
    stemmer.maxCacheSize = 0  # the stemmer's own cache is slower than ours
    stem = cache(stemmer.stemWord)
    return lambda text: [stem(word) for word in _words(text.lower()) if word not in _STOP]


def _words(text: str) -> list[str]:
    """Return the words of a lower-case text, then the character pairs of Korean and of scripts without spaces.

    Each run of such characters, for example of Chinese ones, gives every pair of neighbours; a run of one character
    gives this character.
    """
    if text.isascii():
        return _WORD.findall(text)
    runs = _WITHOUT_SPACES.findall(text)
    pairs = [run[i : i + 2] for run in runs for i in range(max(len(run) - 1, 1))]
    return _WORD.findall(_WITHOUT_SPACES.sub(" ", text)) + pairs

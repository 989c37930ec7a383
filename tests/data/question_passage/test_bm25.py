"""BM25 against the formula written out, its order, and the index kept in a folder."""

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import Stemmer
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.question_passage.bm25 import BM25, build_bm25, open_bm25

TEXTS = [
    "The running dogs were running to the river.",
    "A dog ran; a river-dog, in fact. Dogs!",
    "Rivers are long and the Nile is longest",
    "",
    "to be or not to be",
    "Über die Flüsse: Nil, nil, NIL",
    "42 rivers, 1 dog and x",
]
QUERIES = ["running dog", "the longest rivers", "nil nil", "to be", "unknown", "", "Flüsse 42 x", "dog river " * 20]


def words(text: str) -> list[str]:
    """Two or more word characters, cut by hand, no Lucene stop word, stemmed."""
    stop = set("a an and are as at be but by for if in into is it no not of on or such that the their then".split())
    stop |= set("there these they this to was will with".split())
    cut = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split()
    return [Stemmer.Stemmer("english").stemWord(w) for w in cut if len(w) > 1 and w not in stop]


def plain(texts: list[str], query: str, k1: float = 0.9, b: float = 0.4) -> list[float]:
    """One score after the other, by the formula, in float64."""
    counts = [Counter(words(text)) for text in texts]
    average = sum(c.total() for c in counts) / len(counts)
    scores = [0.0] * len(texts)
    for word in words(query):
        df = sum(word in c for c in counts)
        for i, c in enumerate(counts):
            norm = k1 * (1 - b + b * c.total() / average)
            scores[i] += math.log(1 + (len(texts) - df + 0.5) / (df + 0.5)) * c[word] / (c[word] + norm)
    return scores


LANGUAGES = {  # a question, its passage, and another passage
    "Chinese": ("北京有多少人口", "北京市的人口超过两千万", "上海的港口很大"),
    "Japanese": ("東京タワーの高さ", "東京タワーは高さ333メートルです", "京都のお寺は古い"),
    "Korean": ("한국의 수도", "서울은 한국에서 가장 큰 도시이다", "고양이는 잠을 잔다"),
    "Thai": ("เมืองหลวงของไทย", "กรุงเทพเป็นเมืองหลวง", "แมวนอน"),
    "Hindi": ("भारत की राजधानी", "नई दिल्ली भारत में है", "बिल्ली सोती है"),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_are_found_in_languages_without_spaces_and_with_vowel_signs(language: str) -> None:
    query, right, wrong = LANGUAGES[language]
    ((scores, positions),) = build_bm25([wrong, right]).search([query], 2)
    assert positions.tolist()[:1] == [1] and scores[0] > 0


def test_a_text_of_two_scripts_has_the_words_of_both() -> None:
    ((_, positions),) = build_bm25(["AI模型 2024", "nothing"]).search(["the AI"], 2)
    assert positions.tolist() == [0]


def assert_equals_formula(bm25: BM25, texts: list[str], queries: list[str], k: int, **parameters: float) -> None:
    for query, (scores, positions) in zip(queries, bm25.search(queries, k), strict=True):
        expected = np.array(plain(texts, query, **parameters), np.float32)
        best = [i for i in np.argsort(-expected, kind="stable") if expected[i] > 0][:k]
        np.testing.assert_allclose(scores, expected[best], rtol=1e-5)
        np.testing.assert_allclose(scores, expected[positions], rtol=1e-5)
        assert scores.dtype == np.float32 and positions.dtype == np.int64
        assert len(set(positions.tolist())) == len(best)


@pytest.mark.parametrize("k", [1, 2, 100])
@pytest.mark.parametrize("parameters", [{}, {"k1": 1.5, "b": 0.75}])
def test_scores_are_the_formula(k: int, parameters: dict[str, float]) -> None:
    assert_equals_formula(build_bm25(TEXTS, **parameters), TEXTS, QUERIES, k, **parameters)


def test_a_larger_corpus() -> None:
    draw = random.Random(0)
    known = [f"word{i}" for i in range(60)]
    weights = [1 / (i + 1) for i in range(60)]
    texts = [" ".join(draw.choices(known, weights, k=draw.randrange(30))) for _ in range(300)]
    queries = [" ".join(draw.choices(known, weights, k=5)) for _ in range(30)]
    assert_equals_formula(build_bm25(texts), texts, queries, 20)


def test_only_passages_that_share_a_word_are_found() -> None:
    found = build_bm25(TEXTS).search(QUERIES, 100)
    assert [sorted(positions.tolist()) for _, positions in found] == [
        [0, 1, 6],
        [0, 1, 2, 6],
        [5],
        [],
        [],
        [],
        [5, 6],
        [0, 1, 2, 6],
    ]


def test_equal_scores_go_by_position_also_at_the_cut() -> None:
    texts = ["red fish", "blue fish", "one two", *["red bird"] * 50, "red red"]
    for k in (1, 7, 53, 60):
        ((scores, positions),) = build_bm25(texts).search(["red"], k)
        assert positions.tolist() == [53, 0, *range(3, 53)][:k]
        assert (np.diff(scores) <= 0).all()


def test_the_kept_index_is_mapped_and_finds_the_same(tmp_path: Path) -> None:
    def refuse() -> Iterator[str]:
        raise AssertionError("read although the index is there")
        yield ""

    built = open_bm25(iter(TEXTS), tmp_path / "cache", "topics")
    again = open_bm25(refuse(), tmp_path / "cache", "topics")
    assert isinstance(again.index.scores["data"], np.memmap)
    memory = build_bm25(TEXTS).search(QUERIES, 3)
    for bm25 in (built, again):
        for (scores, positions), (expected, order) in zip(bm25.search(QUERIES, 3), memory, strict=True):
            np.testing.assert_array_equal(scores, expected)
            np.testing.assert_array_equal(positions, order)
    for identity, k1, b in (("others", 0.9, 0.4), ("topics", 1.2, 0.4), ("topics", 0.9, 0.75)):
        with raises(AssertionError):
            open_bm25(refuse(), tmp_path / "cache", identity, k1, b)
    (folder,) = (tmp_path / "cache").iterdir()
    assert {p.suffix for p in folder.iterdir()} == {".npy", ".json"}
    for array in folder.glob("*.npy"):
        assert np.load(array, allow_pickle=False).dtype.kind in "fi"


def test_a_damaged_index_is_told(tmp_path: Path) -> None:
    open_bm25(TEXTS, tmp_path, "x")
    (folder,) = tmp_path.iterdir()
    array = folder / "data.csc.index.npy"
    array.write_bytes(array.read_bytes()[:60])
    with raises(DataError, tmp_path):
        open_bm25(TEXTS, tmp_path, "x")


def test_the_second_of_two_builders_takes_the_index_of_the_first(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        open_bm25(TEXTS, tmp_path, "x")
        yield from TEXTS

    assert open_bm25(texts(), tmp_path, "x").search(["nile"], 1)[0][1].tolist() == [2]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_builder_left_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".bm25-0badcafe").mkdir()
    os.utime(tmp_path / ".bm25-0badcafe", (0, 0))
    open_bm25(TEXTS, tmp_path, "x")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("texts", [[], ["", "a ?", "the"]])
def test_a_corpus_without_words_is_refused(texts: list[str]) -> None:
    with raises(ConfigError, f"{len(texts)} passages"):
        build_bm25(texts)

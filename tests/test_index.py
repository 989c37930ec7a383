"""FAISS search: the k best of a brute-force sort, and clear words for wrong input or a missing package."""

import sys

import numpy as np
import pytest
from helpers_eval import unit_rows

from data.errors import ConfigError
from eval.index import search


def test_search_is_exact() -> None:
    queries, corpus = unit_rows(7, 16, 0), unit_rows(60, 16, 1)
    scores, ids = search(queries, corpus, 5)
    expected = np.argsort(-(queries @ corpus.T), axis=1)[:, :5]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ corpus.T, expected, axis=1), rtol=1e-5)
    assert scores.dtype == np.float32 and ids.dtype == np.int64


def test_k_is_cut_to_the_corpus() -> None:
    assert search(unit_rows(2, 4, 0), unit_rows(3, 4, 1), 10)[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("queries", "corpus", "k", "message"),
    [
        (unit_rows(2, 4, 0).astype(np.float64), unit_rows(3, 4, 1), 1, "queries: needs a non-empty float32"),
        (unit_rows(2, 4, 0), unit_rows(3, 4, 1)[0], 1, "corpus: needs a non-empty float32"),
        (unit_rows(2, 4, 0), unit_rows(3, 4, 1) * np.nan, 1, "corpus: holds values that are not finite"),
        (unit_rows(2, 4, 0), unit_rows(3, 5, 1), 1, "4 wide, the corpus is 5 wide"),
        (unit_rows(2, 4, 0), unit_rows(3, 4, 1), 0, "k=0"),
    ],
)
def test_wrong_input_is_refused(queries, corpus, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(queries, corpus, k)


def test_a_missing_faiss_names_the_extras(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"\[cpu\].*\[gpu\]"):
        search(unit_rows(2, 4, 0), unit_rows(3, 4, 1), 1)

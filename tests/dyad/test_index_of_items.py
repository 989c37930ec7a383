"""dyad.Index without a model: search by vectors, exact scores, recall, items that are added and removed."""

from typing import Any, cast

import numpy as np
import pytest
from helpers.eval import unit_rows
from helpers.messages import raises

import dyad

QUERIES, ROWS = unit_rows(20, 64, 0), unit_rows(3000, 64, 1)
NAMES = [f"{i}.jpg" for i in range(len(ROWS))]


def test_items_stay_with_their_embeddings() -> None:
    given = [*NAMES]
    index = dyad.Index(given, ROWS, "digest")
    given.insert(0, "new")
    assert not hasattr(index.items, "insert")
    assert index.search(ROWS[7], 1)[0][0].item == index.items[7] == "7.jpg"


@pytest.mark.parametrize("spec", ["Flat", "PCA32,Flat", "IVF16,PQ8;nprobe=16", "HNSW16_SQ8"])
def test_scores_are_inner_products_in_every_kind_of_index(spec: str) -> None:
    index = dyad.Index(range(len(ROWS)), ROWS, "digest", spec)
    for query, hits in zip(QUERIES, index.search(QUERIES, 10), strict=True):
        scores = [hit.score for hit in hits]
        assert np.allclose(scores, ROWS[[hit.item for hit in hits]] @ query, atol=1e-6)
        assert len(hits) == 10 and scores == sorted(scores, reverse=True)


def test_the_recall_of_an_index() -> None:
    def recall(spec: str, k: int) -> float:
        return dyad.Index(NAMES, ROWS, "digest", spec).recall(QUERIES, k)

    assert recall("Flat", 10) == 1 and recall("IVF32,Flat", 10) < 0.5 < recall("IVF32,Flat;nprobe=24", 10) < 1


def test_items_are_added_and_removed() -> None:
    first, second = dyad.Index(NAMES[:10], ROWS[:10], "digest", "IVF2,Flat"), dyad.Index(["b"], ROWS[10:11], "digest")
    both = first + second
    assert both.items == (*NAMES[:10], "b") and both.spec == "IVF2,Flat" and np.array_equal(both.embeddings, ROWS[:11])
    fewer = both.where(lambda name: name not in {"2.jpg", "3.jpg"})
    assert len(fewer) == 9 and fewer.search(ROWS[10], 1)[0][0].item == "b" and len(both) == 11
    for other in (dyad.Index(["b"], ROWS[:1], "another"), dyad.Index(["b"], ROWS[:1, :8], "digest")):
        with raises(dyad.ConfigError, "make one of them anew"):
            _ = first + other
    with raises(dyad.ConfigError, "where: keep is true for no item"):
        both.where(lambda name: False)
    with pytest.raises(TypeError):
        _ = first + cast(Any, NAMES)


def test_what_cannot_be_searched_for() -> None:
    index = dyad.Index(NAMES, ROWS, "digest")
    with raises(dyad.ConfigError, "width 64", "8"):
        index.search(QUERIES[:, :8])
    for bad in (np.full(64, np.nan), np.zeros((0, 64)), cast(Any, "a frog")):
        with raises(dyad.ConfigError, "queries"):
            index.search(bad)
    with raises(dyad.ConfigError, "'Foo'"):
        dyad.Index(NAMES, ROWS, "digest", "Foo")

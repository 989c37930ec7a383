"""Cases: which queries are shown, which part of a text, and what stands in the JSON."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dyad.eval.results.cases import LONGEST, answer, choose, excerpt, item
from dyad.eval.results.score_histogram import BINS, PER_QUERY, score_histogram


def kinds(chosen: list[tuple[str, int]]) -> dict[str, list[int]]:
    return {kind: [query for k, query in chosen if k == kind] for kind, _ in chosen}


def test_best_worst_and_random_queries_without_repetition() -> None:
    rng = np.random.default_rng(0)
    quality = rng.permutation(200).astype(float)
    found = kinds(choose(quality, np.zeros(200), range(200), 7))
    assert quality[found["best"]].tolist() == list(range(199, 192, -1))
    assert quality[found["worst"]].tolist() == list(range(7))
    assert len(found["random"]) == 7 and len({q for of in found.values() for q in of}) == 21
    assert choose(quality, np.zeros(200), range(200), 7) == choose(quality, np.zeros(200), range(200), 7)


def test_of_equal_queries_the_surer_comes_first_then_the_earlier() -> None:
    quality, sure = np.array([0, 1, 1, 0, 0, 1.0]), np.array([5, 2, 3, 7, 5, 2.0])
    found = kinds(choose(quality, sure, range(6), 2))
    assert (found["best"], found["worst"]) == ([2, 1], [3, 0])


def test_a_kind_has_one_of_a_group_while_there_are_others() -> None:
    groups = ["a", "a", "a", "b", "a", "c", "b", "a", "c", "a"]
    quality = np.arange(10.0)
    found = kinds(choose(quality, quality, groups, 3))
    assert found["best"] == [9, 8, 6] and found["worst"] == [0, 3, 5]
    assert kinds(choose(quality, quality, groups, 5))["best"] == [9, 8, 7, 6, 5]  # three groups: filled up in order


@pytest.mark.parametrize(("n", "sizes"), [(1, (1, 0, 0)), (5, (3, 2, 0)), (9, (4, 4, 1)), (0, (0, 0, 0))])
def test_of_few_queries_half_are_best_and_half_are_worst(n: int, sizes: tuple[int, ...]) -> None:
    chosen = choose(np.arange(n, dtype=float), np.zeros(n), range(n), 4)
    found = kinds(chosen)
    assert tuple(len(found.get(kind, [])) for kind in ("best", "worst", "random")) == sizes
    assert len({query for _, query in chosen}) == sum(sizes)
    assert choose(np.arange(n, dtype=float), np.zeros(n), range(n), 0) == []


@settings(max_examples=200, deadline=None)
@given(st.text(" ab", max_size=1500), st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 700)), max_size=4))
def test_spans_stay_on_what_they_mark(text: str, drawn: list[tuple[int, int]]) -> None:
    spans = sorted((start, min(start + size, len(text))) for start, size in drawn if start < len(text))
    shown, moved = excerpt(text, spans)
    core = shown.strip("…")
    assert len(core) <= LONGEST and core in text and (len(text) <= LONGEST) == (shown == text)
    assert all(0 <= start < end <= len(shown) and "…" not in shown[start:end] for start, end in moved)
    assert not spans or moved, "the first answer is shown"
    assert shown != text or moved == spans


def test_an_answer_far_down_a_text_is_shown() -> None:
    text = " ".join(f"word{i}" for i in range(400))
    start = text.index("word300")
    shown, (span, *_) = excerpt(text, [(start, start + 7)])
    assert shown[slice(*span)] == "word300" and shown.startswith("…word") and shown.endswith("…")
    assert excerpt("a" * 700, [(500, 650), (660, 670)]) == ("a" * LONGEST + "…", [(500, LONGEST)])


def test_what_is_not_known_is_left_out_of_the_json() -> None:
    found = answer(item("p1", "a text", title="", spans=[(2, 6)]), 0.123456, False)
    expected = {"id": "p1", "text": "a text", "spans": [[2, 6]], "score": 0.1235, "right": False}
    assert json.loads(json.dumps(found)) == expected
    assert item("p2", picture="7.webp") == {"id": "p2", "picture": "7.webp"} and item("") == {}


# How scores are spread ------------------------------------------------------------------------------------------------


def test_every_right_pair_and_best_wrong_score_is_counted() -> None:
    rng = np.random.default_rng(0)
    queries, items = rng.standard_normal((30, 6), dtype=np.float32), rng.standard_normal((50, 6), dtype=np.float32)
    right = [np.sort(rng.choice(50, size=rng.integers(0, PER_QUERY + 1), replace=False)) for _ in range(30)]
    best_wrong = np.where(rng.random(30) < 0.2, -np.inf, rng.standard_normal(30))
    found = score_histogram(queries, items, right, best_wrong)
    edges = np.array(found["edges"])
    assert len(edges) == BINS + 1 and (np.diff(edges) > 0).all()
    score = queries @ items.T
    of_right = np.concatenate([score[i, r] for i, r in enumerate(right)])
    np.testing.assert_array_equal(found["right"], np.histogram(of_right, edges)[0])
    assert sum(found["right"]) == len(of_right)
    assert sum(found["best_wrong"]) == np.isfinite(best_wrong).sum()
    assert 100 < sum(found["wrong"]) <= 30 * PER_QUERY
    assert found == score_histogram(queries, items.astype(np.float64), right, best_wrong)
    json.dumps(found, allow_nan=False)


def test_pairs_known_to_be_right_are_never_counted_as_wrong() -> None:
    queries, items = np.ones((20, 1), np.float32), np.arange(10, dtype=np.float16)[:, None]
    right = [np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])] * 20
    found = score_histogram(queries, items, right, np.full(20, 9.0))
    assert sum(found["wrong"]) == found["wrong"][-1] > 0 and sum(found["right"]) == 20 * PER_QUERY
    everything = score_histogram(queries, items, [np.arange(10)] * 20, np.full(20, -np.inf))
    assert sum(everything["wrong"]) == sum(everything["best_wrong"]) == 0
    assert len(score_histogram(queries, items, [np.empty(0, int)] * 20, np.full(20, -np.inf))["edges"]) == BINS + 1


@pytest.mark.parametrize("apart", [0, 1, 7, 50])
def test_a_collapsed_model_has_a_histogram(apart: int) -> None:
    """Scores between 0.7 and the float32 that is `apart` of the smallest steps above it."""
    step = np.spacing(np.float32(0.7))
    items = np.float32(0.7) + step * np.arange(apart + 1, dtype=np.float32)[:, None]
    found = score_histogram(np.ones((20, 1), np.float32), items, [np.array([0])] * 20, np.full(20, items.max()))
    assert (np.diff(found["edges"]) > 0).all() and len(found["edges"]) == BINS + 1
    assert sum(found["right"]) == sum(found["best_wrong"]) == 20
    assert not apart or (found["right"][0], found["best_wrong"][-1]) == (20, 20)

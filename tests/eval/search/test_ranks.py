"""Ranks: counted, against a full stable sort; found by FAISS, against counting."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL, Keys, clustered, right_matrix, search, some_captions, unit_rows

from dyad.eval.metrics.matches import MISSED, Labels, Matches, Ranking
from dyad.eval.search import ranks
from dyad.eval.search.ranks import count_ranks, found_ranks, ranked
from dyad.eval.tasks.image_text_retrieval import match_pairs
from dyad.train.eval_config import Truth

captions = pytest.fixture(some_captions)
SPECS = ("HNSW32", "IVF8,Flat;nprobe=2", "PQ4x4", "IVF8,PQ4x4;nprobe=2")


def sorted_ranks(score: np.ndarray, right: np.ndarray) -> np.ndarray:
    """1 + the wrong items before the first right one in a stable descending sort."""
    order = np.argsort(-score, axis=1, kind="stable")
    hits = np.take_along_axis(right, order, axis=1)
    return 1 + np.array([(~row[: row.argmax()]).sum() for row in hits])


@pytest.mark.parametrize("truth", Truth)
@pytest.mark.parametrize("strip", [1, 500, 2**22])
def test_counting_equals_a_full_stable_sort(captions: Keys, truth: Truth, strip: int, monkeypatch) -> None:
    """Small whole numbers: scores are exact and many are equal."""
    monkeypatch.setattr(ranks, "STRIP", strip)
    rng = np.random.default_rng(1)
    images = rng.integers(-1, 2, (40, 6)).astype(np.float32)
    texts = rng.integers(-1, 2, (90, 6)).astype(np.float32)
    right = right_matrix(*captions, truth)
    score = images @ texts.T
    assert len(np.unique(score)) < 15
    to_text, to_image = match_pairs(*captions, truth)
    _check(count_ranks(images, texts, to_text, LOCAL), score, right)
    _check(count_ranks(texts, images, to_image, LOCAL), score.T, right.T)


def _check(found: Ranking, score: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(found.rank, sorted_ranks(score, right))
    np.testing.assert_array_equal(found.right, right.sum(axis=1))
    np.testing.assert_array_equal(found.best, np.where(right, score, -np.inf).max(axis=1))
    np.testing.assert_array_equal(found.best_wrong, np.where(right, -np.inf, score).max(axis=1))


@pytest.mark.parametrize("strip", [1, 500, 2**22])
@pytest.mark.parametrize("truth", Truth)
def test_flat_faiss_gives_the_ranks_of_counting(captions: Keys, truth: Truth, strip: int, monkeypatch) -> None:
    """Whatever its depth, and also where most scores are equal: small whole numbers."""
    monkeypatch.setattr(ranks, "STRIP", strip)
    rng = np.random.default_rng(1)
    equal = [rng.integers(-1, 2, (n, 6)).astype(np.float32) for n in (40, 90)]
    for images, texts in (equal, [unit_rows(40, 8, 0), unit_rows(90, 8, 1)]):
        ways = zip(match_pairs(*captions, truth), (images, texts), (texts, images), strict=True)
        for matches, queries, items in ways:
            counted = count_ranks(queries, items, matches, LOCAL)
            for depth in (1, 7, len(items)):
                found = found_ranks(queries, items, matches, search(queries, items, depth))
                np.testing.assert_array_equal(found.rank, np.where(counted.rank > depth, MISSED, counted.rank))
                np.testing.assert_array_equal(found.right, counted.right)
                np.testing.assert_allclose(found.best, counted.best, atol=1e-6)
                ahead = (counted.rank > 1) | (depth == len(items))
                np.testing.assert_allclose(found.best_wrong[ahead], counted.best_wrong[ahead], atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_an_approximate_index_ranks_what_it_finds_and_says_how_much_that_is(spec: str) -> None:
    own = np.arange(400)
    items = clustered(400, 16, 1)
    queries = items + 0.3 * unit_rows(400, 16, 2)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    exact = ranked(queries, items, matches, "Flat", 10, LOCAL)
    found = ranked(queries, items, matches, spec, 10, LOCAL)
    assert exact.hits is None and exact.recall_metrics == {} and exact.how == {"index": "Flat"}
    assert found.hits is not None and found.how == {"index": spec}
    whole = search(queries, items, 10).positions
    share = np.mean([np.isin(e, f).mean() for e, f in zip(whole[::2], found.hits.positions[::2], strict=True)])
    assert found.recall_metrics.keys() == {"recall_against_exact@10"}
    assert found.recall_metrics["recall_against_exact@10"] == pytest.approx(share, abs=0.03)
    assert share < 1 or spec == "HNSW32"
    places = [row.tolist().index(i) + 1 if i in row else MISSED for i, row in enumerate(found.hits.positions)]
    assert found.ranking.rank.tolist() == places
    np.testing.assert_allclose(found.ranking.best, exact.ranking.best, atol=1e-6)


def test_items_too_few_for_an_index_are_ranked_by_counting(captions: Keys) -> None:
    images, texts = unit_rows(40, 8, 0), unit_rows(90, 8, 1)
    matches, _ = match_pairs(*captions, Truth.keys)
    found = ranked(images, texts, matches, "IVF100,Flat", 10, LOCAL)
    np.testing.assert_array_equal(found.ranking, count_ranks(images, texts, matches, LOCAL))
    assert found.how["index"] == "Flat" and found.how["instead_of"] == "IVF100,Flat" and found.recall_metrics == {}


def test_a_query_whose_lists_are_empty_finds_nothing() -> None:
    """As with an index of lists that searches only empty ones."""
    items = np.repeat(np.eye(4, dtype=np.float32)[:2], 50, axis=0)
    own = np.arange(2)
    matches = Matches(Labels.of((own, own), size=2), Labels.of((np.arange(100), np.repeat(own, 50)), size=100))
    missed = search(items[::50], items, 3)
    missed.positions[1], missed.scores[1] = 100, -np.inf
    found = found_ranks(items[::50], items, matches, missed)
    assert found.rank.tolist() == [1, MISSED] and found.best.tolist() == [1, 1] and found.right.tolist() == [50, 50]
    assert found.best_wrong.tolist() == [-np.inf, -np.inf]


def test_many_right_items_of_each_query_need_little_memory() -> None:
    """Of 1,000 images with one caption every caption is right: a million pairs, 1 GB of their vectors."""
    rows, same = unit_rows(1000, 128, 1), np.zeros(1000, np.int64)
    matches, _ = match_pairs(np.arange(1000), same, same, Truth.keys)
    hits = search(rows, rows, 5)
    tracemalloc.start()
    found = found_ranks(rows, rows, matches, hits)
    assert tracemalloc.get_traced_memory()[1] < 250e6 and (found.rank == 1).all() and (found.right == 1000).all()
    tracemalloc.stop()


def test_a_query_without_a_right_item_is_missed() -> None:
    nothing = Matches(
        Labels.of((np.array([0]), np.array([0])), size=2), Labels.of((np.array([0]), np.array([0])), size=1)
    )
    found = count_ranks(unit_rows(2, 4, 0), unit_rows(1, 4, 1), nothing, LOCAL)
    assert found.rank.tolist() == [1, MISSED] and found.right.tolist() == [1, 0]


@pytest.mark.parametrize("spec", ["Flat", "IVF4,Flat;nprobe=4"])
def test_hidden_items_are_no_answers(spec: str) -> None:
    """The ranks are those among the other items, also by an index that finds all."""
    queries, items, generator = unit_rows(30, 6, 0), unit_rows(200, 6, 1), np.random.default_rng(2)
    target = generator.integers(200, size=30)
    hide = generator.random((30, 200)) < 0.2
    hide[np.arange(30), target] = False
    every = Labels(np.arange(200), np.arange(200), 200)
    row, item = np.nonzero(hide)
    right, hidden = Matches(Labels(np.arange(30), target, 30), every), Matches(Labels(row, item, 30), every)
    found = ranked(queries, items, right, spec, 200, LOCAL, hidden)
    scores = queries @ items.T
    want = [1 + sum(scores[i, j] > scores[i, target[i]] for j in range(200) if not hide[i, j]) for i in range(30)]
    assert found.ranking.rank.tolist() == want
    few = ranked(queries, items, right, spec, 20, LOCAL, hidden)  # an exact search has the hidden items too
    assert few.recall_metrics == ({} if spec == "Flat" else {"recall_against_exact@20": 1.0})


def test_memory_does_not_grow_with_the_number_of_pairs() -> None:
    """10,000 × 10,000 scores would be 400 MB; counting holds a few strips of 16 MiB."""
    own, rows = np.arange(10_000), unit_rows(10_000, 4, 0)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests
    before = _resident("VmRSS")
    rank = count_ranks(rows, rows, matches, LOCAL).rank
    assert (rank == 1).all()
    assert _resident("VmHWM") - before < 150


def _resident(field: str) -> int:
    """MiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


def test_strips_of_a_gpu_are_long_and_leave_no_process_idle() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [ranks.strip_size(cpu, 5000, m, w) for m, w in ((1000, 1), (1000, 8), (10**8, 1))] == [4194, 4194, 1]
    assert ranks.strip_size(gpu, 10**6, 10**6, 1) == 268  # 4 on a CPU
    assert ranks.strip_size(gpu, 5000, 25_000, 8) == 625

"""Ranks by counting: against a full stable sort, FAISS, and CLIP_benchmark's own recall."""

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL, search, unit_rows

from dyad.eval.config import Truth
from dyad.eval.metrics.matches import Labels, Matches, Ranking
from dyad.eval.tasks import image_text_retrieval as retrieval
from dyad.eval.tasks.image_text_retrieval import chance_recall, count_ranks, match_pairs, rank_metrics

Keys = tuple[np.ndarray, np.ndarray, np.ndarray]


def right_matrix(owner: np.ndarray, image_keys: np.ndarray, text_keys: np.ndarray, truth: Truth) -> np.ndarray:
    """(N, M) bool, by the definition, one pair at a time."""
    right = np.zeros((len(image_keys), len(owner)), dtype=bool)
    for i in range(len(image_keys)):
        for j in range(len(owner)):
            right[i, j] = owner[j] == i
            if truth is Truth.keys:
                right[i, j] |= image_keys[owner[j]] == image_keys[i]
                right[i, j] |= any(text_keys[j] == text_keys[c] for c in range(len(owner)) if owner[c] == i)
    return right


def sorted_ranks(score: np.ndarray, right: np.ndarray) -> np.ndarray:
    """1 + the wrong items before the first right one in a stable descending sort."""
    order = np.argsort(-score, axis=1, kind="stable")
    hits = np.take_along_axis(right, order, axis=1)
    return 1 + np.array([(~row[: row.argmax()]).sum() for row in hits])


@pytest.fixture
def captions() -> Keys:
    """owner, image_keys, text_keys of 40 pictures with 1 to 4 captions, some pictures and captions alike."""
    rng = np.random.default_rng(0)
    owner = np.sort(np.concatenate([np.arange(40), rng.integers(0, 40, 50)]))
    return owner, rng.integers(0, 30, 40), rng.integers(-5, 60, 90)


@pytest.mark.parametrize("truth", Truth)
@pytest.mark.parametrize("strip", [1, 500, 2**22])
def test_counting_equals_a_full_stable_sort(captions: Keys, truth: Truth, strip: int, monkeypatch) -> None:
    """Small whole numbers: scores are exact and many are equal."""
    monkeypatch.setattr(retrieval, "STRIP", strip)
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


def test_right_pairs_of_a_strip_come_once_and_in_order(captions: Keys) -> None:
    to_text, _ = match_pairs(*captions, Truth.keys)
    rows, items = to_text.pairs(10, 30)
    expected = np.argwhere(right_matrix(*captions, Truth.keys)[10:30])
    np.testing.assert_array_equal(np.stack([rows, items], axis=1), expected)


def test_counting_equals_faiss(captions: Keys) -> None:
    images, texts = unit_rows(40, 8, 0), unit_rows(90, 8, 1)
    right = right_matrix(*captions, Truth.pairs)
    rank = count_ranks(images, texts, match_pairs(*captions, Truth.pairs)[0], LOCAL).rank
    _, ids = search(images, texts, 10)
    hit = np.take_along_axis(right, ids, axis=1)
    for k in (1, 5, 10):
        assert (rank <= k).mean() == hit[:, :k].any(axis=1).mean()


def test_recall_equals_clip_benchmark_with_several_captions(captions: Keys) -> None:
    reference = import_module("clip_benchmark.metrics.zeroshot_retrieval")
    images, texts = unit_rows(40, 8, 2), unit_rows(90, 8, 3)
    right = torch.from_numpy(right_matrix(*captions, Truth.pairs))
    score = torch.from_numpy(images @ texts.T)
    to_text, to_image = match_pairs(*captions, Truth.pairs)
    for k in (1, 5, 10):
        rank = count_ranks(images, texts, to_text, LOCAL).rank
        expected = (reference.recall_at_k(score, right, k) > 0).float().mean().item()
        assert rank_metrics(rank, [k])[f"R@{k}"] == pytest.approx(expected, abs=1e-7)
        rank = count_ranks(texts, images, to_image, LOCAL).rank
        expected = (reference.recall_at_k(score.T, right.T, k) > 0).float().mean().item()
        assert rank_metrics(rank, [k])[f"R@{k}"] == pytest.approx(expected, abs=1e-7)


def test_a_collapsed_model_scores_no_better_than_chance() -> None:
    same = np.ones((50, 4), dtype=np.float32)
    own = np.arange(50)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    rank, right, *_ = count_ranks(same, same, matches, LOCAL)
    np.testing.assert_array_equal(rank, np.arange(1, 51))
    assert rank_metrics(rank, [10])["R@10"] == pytest.approx(chance_recall(right, 50, 10)) == pytest.approx(0.2)


def test_twins_share_their_credit_unless_keys_make_both_right() -> None:
    images = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    texts = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    own = np.arange(3)
    for truth, expected in ((Truth.pairs, [1, 2, 1]), (Truth.keys, [1, 1, 1])):
        matches, _ = match_pairs(own, np.array([7, 7, 8]), own, truth)
        np.testing.assert_array_equal(count_ranks(images, texts, matches, LOCAL).rank, expected)


def test_median_and_mean_are_those_of_open_clip() -> None:
    """open_clip: ranking counts from 0; mean + 1 and floor(median) + 1."""
    rank = np.array([1, 2, 5, 40])
    metrics = rank_metrics(rank, [1, 5])
    assert metrics == {"R@1": 0.25, "R@5": 0.75, "mean_rank": 12.0, "median_rank": np.floor(np.median(rank - 1)) + 1}


def test_chance_is_what_random_orders_score() -> None:
    rng = np.random.default_rng(0)
    right = np.array([1, 3, 7, 12])
    hits = [[(rng.permutation(12)[:r] < 4).any() for r in right] for _ in range(4000)]
    assert chance_recall(right, 12, 4) == pytest.approx(np.mean(hits), abs=0.01)
    assert chance_recall(right, 12, 50) == 1.0


def test_a_query_without_a_right_item_is_our_fault() -> None:
    nothing = Matches(
        Labels.of((np.array([0]), np.array([0])), size=2), Labels.of((np.array([0]), np.array([0])), size=1)
    )
    with pytest.raises(AssertionError, match="without a right item"):
        count_ranks(unit_rows(2, 4, 0), unit_rows(1, 4, 1), nothing, LOCAL)


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
    assert [retrieval.strip_size(cpu, 5000, m, w) for m, w in ((1000, 1), (1000, 8), (10**8, 1))] == [4194, 4194, 1]
    assert retrieval.strip_size(gpu, 10**6, 10**6, 1) == 268  # 4 on a CPU
    assert retrieval.strip_size(gpu, 5000, 25_000, 8) == 625

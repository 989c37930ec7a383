"""Right pairs, recall against CLIP_benchmark's own, chance, and searches of an approximate index."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import (
    LOCAL,
    Keys,
    Shown,
    check_ranking,
    encoder,
    random_images,
    right_matrix,
    some_captions,
    tokenize,
    towers,
    unit_rows,
)

from dyad.data.image_text.items import Captions, RetrievalSet
from dyad.eval.encode.encoder import Encoder
from dyad.eval.search.ranks import count_ranks
from dyad.eval.tasks.direction import Direction, chance_recall
from dyad.eval.tasks.image_text_retrieval import Retrieval, ViewRetrieval, match_pairs, rank_metrics
from dyad.train.eval_config import Truth

captions = pytest.fixture(some_captions)


def test_right_pairs_of_a_strip_come_once_and_in_order(captions: Keys) -> None:
    to_text, _ = match_pairs(*captions, Truth.keys)
    rows, items = to_text.pairs(10, 30)
    expected = np.argwhere(right_matrix(*captions, Truth.keys)[10:30])
    np.testing.assert_array_equal(np.stack([rows, items], axis=1), expected)


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


def test_chance_of_captions_that_repeat() -> None:
    """Equal captions have equal scores: what a model without any knowledge scores is less than among different ones."""
    own, texts = np.arange(60), np.repeat(np.arange(20), 3)
    for truth, keys in ((Truth.keys, texts), (Truth.pairs, None)):
        matches, _ = match_pairs(own, own, texts, truth)
        rank = [
            count_ranks(unit_rows(60, 8, n), unit_rows(20, 8, 500 + n)[texts], matches, LOCAL).rank for n in range(300)
        ]
        shown: Any = None
        direction = Direction("", own, own, matches, shown, shown, own, own, LOCAL, item_keys=keys)
        measured = {f"R@{k}": np.mean(np.stack(rank) <= k) for k in (1, 5, 10)}
        assert direction.chance((1, 5, 10)) == pytest.approx(measured, abs=0.02), truth


@pytest.mark.parametrize("spec", ["Flat", "IVF5,Flat;nprobe=5", "HNSW32", "PQ4x4"])
def test_ranks_and_galleries_are_of_one_search(spec: str) -> None:
    """Every case shows the place that its metrics count, on Flat by counting, and the metrics say what they are of."""
    shown, own = Shown(random_images(100)), np.arange(100) % 60
    words = Captions([f"{chr(97 + i % 26)} {i}" for i in range(100)], tokenize)
    evaluator = Retrieval("val", "", RetrievalSet(shown, words, np.arange(100), own, own), index=spec)  # type: ignore[arg-type]
    exact = replace(evaluator, index="Flat").report(encoder(), 40)
    found = evaluator.report(encoder(), 40)
    check_ranking(replace(evaluator, index="Flat"), exact)
    check_ranking(evaluator, found)
    for title, cases in found.details["gallery"].items():
        assert len(cases) == 60
        for case in cases:
            answers, rank = case["systems"]["model"], case["value"]["rank"]
            places = [place for place, answer in enumerate(answers, 1) if answer["right"]]
            assert places[:1] == [rank] if rank and rank <= 5 else not places, (title, case)
    ways = ("image_to_text", "text_to_image")
    agreement = {f"{way}_recall_against_exact@10" for way in ways}
    if spec == "Flat":
        assert found.metrics == exact.metrics and "search" not in found.details
    else:
        assert found.details["search"] == {way: {"index": spec} for way in ways}
        assert found.metrics.keys() == {m for m in exact.metrics if not m.endswith("_rank")} | agreement
    if spec.startswith("IVF"):
        assert found.metrics == {m: exact.metrics.get(m, 1.0) for m in found.metrics}
        for title, cases in found.details["gallery"].items():
            answers = {case["query"]["id"]: case["systems"] for case in exact.details["gallery"][title]}
            same = [case["systems"] == answers[case["query"]["id"]] for case in cases if case["query"]["id"] in answers]
            assert all(same) and len(same) > 30
    if spec.startswith("PQ"):
        assert max(found.metrics[name] for name in agreement) < 1
    assert found.chance == exact.chance


def test_an_index_searches_views_too() -> None:
    shown, own = Shown(random_images(60)), np.arange(60)
    data = RetrievalSet(shown, Shown(random_images(60, 1)), own, own, own)  # type: ignore[arg-type]
    encode = Encoder({side: towers()["x"] for side in "xy"}, LOCAL, block=16)
    found = ViewRetrieval("val", "", data, index="HNSW32").report(encode, 2)
    exact = ViewRetrieval("val", "", data)
    check_ranking(exact, exact.report(encode))
    assert found.details["search"] == {"view": {"index": "HNSW32"}}
    assert {"view_R@1", "view_recall_against_exact@10"} < found.metrics.keys()

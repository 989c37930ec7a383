"""Reciprocal rank fusion by hand and against the formula with fractions."""

import random
from fractions import Fraction
from itertools import permutations

import pytest

from dyad.eval.metrics.trec import Run, ranked
from dyad.eval.search.fusion import reciprocal_rank_fusion


def test_by_hand() -> None:
    """b: ranks 2 and 1; a: ranks 1 and none; c: 3 and 2; a query that one run lacks."""
    runs: list[Run] = [{"q": {"a": 9.0, "b": 8.0, "c": 7.0}}, {"q": {"b": 0.2, "c": 0.1}, "r": {"d": 1.0}}]
    fused = reciprocal_rank_fusion(runs)
    expected = {"q": {"b": 1 / 62 + 1 / 61, "c": 1 / 63 + 1 / 62, "a": 1 / 61}, "r": {"d": 1 / 61}}
    assert {q: list(s) for q, s in fused.items()} == {q: list(s) for q, s in expected.items()}
    for query, scores in expected.items():
        assert fused[query] == pytest.approx(scores)
    assert reciprocal_rank_fusion([{"q": {"a": 1.0}}, {"q": {"a": 1.0}}], k=1) == {"q": {"a": 1.0}}
    assert reciprocal_rank_fusion([]) == {} and reciprocal_rank_fusion([{"q": {}}]) == {"q": {}}


def test_depth_cuts_what_goes_in_and_what_comes_out() -> None:
    runs: list[Run] = [{"q": {"a": 3.0, "b": 2.0, "c": 1.0}}, {"q": {"c": 3.0, "d": 2.0, "b": 1.0}}]
    assert list(reciprocal_rank_fusion(runs, depth=2)["q"]) == ["c", "a"]
    assert list(reciprocal_rank_fusion(runs)["q"]) == ["c", "b", "a", "d"]


def random_runs(seed: int) -> list[Run]:
    draw = random.Random(seed)
    documents = [f"d{i}" for i in range(25)]
    return [{"q": {d: float(draw.randrange(6)) for d in draw.sample(documents, 15)}} for _ in range(3)]


@pytest.mark.parametrize("seed", range(5))
def test_ties_in_a_run_go_by_its_order_and_ties_in_the_sum_too(seed: int) -> None:
    runs = random_runs(seed)
    exact: dict[str, Fraction] = {}
    for run in runs:
        for rank, (document, _) in enumerate(ranked(run["q"]), 1):
            exact[document] = exact.get(document, Fraction(0)) + Fraction(1, 60 + rank)
    expected = sorted(exact, key=lambda d: (exact[d], d), reverse=True)
    fused = reciprocal_rank_fusion(runs)["q"]
    assert list(fused) == expected
    assert fused == pytest.approx({d: float(s) for d, s in exact.items()}, rel=1e-5)
    assert any(exact[a] == exact[b] for a in exact for b in exact if a < b)


def test_the_order_of_runs_and_of_their_documents_does_not_matter() -> None:
    runs = random_runs(9)
    turned: list[Run] = [{"q": dict(reversed(run["q"].items()))} for run in runs]
    results = [reciprocal_rank_fusion(order) for order in (*permutations(runs), turned)]
    assert all(result == results[0] and list(result["q"]) == list(results[0]["q"]) for result in results)

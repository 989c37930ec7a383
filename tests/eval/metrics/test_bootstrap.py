"""Intervals against a plain loop, against theory, and what they must not depend on."""

import math
from typing import Any

import numpy as np
import pytest
from helpers.messages import raises

from dyad.eval.metrics import bootstrap
from dyad.eval.metrics.bootstrap import class_mean_interval, interval as interval_or_none


def interval(*arguments: Any, **options: int) -> tuple[float, float]:
    found = interval_or_none(*arguments, **options)
    assert found is not None
    low, high = found
    return low, high


def lumpy(groups: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """Groups of 1 to 12 values that are alike within a group."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 13, groups)
    values = np.concatenate([draw.normal() + 0.1 * draw.standard_normal(size) for size in sizes])
    return values, [f"g{i}" for i, size in enumerate(sizes) for _ in range(size)]


def test_against_a_plain_loop() -> None:
    """Other random numbers, so equal up to their noise: the two ends within a few hundredths of the width."""
    values, groups = lumpy(80, 0)
    members = {g: [v for v, name in zip(values, groups, strict=True) if name == g] for g in groups}
    draw = np.random.default_rng(1)
    names = list(members)
    means = []
    for _ in range(4000):
        drawn = [v for i in draw.integers(0, len(names), len(names)) for v in members[names[i]]]
        means.append(sum(drawn) / len(drawn))
    expected = np.quantile(means, [0.025, 0.975])
    found = np.array(interval(values, groups))
    assert found[0] < values.mean() < found[1]
    np.testing.assert_allclose(found, expected, atol=0.06 * (expected[1] - expected[0]))


def test_single_values_as_groups_give_the_normal_interval() -> None:
    values = np.random.default_rng(0).standard_normal(2000)
    low, high = interval(values, range(2000))
    error = values.std() / math.sqrt(2000)
    expected = (values.mean() - 1.96 * error, values.mean() + 1.96 * error)
    assert (low, high) == pytest.approx(expected, abs=0.06 * error)


def test_alike_values_count_once() -> None:
    """Each value ten times over: by value the interval would be √10 too narrow; by group it is as before."""
    values = np.random.default_rng(0).standard_normal(100)
    one = interval(values, range(100))
    ten = interval(np.repeat(values, 10), np.repeat(np.arange(100), 10).tolist())
    assert ten == pytest.approx(one, abs=1e-12)
    low, high = interval(np.repeat(values, 10), range(1000))
    assert (one[1] - one[0]) / (high - low) == pytest.approx(math.sqrt(10), rel=0.1)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        values, groups = lumpy(60, seed)
        low, high = interval(values, groups, samples=500)
        hits += low < 0 < high
    assert 178 <= hits <= 199


def test_seed_samples_and_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    values, groups = lumpy(50, 0)
    found = interval(values, groups, seed=3, samples=1000)
    assert found == interval(list(values), groups, seed=3, samples=1000)
    assert found != interval(values, groups, seed=4, samples=1000)
    monkeypatch.setattr(bootstrap, "DRAWS", 7 * 50)
    assert found == interval(values, groups, seed=3, samples=1000)


def test_differences_of_systems_that_agree_are_sharp() -> None:
    """Both find the same queries easy: their difference is known far better than either."""
    values, groups = lumpy(100, 0)
    other = values + 0.05
    low, high = interval(other - values, groups)
    assert low == pytest.approx(0.05) and high == pytest.approx(0.05)
    low, high = interval(values, groups)
    assert high - low > 0.2


def test_none_is_a_group_of_its_own() -> None:
    values = [0.0, 1.0, 2.0, 3.0]
    assert interval(values, [None, None, "a", "a"]) == interval(values, [0, 1, "a", "a"])
    assert interval(values, [None] * 4) == interval(values, range(4))


@pytest.mark.parametrize("size", [0, 1, 5])
def test_one_group_tells_nothing_of_others(size: int) -> None:
    assert interval_or_none([1.0] * size, ["a"] * size) is None


def test_lengths_must_agree() -> None:
    with raises(ValueError):
        interval([1.0, 2.0], ["a"])


def test_metrics_with_the_same_groups_share_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals are those of each metric alone, to the last bit."""
    generator, draws = np.random.default_rng(0), list[int]()
    values = {name: generator.random(40) for name in ("HR@1", "recall", "MRR")}
    groups = {"HR@1": [i // 2 for i in range(40)], "recall": [*range(40)], "MRR": [f"u{i // 2}" for i in range(40)]}
    alone = {name: interval_or_none(v, groups[name]) for name, v in values.items()}
    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: draws.append(seed) or default_rng(seed))
    found = bootstrap.summary(values, lambda name: groups[name])["intervals"]
    assert list(found.items()) == list(alone.items()) and len(draws) == 2


def test_the_mean_over_classes_against_a_plain_loop(monkeypatch) -> None:
    """Queries drawn one by one, classes of 1 to 60 queries; a class that was not drawn is not in the mean."""
    draw = np.random.default_rng(0)
    label = np.repeat([7, 3, 11, 5], [60, 25, 1, 8])
    hit = draw.random(len(label)) < np.array([0.9, 0.5, 1.0, 0.2])[np.unique(label, return_inverse=True)[1]]
    means = []
    for _ in range(4000):
        picks = draw.integers(0, len(label), len(label))
        means.append(np.mean([hit[picks][label[picks] == c].mean() for c in np.unique(label[picks])]))
    expected = np.quantile(means, [0.025, 0.975])
    found = class_mean_interval(hit, label)
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=0.06 * (expected[1] - expected[0]))
    assert class_mean_interval(hit, label) == found != class_mean_interval(hit, label, seed=1)
    monkeypatch.setattr(bootstrap, "DRAWS", 4000)
    again = class_mean_interval(hit, label)
    assert again is not None
    np.testing.assert_allclose(again, expected, atol=0.06 * (expected[1] - expected[0]))


def test_one_query_tells_nothing_of_others() -> None:
    assert class_mean_interval(np.array([True]), np.array([0])) is None

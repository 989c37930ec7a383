"""Correlations against SciPy; their values as a base of intervals."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dyad.eval.metrics.bootstrap import interval
from dyad.eval.metrics.correlation import pearson_values, spearman_values

stats = import_module("scipy.stats")
BOTH = [(spearman_values, stats.spearmanr), (pearson_values, stats.pearsonr)]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 90), st.sampled_from([0, 1, 8]))
def test_the_means_are_scipys(seed: int, count: int, decimals: int) -> None:
    """Also with many equal values."""
    rng = np.random.default_rng(seed)
    a = np.round(rng.normal(size=count), decimals)
    b = np.round(rng.normal(size=count) + a, decimals)
    a[0], b[0] = a[1:].max() + 1, b[1:].max() + 1  # neither is constant
    for values, reference in BOTH:
        assert values(a, b).mean() == pytest.approx(reference(a, b)[0], abs=1e-12)


def test_a_perfect_order_is_one_and_a_constant_zero() -> None:
    a = np.arange(20.0)
    np.testing.assert_allclose(spearman_values(a, a**3), 1.0)
    np.testing.assert_allclose(pearson_values(a, 5 - 2 * a), -1.0)
    for values, _ in BOTH:
        np.testing.assert_array_equal(values(a, np.full(20, 0.1)), np.zeros(20))


@pytest.mark.parametrize(("values", "reference"), BOTH, ids=["spearman", "pearson"])
@pytest.mark.parametrize("decimals", [8, 0], ids=["distinct", "tied"])
def test_a_value_is_the_influence_of_its_sample(values, reference, decimals: int) -> None:  # type: ignore[no-untyped-def]
    """n · r − (n − 1) · r without the sample, the pseudo-values of the jackknife, are the same up to 1/n."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=300)
    b = np.round(a + rng.normal(size=300), decimals)
    without = np.array([reference(np.delete(a, i), np.delete(b, i))[0] for i in range(300)])
    pseudo = 300 * reference(a, b)[0] - 299 * without
    np.testing.assert_allclose(values(a, b), pseudo, atol=0.1)
    assert np.corrcoef(values(a, b), pseudo)[0, 1] > 0.9999


def test_the_interval_is_that_of_samples_drawn_again() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=400)
    b = np.round(a + rng.normal(size=400))
    low, high = interval(spearman_values(a, b), range(400)) or (0, 0)
    draws = (rng.integers(0, 400, 400) for _ in range(500))
    drawn = [stats.spearmanr(a[rows], b[rows])[0] for rows in draws]
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=0.015)
    assert 0.05 < high - low < 0.2

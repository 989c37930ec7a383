"""AUC and partial AUC against scikit-learn; their values as a base of intervals."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dyad.eval.metrics.auc import auc_values
from dyad.eval.metrics.bootstrap import interval

reference = import_module("sklearn.metrics").roc_auc_score


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.9, 0.5, 0.05, 0.001]), st.sampled_from([0, 1, 8]))
def test_the_mean_is_scikit_learns(seed: int, max_fpr: float, decimals: int) -> None:
    """Also with many equal scores, where the curve has straight parts that max_fpr may cut."""
    rng = np.random.default_rng(seed)
    positive = rng.permutation(np.arange(rng.integers(4, 120)) % rng.integers(2, 9) == 0)
    score = np.round(rng.normal(size=len(positive)) + positive * rng.random() * 3, decimals)
    expected = reference(positive, score, max_fpr=None if max_fpr == 1 else max_fpr)
    assert auc_values(score, positive, max_fpr).mean() == pytest.approx(expected, abs=1e-12)


def test_chance_and_the_best_are_a_half_and_one() -> None:
    positive = np.arange(50) % 5 == 0
    for max_fpr in (1.0, 0.05):
        assert auc_values(np.zeros(50), positive, max_fpr).mean() == pytest.approx(0.5)
        np.testing.assert_allclose(auc_values(1.0 * positive, positive, max_fpr), 1.0)


@pytest.mark.parametrize("max_fpr", [1.0, 0.2])
def test_the_interval_is_that_of_samples_drawn_again(max_fpr: float) -> None:
    rng = np.random.default_rng(0)
    positive = np.arange(400) % 4 == 0
    score = rng.normal(size=400) + positive
    low, high = interval(auc_values(score, positive, max_fpr), range(400)) or (0, 0)
    draws = (rng.integers(0, 400, 400) for _ in range(500))
    drawn = [auc_values(score[rows], positive[rows], max_fpr).mean() for rows in draws]
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=0.01)
    assert 0.05 < high - low < 0.2

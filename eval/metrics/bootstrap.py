"""Confidence intervals of a mean over queries, by the bootstrap over groups of queries.

Results of queries of one topic are correlated, so topics are drawn, not queries (cluster bootstrap; Field and Welsh
2007). Two systems are compared by the interval of their differences per query, in which common difficulty cancels.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

DRAWS = 2**21  # drawn groups in memory at a time: 16 MiB for each of a few arrays


def interval(
    values: np.ndarray | Sequence[float],
    groups: Sequence[Hashable],
    seed: int = 0,
    samples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """(low, high): the percentile interval of the mean of n values. Each sample draws all groups with replacement.

    groups: one name for each value; a value with None is a group of its own. For two systems: values of one minus
    values of the other. The draws depend on the number of groups, samples and the seed only. (nan, nan) with fewer than
    two groups. Raises ValueError if the lengths differ.
    """
    number, size = _numbered(groups)
    values = np.asarray(values, dtype=np.float64)
    if values.shape != number.shape:
        raise ValueError(f"{values.shape} values, {number.shape} groups: needs one group per value")
    if size < 2:
        return float("nan"), float("nan")
    sums, counts = np.bincount(number, values), np.bincount(number).astype(np.float64)
    draw = np.random.default_rng(seed)
    at_once = max(1, DRAWS // size)
    means = np.empty(samples)
    for start in range(0, samples, at_once):
        picks = draw.integers(0, size, (min(at_once, samples - start), size))
        means[start : start + at_once] = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    return _percentiles(means, level)


def class_mean_interval(
    hit: np.ndarray, label: np.ndarray, seed: int = 0, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """(low, high) of the mean over classes of the share of hits, by the bootstrap over n queries.

    hit (n,) bool; label (n,): the class of each query. The counts of classes in a sample are multinomial, and the hits
    within a class are binomial; drawing these counts makes the cost independent of n. A class that a sample does not
    contain is not in its mean. (nan, nan) with fewer than two queries.
    """
    if len(hit) < 2:
        return float("nan"), float("nan")
    _, number, count = np.unique(label, return_inverse=True, return_counts=True)
    share = np.bincount(number, hit) / count
    draw = np.random.default_rng(seed)
    at_once = max(1, DRAWS // len(count))
    means = np.empty(samples)
    for start in range(0, samples, at_once):
        drawn = draw.multinomial(len(hit), count / len(hit), min(at_once, samples - start))
        hits = draw.binomial(drawn, share)
        means[start : start + at_once] = (hits / np.maximum(drawn, 1)).sum(axis=1) / (drawn > 0).sum(axis=1)
    return _percentiles(means, level)


def limits(interval: tuple[float, float]) -> list[float] | None:
    """An interval for JSON, which has no nan: None if it is unknown."""
    return None if math.isnan(interval[0]) else list(interval)


def group_means(values: np.ndarray | Sequence[float], groups: Sequence[Hashable]) -> np.ndarray:
    """(G,) the mean of each group in order of first appearance. In the mean of these, all topics have equal weight.

    Its interval: `interval(means, range(len(means)))`.
    """
    number, _ = _numbered(groups)
    return np.bincount(number, np.asarray(values, dtype=np.float64)) / np.bincount(number)


def _percentiles(means: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _numbered(groups: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    """((n,) the number of each value's group in order of first appearance, the number of groups)."""
    numbers: dict[Hashable, int] = {}
    alone = object()
    names = ((alone, i) if group is None else group for i, group in enumerate(groups))
    found = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
    return found, len(numbers)

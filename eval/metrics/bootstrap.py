"""95 % intervals of a mean over queries, by the bootstrap: groups of queries are drawn with replacement.

`summary` returns the metrics of a system with intervals, `comparison` those of its lead over another one. Results of
queries about one topic are correlated, so topics are drawn, not queries (cluster bootstrap; Field and Welsh 2007). Two
systems are compared by the interval of their differences per query, because a difficulty that both share cancels in the
difference.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

SAMPLES, LEVEL = 10_000, 0.95
DRAWS = 2**21  # drawn groups in memory at a time: 16 MiB for each of a few arrays

Means = Callable[[np.random.Generator, int], np.ndarray]  # (generator, count) → means of `count` samples, last axis
Values = dict[str, np.ndarray]  # metric → (n,) its value for each of n queries
Groups = Callable[[str], Sequence[Hashable]]  # metric → the group of each query that has a value of this metric


def summary(values: Values, groups: Groups) -> dict[str, dict[str, Any]]:
    """Return {"metrics": metric → mean over queries, "intervals": metric → 95 % interval of this mean}.

    values: metric → (n,) its value for each of n queries. groups: function from the name of a metric to the group of
    each of these queries. An interval is [low, high], or None if there are fewer than two groups.
    """
    return {
        "metrics": {name: float(v.mean()) for name, v in values.items()},
        "intervals": _by_metric(values, groups),
    }


def comparison(values: Values, others: Values, groups: Groups) -> dict[str, dict[str, Any]]:
    """Return the entry of a result for a baseline: its `summary`, and the lead of the model over it.

    The lead is in "difference": metric → {"value": mean of model − baseline, "interval": its 95 % interval, or None for
    fewer than two groups}. values, others: metric → (n,) the value of the model, and of the baseline, for each of the
    same n queries, for the same metrics. groups: function from the name of a metric to the group of each of these
    queries.
    """
    by_query = {name: v - others[name] for name, v in values.items()}
    ends = _by_metric(by_query, groups)
    ahead = {name: {"value": float(d.mean()), "interval": ends[name]} for name, d in by_query.items()}
    return {**summary(others, groups), "difference": ahead}


def interval(
    values: np.ndarray | Sequence[float], groups: Sequence[Hashable], seed: int = 0, samples: int = SAMPLES
) -> list[float] | None:
    """Return [low, high], the 95 % interval of the mean of a metric over n queries; None for fewer than two groups.

    It comes from `samples` bootstrap samples, each with as many groups of queries as there are, drawn with replacement.
    values (n,): the metric of each query. groups: the group of each query; a query with None is a group of its own. To
    compare two systems, pass the metric of one minus the metric of the other. The draws depend only on the number of
    groups, `samples` and the seed.
    """
    return _intervals([values], _numbered(groups), seed, samples)[0]


def class_mean_interval(hit: np.ndarray, label: np.ndarray, seed: int = 0) -> list[float] | None:
    """Return [low, high], the 95 % interval of the mean over classes of the share of hits in a class.

    hit (n,) bool: whether the query is answered right; label (n,): the class of each query. Returns None for fewer than
    two queries. The interval comes from bootstrap samples of n queries. Counts are drawn instead of queries, so that
    the cost does not depend on n: the sizes of the classes in a sample are multinomial, the hits in a class are
    binomial. A class that does not occur in a sample is not in the mean of this sample.
    """
    _, number, size = np.unique(label, return_inverse=True, return_counts=True)
    share = np.bincount(number, hit) / size

    def means(generator: np.random.Generator, count: int) -> np.ndarray:
        drawn = generator.multinomial(len(hit), size / len(hit), count)
        hits = generator.binomial(drawn, share)
        return (hits / np.maximum(drawn, 1)).sum(axis=1) / (drawn > 0).sum(axis=1)

    return _percentiles(means, len(size), seed) if len(hit) > 1 else None


def _by_metric(values: Values, groups: Groups) -> dict[str, list[float] | None]:
    """Return metric → the `interval` of its mean. Samples are drawn once for all metrics with the same groups."""
    alike: dict[bytes, list[str]] = {}
    for name in values:
        alike.setdefault(_numbered(groups(name)).tobytes(), []).append(name)
    ends: dict[str, list[float] | None] = {}
    for number, names in alike.items():
        found = _intervals([values[name] for name in names], np.frombuffer(number, np.int64), 0, SAMPLES)
        ends |= zip(names, found, strict=True)
    return {name: ends[name] for name in values}


def _intervals(
    values: Sequence[np.ndarray | Sequence[float]], number: np.ndarray, seed: int, samples: int
) -> list[list[float]] | list[None]:
    """Return the `interval` of each of several metrics of the same n queries, in one pass over the bootstrap samples.

    number (n,): the index of the group of each query.
    """
    counts = np.bincount(number).astype(np.float64)
    all_sums = [np.bincount(number, each) for each in values]

    def means(generator: np.random.Generator, count: int) -> np.ndarray:
        picks = generator.integers(0, len(counts), (count, len(counts)))
        sizes = counts[picks].sum(axis=1)
        return np.stack([sums[picks].sum(axis=1) / sizes for sums in all_sums])

    return _percentiles(means, len(counts), seed, samples) if len(counts) > 1 else [None] * len(values)


def _percentiles(means: Means, size: int, seed: int, samples: int = SAMPLES) -> list[Any]:
    """Return [low, high], the 95 % interval of a mean, from its means in `samples` random samples.

    means: function (random generator, count) → means of `count` random samples, along the last axis; if it returns the
    means of several metrics, (metrics, count), the result is a list of their intervals. size: how many random numbers
    one sample needs; the more, the fewer samples are drawn at one time, to save memory.
    """
    generator, at_once = np.random.default_rng(seed), max(1, DRAWS // size)
    parts = [means(generator, min(at_once, samples - start)) for start in range(0, samples, at_once)]
    ends = np.quantile(np.concatenate(parts, axis=-1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=-1)
    return ends.T.tolist()


def _numbered(groups: Sequence[Hashable]) -> np.ndarray:
    """Return the index of the group of each of n queries, int64 (n,); groups count from 0 in order of first appearance.

    groups: the name of the group of each query; a query with None is a group of its own.
    """
    numbers: dict[Hashable, int] = {}
    names = ((None, i) if group is None else group for i, group in enumerate(groups))
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)

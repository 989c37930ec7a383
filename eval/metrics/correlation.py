"""Correlation of two vectors as one value for each sample, whose mean is the correlation, for a bootstrap over samples.

The mean is Pearson's correlation (of the values) or Spearman's (of the ranks), as SciPy computes it, but 0 if a vector
is constant.
"""

from collections.abc import Callable

import numpy as np


def pearson_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return one value for each of n samples, float64 (n,), whose mean is Pearson's correlation of a and b, both (n,).

    A value is the mean plus the influence of the sample on it, so a bootstrap of the values gives an interval. All
    values are 0 if a or b is constant.
    """
    # the mean of equal numbers may differ from them in the last bit
    a, b = (x - (x.mean() if np.ptp(x) else x) for x in (a.astype(np.float64), b.astype(np.float64)))
    return _with_influence(a * b, a * a, b * b)


def spearman_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return one value for each of n samples, float64 (n,), whose mean is Spearman's correlation of a and b, both (n,).

    It is Pearson's correlation of the ranks; equal values share the mean of their ranks. All values are 0 if a or b is
    constant. A value is the mean plus the influence of the sample on it, as in pearson_values; the sample also moves
    the ranks of all others (Croux and Dehon 2010, Influence functions of the Spearman and Kendall correlation
    measures).
    """
    (u, above_u), (v, above_v) = (_ranked(x) for x in (a, b))
    # of the mean of u v: the product itself, and what the sample adds to the ranks u and to the ranks v of the others
    covariance = u * v + above_u(v) + above_v(u)
    return _with_influence(covariance, u * u + 2 * above_u(u), v * v + 2 * above_v(v), degree=3)


def _with_influence(ab: np.ndarray, aa: np.ndarray, bb: np.ndarray, degree: int = 1) -> np.ndarray:
    """Return one value for each sample, (n,): the correlation r = c/√(v w) plus the influence of the sample on r.

    c is a covariance, v and w are variances. ab, aa, bb (n,): the parts of the samples in c, v and w, whose means are
    `degree` times c, v and w. All values are 0 if v or w is 0.
    """
    c, v, w = (part.mean() / degree for part in (ab, aa, bb))
    if v * w <= 0:
        return np.zeros(len(ab))
    r = c / np.sqrt(v * w)
    return r + (ab - degree * c) / np.sqrt(v * w) - r / 2 * ((aa - degree * v) / v + (bb - degree * w) / w)


def _ranked(x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return (u, above): the relative ranks of x, (n,), with mean 0, and a function of weights of the samples.

    above(w), w (n,), returns for each sample i the sum of w_j over the samples j with x_j > x_i, divided by n, (n,);
    where x_j = x_i, half of w_j counts.
    """
    _, tied = np.unique(x, return_inverse=True)
    counts = np.bincount(tied)

    def above(w: np.ndarray) -> np.ndarray:
        sums = np.bincount(tied, w, len(counts))
        return (sums[::-1].cumsum()[::-1] - sums / 2)[tied] / len(x)

    u = (np.cumsum(counts) - counts / 2)[tied] / len(x)
    return u - u.mean(), above

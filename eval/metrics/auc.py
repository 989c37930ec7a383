"""Area under the ROC curve, whole (AUC) or for few false positives only (partial AUC), as in scikit-learn."""

import numpy as np

MAX_FPR = 0.05  # the largest false-positive rate of the partial AUC that evaluators report


def auc_values(score: np.ndarray, positive: np.ndarray, max_fpr: float = 1.0) -> np.ndarray:
    """Return one value for each of n samples, float64 (n,), whose mean is the AUC or the partial AUC up to `max_fpr`.

    max_fpr: the largest false-positive rate; below 1 the partial AUC is scaled so that chance is 0.5 and the best 1
    (McClish 1989, Analyzing a portion of the ROC curve). score (n,): the higher, the more likely the sample is
    positive. positive (n,) bool: whether it is; both values must occur. The mean is scikit-learn's
    roc_auc_score(positive, score, max_fpr=max_fpr); samples of equal scores make one straight segment of the curve. A
    value is the mean plus the influence of the sample on the mean, so a bootstrap of the values gives an interval.
    """
    _, tied = np.unique(-score, return_inverse=True)  # the group of equal scores of each sample, best first
    counts = np.stack([np.bincount(tied, kind) for kind in (~positive, positive)])
    fpr, tpr = np.pad(np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True), ((0, 0), (1, 0)))
    limit = np.interp(max_fpr, fpr, tpr)
    of_negative = max_fpr * limit - _mean_below(limit, tpr)
    own = np.where(positive, _mean_below(max_fpr, fpr)[tied], of_negative[tied])
    area, share = own[positive].mean(), positive.mean()
    values = area + (own - area) / np.where(positive, share, 1 - share)
    worst = max_fpr**2 / 2
    return 0.5 * (1 + (values - worst) / (max_fpr - worst))


def _mean_below(limit: float, ends: np.ndarray) -> np.ndarray:
    """Return the mean of max(limit − u, 0) over u in each of n intervals [ends[i], ends[i + 1]], as (n,).

    ends: (n + 1,), ascending. For an interval of width 0 it is the value of max(limit − u, 0) at its one point.
    """
    below, width = np.maximum(limit - ends, 0), np.diff(ends)
    return np.where(width > 0, -np.diff(below**2) / (2 * np.where(width > 0, width, 1)), below[:-1])

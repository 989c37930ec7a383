"""Area under the ROC curve, whole (AUC) or for few false positives only (partial AUC), as in scikit-learn."""

import numpy as np

MAX_FPR = 0.05  # of the partial AUC that evaluators report


def auc_values(score: np.ndarray, positive: np.ndarray, max_fpr: float = 1.0) -> np.ndarray:
    """Return (n,) values of n samples whose mean is the partial AUC up to the false-positive rate `max_fpr`, which
    McClish's formula scales so that chance is 0.5 and the best 1; with max_fpr=1 the AUC.

    score (n,): how likely each sample is positive. positive (n,) bool: which ones are; both kinds must occur. The mean
    is roc_auc_score(positive, score, max_fpr=max_fpr) of scikit-learn, where samples of equal scores share a straight
    line of the curve. The values are the mean plus the influence of each sample on it, so their bootstrap gives an
    interval; for max_fpr=1 their variance is DeLong's (DeLong et al. 1988). McClish 1989, Analyzing a portion of the
    ROC curve.
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
    """Return the mean of max(limit − u, 0) over u in each interval [ends[i], ends[i + 1]]."""
    below, width = np.maximum(limit - ends, 0), np.diff(ends)
    return np.where(width > 0, -np.diff(below**2) / (2 * np.where(width > 0, width, 1)), below[:-1])

"""Area under the ROC curve of a score, whole (AUC) or for few false positives only (partial AUC), as in scikit-learn."""

import numpy as np


def auc_values(score: np.ndarray, positive: np.ndarray, max_fpr: float = 1.0) -> np.ndarray:
    """Return (n,) values of n samples whose mean is the partial AUC up to the false-positive rate `max_fpr`, which
    McClish's formula scales so that chance is 0.5 and the best 1; with max_fpr=1 the AUC.

    score (n,): how likely each sample is positive. positive (n,) bool: which ones are; both kinds must occur. The mean
    is roc_auc_score(positive, score, max_fpr=max_fpr) of scikit-learn, where samples of equal scores share a straight
    line of the curve. The values are linear in the samples (the empirical influence function), so their bootstrap gives
    an interval; for max_fpr=1 their variance is DeLong's (DeLong et al. 1988). McClish 1989, Analyzing a portion of the
    ROC curve.
    """
    _, tied = np.unique(-score, return_inverse=True)  # number of a sample's group of equal scores, best first
    curves = []
    for kind in (~positive, positive):
        rates = np.cumsum(np.bincount(tied, kind, tied.max() + 1)) / kind.sum()
        curves.append((np.concatenate([[0.0], rates[:-1]]), rates))
    (fpr_from, fpr_to), (tpr_from, tpr_to) = curves
    limit = np.interp(max_fpr, np.r_[0.0, fpr_to], np.r_[0.0, tpr_to])  # the true-positive rate at max_fpr
    of_positive = _mean_below(max_fpr, fpr_from, fpr_to)
    of_negative = max_fpr * limit - _mean_below(limit, tpr_from, tpr_to)
    share = positive.mean()
    own = np.where(positive, of_positive[tied], of_negative[tied])
    area = own[positive].mean()
    values = area + (own - area) / np.where(positive, share, 1 - share)
    worst = max_fpr**2 / 2
    return 0.5 * (1 + (values - worst) / (max_fpr - worst))


def _mean_below(limit: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the mean of max(limit − u, 0) over u in [low, high], elementwise."""
    below = np.maximum(limit - low, 0), np.maximum(limit - high, 0)
    width = high - low
    return np.where(width > 0, (below[0] ** 2 - below[1] ** 2) / (2 * np.where(width > 0, width, 1)), below[0])

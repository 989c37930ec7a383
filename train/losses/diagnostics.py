"""Metrics of a batch of embeddings that show problems, such as collapse, which a loss curve does not show.

They need the scores of all pairs of rows, so they are computed from the first ROWS pairs of the global batch only.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout

ROWS = 1024
SATURATED = 0.95  # an InfoNCE bound above this share of its maximum log K says little about the mutual information


@torch.no_grad()
def diagnose(
    x_bD: Tensor, y_bD: Tensor, scale: float | Tensor | None, cosine: bool, compared: bool = True
) -> dict[str, float]:
    """Return metrics of the first ROWS (1024) pairs of the batch of all ranks, the same on every rank.

    Every rank must call it. An anchor is an x scored against all y, or a y against all x. alignment: mean |x̂ − ŷ|² of
    pairs, with x̂, ŷ the normalised embeddings. The names of all other metrics end in a side, _x or _y. uniformity: log
    mean exp(−2|x̂_i − x̂_j|²) over i ≠ j, 0 for a collapsed side (Wang & Isola 2020). accuracy: share of the anchors of
    the side whose highest score is that of their own pair. With a scale, and with more than one pair, also the means
    over anchors of log_z, the log mean exp of an anchor's logits (log_z_std: its standard deviation); of
    effective_negatives, e^H (and _min, _max, its extremes); and of participation, 1/(Σπ²). π is the softmax over an
    anchor's negatives, H its entropy.

    x_bD, y_bD: this rank's embeddings (b, D), normalised or not; row i of x and row i of y are a pair. scale: 1/τ, the
    factor from scores to logits; None for objectives without temperature. cosine: whether scores are of normalised
    embeddings. compared: whether the loss compares an anchor with other rows; without it there are only alignment and
    uniformity. Returns {} for embeddings of width 1, which are scores and have no direction.
    """
    if x_bD.shape[-1] == 1:
        return {}
    x, y = _first_rows(x_bD), _first_rows(y_bD)
    unit_x, unit_y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    if cosine:
        x, y = unit_x, unit_y
    scores = x @ y.T
    found = {
        "alignment": (unit_x - unit_y).square().sum(1).mean(),
        "uniformity_x": _uniformity(unit_x),
        "uniformity_y": _uniformity(unit_y),
    }
    if compared:
        found |= {"accuracy_x": _accuracy(scores), "accuracy_y": _accuracy(scores.T)}
    if compared and scale is not None and len(scores) > 1:
        for side, a in (("x", scale * scores), ("y", scale * scores.T)):
            found |= {f"{name}_{side}": value for name, value in _of_anchors(a).items()}
    values = torch.stack(list(found.values())).tolist()
    return dict(zip(found, values, strict=True))


@torch.no_grad()
def duplicates(x_keys_b: Tensor, y_keys_b: Tensor) -> dict[str, float]:
    """Return {"duplicates_x": share, "duplicates_y": share}, the same on all ranks. Every rank must call it.

    A share, from 0 to 1, is that of the items of one side of the global batch whose content key occurs more than once
    on this side. x_keys_b, y_keys_b: content keys of this rank's items, int64 (b,), equal for equal items.
    """
    shares = {}
    for side, keys_b in (("x", x_keys_b), ("y", y_keys_b)):
        (layout,) = Layout.of(keys_b)
        counts = layout.gather(keys_b).unique(return_counts=True)[1]
        shares[f"duplicates_{side}"] = float(counts[counts > 1].sum() / layout.total)
    return shares


def saturation(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return {"mi_saturated": 1.0 or 0.0}: whether the InfoNCE bound on the mutual information is near its maximum.

    scalars: the metrics of a step; "mi_bound" is the bound and "log_k" its maximum log K, with K the number of
    candidates of an anchor. Near is above 0.95 log K (SATURATED). Returns {} without a mi_bound, or if log_k is not
    above 0.
    """
    if "mi_bound" not in scalars or scalars["log_k"] <= 0:
        return {}
    return {"mi_saturated": float(scalars["mi_bound"] > SATURATED * scalars["log_k"])}


def _first_rows(e_bD: Tensor) -> Tensor:
    """Return the embeddings of the first ROWS rows of all ranks, in rank order: (≤ ROWS, D) float32 or float64.

    e_bD: the embeddings of this rank. Every rank must call it, and each gets all of these rows.
    """
    (layout,) = Layout.of(e_bD)
    own = e_bD[: max(0, ROWS - layout.own.start)]
    (cut,) = Layout.of(own)
    return cut.gather(own.to(torch.promote_types(own.dtype, torch.float32)))


def _uniformity(unit: Tensor) -> Tensor:
    """Return log mean exp(−2|u_i − u_j|²) over i ≠ j, 0-d, for the normalised embeddings u_i, the rows of `unit`.

    It is computed with |u_i − u_j|² = 2 − 2 <u_i, u_j>, and is 0 for fewer than two rows.
    """
    n = len(unit)
    if n < 2:
        return unit.new_zeros(())
    exponents = 4 * (unit @ unit.T) - 4
    return exponents.fill_diagonal_(-math.inf).flatten().logsumexp(0) - math.log(n * (n - 1))


def _accuracy(scores: Tensor) -> Tensor:
    """Return the share of rows of the square matrix `scores` whose largest element is on the diagonal, 0-d.

    The diagonal holds the scores of the pairs. With ties, the element that argmax returns counts as the largest.
    """
    return (scores.argmax(1) == torch.arange(len(scores), device=scores.device)).to(scores.dtype).mean()


def _of_anchors(a: Tensor) -> dict[str, Tensor]:
    """Return statistics of the logits `a` (n, n) of n ≥ 2 anchors, the rows, each with its positive on the diagonal.

    log_z, log_z_std: mean and standard deviation over anchors of the log mean exp of an anchor's logits.
    effective_negatives, …_min, …_max: mean, least and largest of e^H, with H the entropy of the softmax π over an
    anchor's negatives. participation: the mean of 1/(Σπ²).
    """
    log_z = a.logsumexp(1) - math.log(len(a))
    log_pi = a.clone().fill_diagonal_(-math.inf).log_softmax(1)
    pi = log_pi.exp()
    effective = (-(pi * log_pi.masked_fill(pi == 0, 0.0)).sum(1)).exp()
    return {
        "log_z": log_z.mean(),
        "log_z_std": log_z.std(correction=0),
        "effective_negatives": effective.mean(),
        "effective_negatives_min": effective.min(),
        "effective_negatives_max": effective.max(),
        "participation": (1 / pi.square().sum(1)).mean(),
    }

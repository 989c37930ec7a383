"""Linear probe: multinomial logistic regression on frozen features, as in appendix A.3 of CLIP (arXiv 2103.00020).

It minimises scikit-learn's objective, C · (sum of the cross-entropies of n samples) + ½ ‖W‖², with an intercept that is
not penalised, by L-BFGS in float64 with at most 1000 iterations. Features are taken as they are, not standardised. C is
the value with the highest accuracy on about a fifth of the training part, which is held out (`held_out`); then the
probe is fitted to the whole training part. C is searched as in CLIP: first 7 values from 1e-6 to 1e6, then, four times,
the two values on either side of the best one at half the distance, down to an eighth of a decade. These are at most 15
fits; all values at distances of an eighth of a decade would be 97.

Symbols: n samples, D feature width, K classes.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

from dyad.eval.search.ranks import STRIP
from dyad.train.distributed.agreement import from_rank_0, only_on
from dyad.train.distributed.world import World, gather_objects

ITERATIONS = 1000
# Tolerance of L-BFGS on the gradient of the mean cross-entropy: in the last fit, and (scikit-learn's) in the fits that
# choose C. A hundredth of TOLERANCE doubles the time and did not change the accuracy on 10,000 samples.
TOLERANCE, ROUGH = 1e-6, 1e-4
LARGEST = 6  # C is 10^−6 … 10^6
KEPT = 2**27  # the most elements of features that are held in float64 (1 GiB)
HELD_OUT = 5  # one of so many different samples of a class is held out to choose C
Chosen = tuple[np.ndarray, float, float]


def linear_probe(x_nD: np.ndarray, target_n: np.ndarray, out_n: np.ndarray, world: World) -> Chosen:
    """Return (the weights of the probe, as `fit` returns them; its C; the accuracy of this C on the held-out samples).

    All processes must call it together; they share the fits and get the same result. x_nD: features, float32 (n, D).
    target_n: class indices from 0, int64 (n,). out_n: bool (n,), True for the samples that are held out to choose C, as
    `held_out` returns it; at least one.
    """

    def accuracies(exponents: Sequence[float]) -> dict[float, float]:
        weights = (fit(x_nD[~out_n], target_n[~out_n], 10**exponent, world.device, ROUGH) for exponent in exponents)
        right = (logits(x_nD[out_n], weight).argmax(axis=1) == target_n[out_n] for weight in weights)
        return {exponent: float(hits.mean()) for exponent, hits in zip(exponents, right, strict=True)}

    found: dict[float, float] = {}
    best, wanted = 0.0, [float(exponent) for exponent in range(-LARGEST, LARGEST + 1, 2)]
    for step in (1, 1 / 2, 1 / 4, 1 / 8, 0):
        own = only_on(world, True, partial(accuracies, wanted[world.rank :: world.size]))
        for part in gather_objects(own or {}, world):
            found |= part
        # among equal accuracies, the strongest penalty
        best = max(found, key=lambda exponent: (found[exponent], -exponent))
        wanted = [exponent for exponent in (best - step, best + step) if abs(exponent) <= LARGEST]
    return from_rank_0(world, lambda: fit(x_nD, target_n, 10**best, world.device, TOLERANCE)), 10**best, found[best]


def logits(x_nD: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the logits, float64 (n, K), of n samples; their softmax is scikit-learn's predict_proba.

    x_nD: features, (n, D). weight: (K, D + 1), as returned by `fit`.
    """
    return x_nD.astype(np.float64) @ weight[:, :-1].T + weight[:, -1]


def held_out(target_n: np.ndarray, keys_n: np.ndarray) -> np.ndarray:
    """Return bool (n,): True for the samples of the training part that are held out to choose C.

    target_n: the class index of each sample. keys_n: its content key, equal for equal samples. The different keys of a
    class are sorted; the second of every HELD_OUT keys is held out, with all samples that have it. So equal samples of
    a class are held out together, the order of samples does not matter, and the samples of a class with a single key
    are not held out.
    """
    pairs, number = np.unique(np.stack([target_n, keys_n], axis=1), axis=0, return_inverse=True)
    position = np.arange(len(pairs)) - np.searchsorted(pairs[:, 0], pairs[:, 0])
    return (position % HELD_OUT == 1)[number.reshape(-1)]


def fit(x_nD: np.ndarray, target_n: np.ndarray, c: float, device: torch.device, tolerance: float) -> np.ndarray:
    """Return the weights of a logistic regression, float64 (K, D + 1), with a row for each class.

    The last column has the intercepts. c: the inverse regularisation strength C. x_nD: features, float32 (n, D).
    target_n: class indices from 0, (n,); K is the largest + 1. tolerance: on the gradient of the objective divided by C
    · n, with respect to V (below). Centred features of up to KEPT elements are held in float64; larger ones stay
    float32, and rows are converted when needed. For two classes scikit-learn penalises the difference of the two weight
    vectors; each of them is half the difference, up to its sign, so their squares count twice here.

    The minimum is sought over V, with W = V T. T scales the principal axes of the features so that the second
    derivative at V = 0 is about the identity: L-BFGS then needs fewer iterations. The objective, and so the minimum, is
    the same.
    """
    (n, width), classes = x_nD.shape, int(target_n.max()) + 1
    x, target = torch.from_numpy(x_nD).to(device), torch.from_numpy(target_n).to(device)
    rows = max(1, STRIP // max(classes, width))
    mean_D = x.mean(dim=0, dtype=torch.float64)  # centred features have the same optimum, which is reached sooner
    strips = [*zip(x.split(rows), target.split(rows), strict=True)]
    if x.numel() <= KEPT:
        strips = [(part - mean_D, labels) for part, labels in strips]
    penalty = (0.5 if classes > 2 else 1.0) / (c * n)

    def centred() -> Iterator[tuple[Tensor, Tensor]]:
        return ((part if part.dtype == torch.float64 else part - mean_D, labels) for part, labels in strips)

    spread, axes = torch.linalg.eigh(torch.stack([part.T @ part for part, _ in centred()]).sum(0) / n)
    scaled = axes / (spread.clamp(min=0) / classes + 2 * penalty).sqrt()
    t = torch.block_diag(scaled.T, torch.ones(1, 1, device=device))  # the intercept stays as it is

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = (torch.from_numpy(flat).to(device).view(classes, width + 1) @ t).requires_grad_()
        total = penalty * weight[:, :-1].square().sum()
        total.backward()
        for part, labels in centred():
            entropy = F.cross_entropy(F.linear(part, weight[:, :-1], weight[:, -1]), labels, reduction="sum") / n
            entropy.backward()
            total = total + entropy.detach()
        assert weight.grad is not None
        return total.item(), (weight.grad @ t.T).flatten().cpu().numpy()

    options = {"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS, "gtol": tolerance, "ftol": 0.0}
    found = minimize(loss, np.zeros(classes * (width + 1)), jac=True, method="L-BFGS-B", options=options)
    weight = found.x.reshape(classes, width + 1) @ t.cpu().numpy()
    weight[:, -1] -= weight[:, :-1] @ mean_D.cpu().numpy()
    return weight

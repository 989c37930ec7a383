"""The robust objectives once more: anchor by anchor, positive by positive, with sorted lists of losses, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PAIR_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "identity": lambda d, c: d,
    "hinge": lambda d, c: torch.where(d > -c, c + d, 0.0),
    "squared_hinge": lambda d, c: torch.where(d > -c, (c + d) ** 2, 0.0),
    "logistic": lambda d, c: torch.logaddexp(d, torch.zeros_like(d)),
}
CONJUGATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "kl": lambda u, alpha: torch.exp(u) - 1,
    "chi2": lambda u, alpha: torch.where(u > -1, u + u**2 / 2, -0.5),
    "cvar": lambda u, alpha: torch.where(u > 0, u, 0.0) / alpha,
}


def oce(losses_m: Tensor, tau: Tensor, divergence: str, alpha: float) -> Tensor:
    """Closed forms; ν of χ² from the sorted losses, differentiated through."""
    m = len(losses_m)
    if divergence == "kl":
        return tau * (torch.logsumexp(losses_m / tau, 0) - torch.tensor(float(m)).double().log())
    ordered = losses_m.sort(descending=True).values
    if divergence == "cvar":
        left, total = alpha * m, losses_m.new_zeros(())
        for value in ordered:
            share = min(1.0, left)
            total = total + share * value
            left = max(0.0, left - share)
        return total / (alpha * m)
    levels = [(ordered[:active].sum() - m * tau) / active for active in range(1, m + 1)]
    level = [level for level, lowest in zip(levels, ordered, strict=True) if level < lowest][-1]
    return at_nu(losses_m, level + tau, tau, "chi2", alpha)


def at_nu(losses_m: Tensor, nu: Tensor, tau: Tensor, divergence: str, alpha: float) -> Tensor:
    """τ/m Σ_j φ*((ℓ_j − ν)/τ) + ν."""
    return tau * CONJUGATES[divergence]((losses_m - nu) / tau, alpha).mean() + nu


def reference_coce(
    x: Tensor,
    y: Tensor,
    tau: Tensor,
    candidates: Sequence[Sequence[int]],
    positives: Sequence[Sequence[int]],
    *,
    divergence: str,
    pair_loss: str,
    similarity: str = "cosine",
    alpha: float = 0.3,
    margin: float = 0.4,
    nu: Tensor | None = None,
    relevance: Mapping[tuple[int, int], float] | None = None,
    rho: float = 0.0,
) -> Tensor:
    """mean_i mean_p w_ip (OCE + ρτ); nu: (b,) instead of the best one.

    Anchors without candidates or positive are skipped.
    """
    if similarity == "cosine":
        x, y = (F.normalize(e, dim=1) for e in (x, y))
    values = []
    for i, (chosen, own) in enumerate(zip(candidates, positives, strict=True)):
        if not chosen or not own:
            continue
        of_positives = []
        for p in own:
            losses = torch.stack([PAIR_LOSSES[pair_loss](x[i] @ y[j] - x[i] @ y[p], margin) for j in chosen])
            best = oce(losses, tau, divergence, alpha) if nu is None else at_nu(losses, nu[i], tau, divergence, alpha)
            of_positives.append((relevance or {}).get((i, p), 1.0) * (best + rho * tau))
        values.append(torch.stack(of_positives).mean())
    return torch.stack(values).mean()

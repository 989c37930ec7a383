"""The spectral family: objectives of the second moments of the embeddings, without temperature.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def spectral(x_BD, y_BD):
    s_BB = x_BD @ y_BD.T
    others_BB = ~torch.eye(len(s_BB), dtype=torch.bool)
    return s_BB[others_BB].square().mean() - 2 * s_BB.diagonal().mean()

def spectral_alternating(x_BD, y_BD):  # each side learns against the other, frozen
    sides = ((x_BD, y_BD.detach()), (y_BD, x_BD.detach()))
    return sum((phi @ nu.T).square().mean() - 2 * (phi * nu).sum(1).mean() for phi, nu in sides)

def pca_penalty(x_BD, y_BD, penalty):
    error_DD = (x_BD.T @ x_BD + y_BD.T @ y_BD) / (2 * len(x_BD)) - torch.eye(x_BD.shape[1])
    return penalty * error_DD.square().sum() - (x_BD * y_BD).sum(1).mean()

def vicreg(x_BD, y_BD, invariance, variance, covariance, gamma, eps):
    c_2DD = torch.stack([torch.cov(x_BD.T), torch.cov(y_BD.T)])
    v_2D = c_2DD.diagonal(dim1=1, dim2=2)
    squares = (c_2DD - v_2D.diag_embed()).square().sum() / x_BD.shape[1]
    hinge = F.relu(gamma - (v_2D + eps).sqrt()).mean()
    return invariance * F.mse_loss(x_BD, y_BD) + variance * hinge + covariance * squares
```

Legend: b pairs (x_i, y_i) on this rank, B on all W ranks, D width; X, Y (B, D) the embeddings of all ranks; M_X =
XᵀX/B, M_Y = YᵀY/B (D, D) their second moments. The relevance w_i of a pair, if given, multiplies its attraction, <x_i,
y_i> or ‖x_i − y_i‖²; moments have no weights. So w(x, y) p(x, y) takes the place of p(x, y) in the spectral loss, not
in p(x) and p(y).

Σ_ij <x_i, y_j>² = tr(XᵀX YᵀY), so only the scores of own pairs are computed and nothing is gathered: ranks sum D²
matrix entries for each moment, which costs 2·b·D² flops.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.objectives.base import Objective, ObjectiveResult, check_pairs
from dyad.train.losses.objectives.softmax import DIRECTIONS
from dyad.train.losses.options.choices import Cov, PairSet
from dyad.train.losses.options.spectral import (
    PcaPenaltyOptions,
    SpectralAlternatingOptions,
    SpectralOptions,
    VicregOptions,
)
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import costly_metrics_wanted
from dyad.train.losses.sums.functions import product, weighted


class MomentObjective(Objective, ABC):
    """An objective of the pairs (x_i, y_i) alone, such as one of second moments XᵀX/B; no columns are gathered.

    Subclasses implement `of_pairs`.
    """

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        targets = {name: e for name, e in inputs.items() if name in ("x_target", "y_target")}
        weights = {} if inputs["relevance"] is None else {"relevance_b": inputs["relevance"]}
        y_bD, layout = check_pairs(x_bD, y_mD, **targets)
        dtype = torch.promote_types(x_bD.dtype, torch.float32)
        targets = {name: e.to(dtype) for name, e in targets.items()}
        return self.of_pairs(x_bD.to(dtype), y_bD.to(dtype), layout, **targets, **weights)

    @abstractmethod
    def of_pairs(self, x_bD: Tensor, y_bD: Tensor, layout: Layout) -> ObjectiveResult:
        """Return the loss and metrics. x_bD, y_bD: the embeddings of this rank's pairs (x_i, y_i), float32 or float64.

        layout: which rank holds which pairs. A subclass whose options take "targets" has the further parameters
        x_target and y_target, (b, D); one whose options take "relevance" has relevance_b, (b,) float, None if not
        given. Every rank must call it.
        """


class Spectral(MomentObjective):
    """The spectral loss L = −(2/B) Σ_i <x_i, y_i> + mean <x_i, y_j>² (HaoChen et al. 2021).

    The mean is over i ≠ j or over all pairs (i, j), as options.pairs says. The embeddings at the minimum of L form the
    truncated singular value decomposition of p(x, y)/√(p(x) p(y)). The mean over i ≠ j is unbiased; its sum is computed
    as tr(XᵀX YᵀY) minus the squares <x_i, y_i>² of the pairs. With B = 1 there are no pairs i ≠ j, and this mean is 0.
    """

    options: SpectralOptions

    def of_pairs(
        self, x_bD: Tensor, y_bD: Tensor, layout: Layout, relevance_b: Tensor | None = None
    ) -> ObjectiveResult:
        total, ranks = layout.total, layout.world_size
        own_b = (x_bD * y_bD).sum(1)
        positive = ranks / total * own_b.sum()
        attraction = ranks / total * weighted(own_b, relevance_b).sum()
        sums_2DD = layout.sum(_moments(x_bD, y_bD))
        squares = (sums_2DD[0] * sums_2DD[1]).sum()
        others = (squares - ranks * own_b.square().sum()) / max(total * (total - 1), 1) if total > 1 else 0.0 * squares
        spread = squares / total**2 if self.options.pairs is PairSet.all else others
        with torch.no_grad():
            metrics = {"positive_score": positive, "negative_square": others, **moment_errors(sums_2DD / total)}
            if costly_metrics_wanted():
                metrics["rank"] = effective_rank(layout.sum_(x_bD.T @ y_bD))
        return ObjectiveResult(spread - 2 * attraction, metrics)


class SpectralAlternating(MomentObjective):
    """The spectral loss of one side φ against the other side ν, whose gradient is 0.

    L = −(2/B) Σ <φ_i, ν_i> + (1/B) Σ φ_iᵀ Λ φ_i. Λ is the second moment E[ννᵀ], of the batch or as a running mean. With
    the moment of the batch, value and gradient in φ are those of the spectral loss over all pairs. options.directions:
    φ = x, φ = y, or both. With targets, ν is the target's y for φ = x and the target's x for φ = y, and Λ is the second
    moment of the target's embeddings.

    With options.lambda_momentum above 0 there are two buffers. moments_2DD: running means of E[ννᵀ], for ν of x and of
    y, which start with the first batch. seen: 0 before the first batch, 1 after it.
    """

    options: SpectralAlternatingOptions
    moments_2DD: Tensor
    seen: Tensor

    def __init__(self, options: SpectralAlternatingOptions) -> None:
        super().__init__(options)
        if options.lambda_momentum:
            width = options.width or 0
            self.register_buffer("moments_2DD", torch.zeros(2, width, width))
            self.register_buffer("seen", torch.tensor(0.0))

    def of_pairs(
        self,
        x_bD: Tensor,
        y_bD: Tensor,
        layout: Layout,
        x_target: Tensor | None = None,
        y_target: Tensor | None = None,
        relevance_b: Tensor | None = None,
    ) -> ObjectiveResult:
        nu_x_bD, nu_y_bD = (x_bD if x_target is None else x_target), (y_bD if y_target is None else y_target)
        moves = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            moments_2DD = self._averaged(layout.sum_(_moments(nu_x_bD, nu_y_bD)) / layout.total, moves)
        share = layout.share
        row = share * against_frozen(x_bD, nu_y_bD.detach(), moments_2DD[1], relevance_b)
        column = share * against_frozen(y_bD, nu_x_bD.detach(), moments_2DD[0], relevance_b)
        loss = DIRECTIONS[self.options.directions](row, column)
        return ObjectiveResult(loss, {"positive_score": share * (x_bD * y_bD).sum(), **moment_errors(moments_2DD)})

    def _averaged(self, batch_2DD: Tensor, moves: bool) -> Tensor:
        """Return the running means of the second moments of x and of y, with this batch included, (2, D, D).

        batch_2DD: the moments of the batch, which are returned as they are if options.lambda_momentum is 0. moves:
        whether to store the new means, if all are finite. Raises ConfigError if options.width is not D.
        """
        if not self.options.lambda_momentum:
            return batch_2DD
        if batch_2DD.shape != self.moments_2DD.shape:
            width = batch_2DD.shape[-1]
            raise ConfigError(f"objective.width={self.options.width}: the embeddings have {width}. Set that")
        old_share = self.options.lambda_momentum * self.seen.to(batch_2DD.dtype)
        mean_2DD = batch_2DD + old_share * (self.moments_2DD.to(batch_2DD.dtype) - batch_2DD)
        if moves:
            is_finite = mean_2DD.isfinite().all()
            self.moments_2DD = torch.where(is_finite, mean_2DD.to(self.moments_2DD.dtype), self.moments_2DD)
            self.seen = torch.where(is_finite, 1.0, self.seen)
        return mean_2DD


class PcaPenalty(MomentObjective):
    """L = −(1/B) Σ_i <x_i, y_i> + λ ‖M − I‖²_F, with M = M_X (cov=first) or the mean of M_X and M_Y (cov=both).

    M_X, M_Y: second moments, see the module docstring. λ: options.penalty. The two items of a pair get equal embeddings
    while the dimensions keep unit variance and stay uncorrelated, as in a principal component or canonical correlation
    analysis. center=true: M is the covariance, of each side about its own mean.
    """

    options: PcaPenaltyOptions

    def of_pairs(
        self, x_bD: Tensor, y_bD: Tensor, layout: Layout, relevance_b: Tensor | None = None
    ) -> ObjectiveResult:
        total, products_bD = layout.total, x_bD * y_bD
        positive = layout.share * products_bD.sum()
        attraction = layout.share * weighted(products_bD, relevance_b).sum()
        views_vbD = torch.stack([x_bD] if self.options.cov is Cov.first else [x_bD, y_bD])
        if self.options.center:
            views_vbD = views_vbD - layout.sum(views_vbD.sum(1, keepdim=True)) / total
        flat = views_vbD.flatten(0, 1)
        moment_DD = layout.sum(product(flat.T, flat)) / (total * len(views_vbD))
        eye_DD = torch.eye(len(moment_DD), dtype=moment_DD.dtype, device=moment_DD.device)
        distance = (moment_DD - eye_DD).square().sum()
        metrics = {"positive_score": positive, "moment_error": distance.detach().sqrt()}
        return ObjectiveResult(self.options.penalty * distance - attraction, metrics)


class Vicreg(MomentObjective):
    """L = λ s(X, Y) + μ v + ν c, VICReg (Bardes, Ponce, LeCun 2022, arXiv 2105.04906, eq. 6).

    s = Σ_i ‖x_i − y_i‖² / (B D) (eq. 5, divided by D). v = mean over both sides and the dimensions d of
    max(0, γ − √(C_dd + ε)) (eq. 1, 2). c = Σ_{d≠e} C_de² / D, summed over both sides (eq. 4). C: the covariance of a
    side, with 1/(B − 1) (eq. 3); with B = 1 it is 0. As in the authors' code, s is a mean over dimensions too, and v is
    the mean of both sides; eq. 5 sums over dimensions, eq. 6 adds v of both sides.
    """

    options: VicregOptions

    def of_pairs(
        self, x_bD: Tensor, y_bD: Tensor, layout: Layout, relevance_b: Tensor | None = None
    ) -> ObjectiveResult:
        options, total, width = self.options, layout.total, x_bD.shape[1]
        squares_bD = weighted((x_bD - y_bD).square(), relevance_b)
        invariance = layout.share / width * squares_bD.sum()
        views_2bD = torch.stack([x_bD, y_bD])
        views_2bD = views_2bD - layout.sum(views_2bD.sum(1, keepdim=True)) / total
        covariances_2DD = layout.sum(_moments(*views_2bD)) / max(total - 1, 1)
        variances_2D = covariances_2DD.diagonal(dim1=1, dim2=2)
        variance = F.relu(options.gamma - (variances_2D + options.eps).sqrt()).mean()
        covariance = (covariances_2DD - variances_2D.diag_embed()).square().sum() / width
        terms = {"invariance": invariance, "variance": variance, "covariance": covariance}
        loss = options.invariance * invariance + options.variance * variance + options.covariance * covariance
        return ObjectiveResult(loss, terms)


def against_frozen(phi_bD: Tensor, nu_bD: Tensor, lambda_DD: Tensor, relevance_b: Tensor | None = None) -> Tensor:
    """Return Σ_i (φ_iᵀ Λ φ_i − 2 w_i <φ_i, ν_i>) over this rank's pairs, 0-d.

    Its gradient in φ_i is 2 (Λ φ_i − w_i ν_i). phi_bD: φ, the side that learns. nu_bD: ν, the side without gradient.
    lambda_DD: Λ, the second moment of ν. relevance_b: the weights w_i; None: all 1.
    """
    return ((product(phi_bD, lambda_DD) - 2 * weighted(nu_bD, relevance_b)) * phi_bD).sum()


def moment_errors(moments_2DD: Tensor) -> dict[str, Tensor]:
    """Return the distance ‖M − I‖_F of the second moment M from the identity, 0-d, for x and for y.

    The names are x_moment_error and y_moment_error. moments_2DD: M of x and M of y, stacked.
    """
    eye_DD = torch.eye(moments_2DD.shape[-1], dtype=moments_2DD.dtype, device=moments_2DD.device)
    errors = (moments_2DD - eye_DD).square().sum((1, 2)).sqrt()
    return {"x_moment_error": errors[0], "y_moment_error": errors[1]}


def effective_rank(c_DD: Tensor) -> Tensor:
    """Return the effective rank (Σ σ²)² / (Σ σ⁴) of the matrix c_DD with the singular values σ, 0-d.

    It is D if all σ are equal, near 1 if one σ dominates, and 0 for a zero matrix.
    """
    c_DD = c_DD / c_DD.abs().max().clamp(min=torch.finfo(c_DD.dtype).tiny)
    fourth = (c_DD.T @ c_DD).square().sum()
    return c_DD.square().sum().square() / fourth.clamp(min=torch.finfo(c_DD.dtype).tiny)


def _moments(x_bD: Tensor, y_bD: Tensor) -> Tensor:
    """Return XᵀX and YᵀY of this rank's rows, not divided by their number, stacked: (2, D, D)."""
    return torch.stack([product(e_bD.T, e_bD) for e_bD in (x_bD, y_bD)])

"""Optimised certainty equivalents of the losses in each row of a score matrix, at memory linear in the batch.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def kl(l_RM, tau):  # l: the losses of R rows
    return tau * ((l_RM / tau).logsumexp(1) - math.log(l_RM.shape[1]))

def chi2(l_RM, tau):  # t = ν − τ solves Σ_j max(l_j − t, 0) = Mτ: the largest t of the first n of the sorted losses
    largest_RM, n_M = l_RM.sort(1, descending=True).values, torch.arange(l_RM.shape[1]) + 1
    nu_R1 = ((largest_RM.cumsum(1) - len(n_M) * tau) / n_M).amax(1, keepdim=True) + tau
    u_RM = ((l_RM - nu_R1) / tau).clamp(min=-1)
    return (tau * (u_RM + u_RM.square() / 2) + nu_R1).mean(1)

def cvar(l_RM, alpha):
    number = alpha * l_RM.shape[1]  # of the largest losses; the last one counts in part
    shares_M = (number - torch.arange(l_RM.shape[1]).to(l_RM)).clamp(0, 1)
    return (shares_M * l_RM.sort(1, descending=True).values).sum(1) / number
```

Legend: R rows of this rank, r one of them or, as a shape, the number of rows in a slice; M columns of all ranks; losses
ℓ_rj = ℓ(s_rj − p_r) over the m_r columns j that row r does not leave out (its candidates C_r), s_rj score, p_r the
score of the row's positive; τ temperature, φ divergence, φ* its conjugate, w the weights of the worst case, ν a scalar
per row that is minimised over.

    OCE_r = min_ν τ/m_r Σ_j φ*((ℓ_rj − ν)/τ) + ν = max_{w ≥ 0, Σw = 1} Σ_j w_j ℓ_rj − τ/m_r Σ_j φ(m_r w_j)

(Ben-Tal & Teboulle 2007, sections 2 and 4). First ν is solved for without gradient, in one pass over the scores for KL
and 3 for χ² and CVaR (6 in float64). At the minimum over ν, the gradient in all other inputs is that of the sum with w
held fixed (Danskin's theorem). So one more pass, by pair_sum, gives value and gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses.objectives.pair_losses import Losses, identity
from dyad.train.losses.options.choices import Divergence
from dyad.train.losses.options.robust import RobustOptions
from dyad.train.losses.sums.functions import weighted
from dyad.train.losses.sums.row_losses import row_losses
from dyad.train.losses.sums.row_select import row_threshold
from dyad.train.losses.sums.tiles import slices, tile_size

STEEPEST = 30.0  # above it KL's conjugate is continued linearly: m e^30 does not overflow; at the minimum u ≤ log m


@dataclass(frozen=True)
class Solution:
    """The scalar ν that minimises the OCE (see the class OCE) of each of R rows, and metrics of the worst-case weights.

    ν = base + τ offset, with τ the temperature: two tensors keep the digits that would be lost if a small offset were
    added to a large base. of_weights: metrics (R,) by name, one or both of weights_kl = KL(w‖uniform), with w the
    weights, and zero_weights = the share of weights that are 0.
    """

    base_R: Tensor
    offset_R: Tensor
    of_weights: dict[str, Tensor]

    def nu_R(self, tau: Tensor) -> Tensor:
        """Return the minimising ν of each row, (R,), from its two stored parts: ν = base + τ offset. tau: τ."""
        return self.base_R + tau * self.offset_R


class OCE(ABC):
    """The optimised certainty equivalent (OCE) of a row's m losses ℓ_j for one divergence φ with conjugate φ*.

    OCE = min_ν τ/m Σ_j φ*((ℓ_j − ν)/τ) + ν = max_w Σ_j w_j ℓ_j − τ/m Σ_j φ(m w_j), over weights w_j ≥ 0 with sum 1
    (Ben-Tal & Teboulle 2007), with a scalar ν per row and the temperature τ.
    """

    @abstractmethod
    def conjugate(self, u: Tensor) -> Tensor:
        """Return the conjugate φ*(u) of the divergence, elementwise.

        The result must be finite, with a finite slope, for every u: u may be large, and pair_sum evaluates excluded
        pairs too.
        """

    @abstractmethod
    def solve(self, losses: Losses, tau: Tensor) -> Solution:
        """Return the ν that minimises the OCE of each row, and metrics of the worst-case weights, without gradient.

        OCE: the optimised certainty equivalent of a row's losses, the worst case over weights of its columns. losses:
        the losses of R rows. tau: the temperature τ, 0-d.
        """

    def closed_form(self, losses: Losses, tau: Tensor) -> tuple[Tensor, Solution]:
        """Return the weighted sum of the rows' OCE, 0-d, and the Solution, the ν at which each row's OCE is minimal.

        The weights are losses.factors_R: the mean of the sums over ranks is the mean over the rows of all ranks, each
        times its relevance. The sum is differentiable in the embeddings, the positives' scores and τ. tau: the
        temperature τ, 0-d.
        """
        solution = self.solve(losses, tau.detach())
        return self.value_at(losses, tau, solution.base_R, solution.offset_R), solution

    def value_at(self, losses: Losses, tau: Tensor, base_R: Tensor, offset_R: Tensor) -> Tensor:
        """Return the weighted sum over rows of τ/m_r Σ_j φ*((ℓ_rj − ν)/τ) + ν at the given ν = base + τ offset, 0-d.

        ℓ_rj: the m_r losses of row r; φ*: conjugate; tau: the temperature τ, 0-d. The weights are losses.factors_R.
        Differentiable in base and offset, in the embeddings, the positives' scores and τ.
        """

        def f(s: Tensor, p: Tensor, base: Tensor, offset: Tensor, tau: Tensor) -> Tensor:
            return tau * self.conjugate((losses.pair_loss(s - p) - base) / tau - offset)

        conjugates = losses.pair_sum(f, losses.factors_R / losses.m_R, (losses.p_R, base_R, offset_R), (tau,))
        return losses.mean(weighted(base_R + tau * offset_R, losses.relevance_R)) + conjugates


class RowOCE(OCE):
    """An OCE (optimised certainty equivalent) whose minimising ν is computed for a block of rows at a time.

    Memory is thereby bounded by the block. metric: the name of the metric of the worst-case weights that `solve_rows`
    returns.
    """

    metric: ClassVar[str]

    @torch.no_grad()
    def solve(self, losses: Losses, tau: Tensor) -> Solution:
        base_R, offset_R, metric_R = _by_rows(losses, partial(self.solve_rows, losses, tau), 3)
        return Solution(base_R, offset_R, {self.metric: metric_R})

    @abstractmethod
    def solve_rows(self, losses: Losses, tau: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Return three tensors (r,) for a slice of r rows: the parts base and offset of ν, and a metric.

        ν = base + τ offset minimises the OCE (optimised certainty equivalent) of a row; with two parts, a small offset
        keeps its digits beside a large base. The metric describes the row's worst-case weights; the attribute `metric`
        is its name.
        """


class KL(RowOCE):
    """The optimised certainty equivalent (OCE) for the KL divergence: φ(t) = t log t − t + 1, φ*(u) = e^u − 1.

    The minimising ν of a row is the OCE itself, τ (log Σ_j e^(ℓ_j/τ) − log m), with m the number of its losses ℓ_j.
    in_one_pass: whether closed_form may compute value and gradient in one pass over the scores (sums/row_losses.py) if
    the pair loss is the identity; the error of its value is then about τ · 1e-7 in float32.
    """

    metric = "weights_kl"

    def __init__(self, in_one_pass: bool) -> None:
        self._in_one_pass = in_one_pass

    def conjugate(self, u: Tensor) -> Tensor:
        at = u.detach().clamp(max=STEEPEST)
        value = at.expm1()
        return value + (value + 1) * (u - at)  # the tangent at `at`, so that backward is one product

    def closed_form(self, losses: Losses, tau: Tensor) -> tuple[Tensor, Solution]:
        if losses.pair_loss is not identity or not self._in_one_pass:
            return super().closed_form(losses, tau)

        def f(log_sum: Tensor, weight: Tensor, log_m: Tensor, tau: Tensor) -> Tensor:
            return weight * tau * (log_sum.where(weight > 0, log_m) - log_m)

        rows, scores = (losses.factors_R.to(losses.p_R), losses.m_R.log()), (losses.x_RD, losses.y_MD, losses.p_R)
        total, sums_R, means_R = row_losses(f, *scores, 1 / tau, losses.exclusion, rows=rows, parameters=(tau,))
        offset_R = sums_R - rows[1]
        offset_R, kl_R = (v.masked_fill(sums_R == -math.inf, 0.0) for v in (offset_R, means_R - offset_R))
        return total, Solution(torch.zeros_like(offset_R), offset_R, {self.metric: kl_R})

    def solve_rows(self, losses: Losses, tau: Tensor, rows: slice) -> tuple[Tensor, ...]:
        # one pass: the running maximum top, and Σ e and Σ e log e of e = exp((ℓ − top)/τ)
        m_r = losses.m_R[rows]
        top_r, sum_r, logs_r = torch.zeros_like(m_r), torch.zeros_like(m_r), torch.zeros_like(m_r)
        for values in losses.values(rows):
            highest_r = values.amax(1)
            highest_r = torch.where(sum_r > 0, top_r.maximum(highest_r), _finite(highest_r))
            shrunk_r = torch.where(sum_r > 0, ((top_r - highest_r) / tau).exp(), 0.0)
            e = ((values - highest_r[:, None]) / tau).exp()
            logs_r = shrunk_r * logs_r + torch.xlogy(shrunk_r * sum_r, shrunk_r) + torch.xlogy(e, e).sum(1)
            top_r, sum_r = highest_r, shrunk_r * sum_r + e.sum(1)
        sum_r = torch.where(sum_r > 0, sum_r, m_r)  # for a row without candidates
        offset_r = (sum_r / m_r).log()
        return top_r, offset_r, logs_r / sum_r - offset_r


class ChiSquare(RowOCE):
    """The optimised certainty equivalent for the χ² divergence: φ(t) = ½(t − 1)², φ*(u) = ½ max(u + 1, 0)² − ½.

    The minimising ν of a row is t + τ, where the threshold t solves Σ_j max(ℓ_j − t, 0) = mτ for the m losses ℓ_j of
    the row, and τ is the temperature.
    """

    metric = "zero_weights"

    def conjugate(self, u: Tensor) -> Tensor:
        u = u.clamp(min=-1.0)
        return u + u.square() / 2

    def solve_rows(self, losses: Losses, tau: Tensor, rows: slice) -> tuple[Tensor, ...]:
        m_r = losses.m_R[rows].double()
        top_r = torch.full_like(losses.p_R[rows], -math.inf)  # the largest loss, which becomes the base of ν

        def tiles() -> Iterator[Tensor]:
            for values in losses.values(rows):
                torch.maximum(top_r, values.amax(1), out=top_r)
                yield values

        volume_r1 = (m_r * tau)[:, None]
        found = row_threshold(tiles, lambda n, total, v: total - n * v >= volume_r1, top_r, summed=True)
        base_r, active_r = _finite(top_r), found.above_r.clamp(min=1.0)
        below_top_r = (active_r * base_r - found.sum_above_r) / tau  # Σ (top − ℓ)/τ over the losses above t
        offset_r = torch.where(found.above_r > 0, 1 - (m_r + below_top_r) / active_r, 0.0)
        return base_r, offset_r, 1 - found.above_r / m_r


class CVaR(OCE):
    """The optimised certainty equivalent for conditional value at risk: the mean of the αm largest of a row's m losses.

    φ(t) = 0 for t up to 1/α, else ∞; φ*(u) = max(u, 0)/α. The temperature has no effect. If αm is no whole number, the
    last loss counts in part. The pair loss is non-decreasing, so the largest losses have the largest scores. Scores
    equal to the threshold share the rest of αm equally, so that the result does not depend on the order of columns.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def conjugate(self, u: Tensor) -> Tensor:
        return F.relu(u) / self.alpha

    def solve(self, losses: Losses, tau: Tensor) -> Solution:
        return self._solution(losses, *self._selected(losses))

    def closed_form(self, losses: Losses, tau: Tensor) -> tuple[Tensor, Solution]:
        threshold_R, share_R, above_R, at_R = self._selected(losses)

        def f(s: Tensor, p: Tensor, threshold: Tensor, share: Tensor) -> Tensor:
            # the scores equal those of the search to the bit, so == finds the ties
            chosen = torch.where(s == threshold, share, (s > threshold).to(s.dtype))
            return chosen * losses.pair_loss(s - p)

        factors_R = losses.factors_R / (self.alpha * losses.m_R)
        total = losses.pair_sum(f, factors_R, (losses.p_R, threshold_R, share_R))
        return total, self._solution(losses, threshold_R, share_R, above_R, at_R)

    @torch.no_grad()
    def _selected(self, losses: Losses) -> list[Tensor]:
        """Select the αm largest of each row's m scores.

        Returns four tensors (R,): the threshold score; the share with which each score equal to the threshold counts;
        how many scores are above the threshold; how many equal the threshold.
        """

        def of_rows(rows: slice) -> tuple[Tensor, ...]:
            chosen_r = self.alpha * losses.m_R[rows].double()
            found = row_threshold(
                lambda: losses.scores(rows), lambda n, _, v: n >= chosen_r[:, None], losses.p_R[rows], summed=False
            )
            share_r = ((chosen_r - found.above_r) / found.at_r.clamp(min=1.0)).clamp(max=1.0)
            return found.threshold_r, share_r, found.above_r, found.at_r

        return _by_rows(losses, of_rows, 4)

    @torch.no_grad()
    def _solution(
        self, losses: Losses, threshold_R: Tensor, share_R: Tensor, above_R: Tensor, at_R: Tensor
    ) -> Solution:
        """Return the Solution whose ν is the loss at the threshold score, with the metrics of the worst-case weights.

        A row's weights, times its number of columns, are 1/α above the threshold and share/α at the threshold.
        """
        chosen_R = self.alpha * losses.m_R
        parts = ((above_R / chosen_R, 1 / self.alpha), (at_R * share_R / chosen_R, share_R / self.alpha))
        kl_R = sum((torch.xlogy(part, density) for part, density in parts), start=0.0 * threshold_R)
        nu_R = losses.pair_loss(threshold_R - losses.p_R)
        zero_R = 1 - (above_R + at_R) / losses.m_R
        return Solution(nu_R, torch.zeros_like(nu_R), {"weights_kl": kl_R, "zero_weights": zero_R})


def build_oce(options: RobustOptions) -> OCE:
    """Create the OCE (optimised certainty equivalent) for options.divergence.

    Its class is KL, ChiSquare, or CVaR (with options.alpha).
    """
    if options.divergence is Divergence.cvar:
        return CVaR(options.alpha)
    return KL(options.temperature <= 1) if options.divergence is Divergence.kl else ChiSquare()


def _by_rows(losses: Losses, of_rows: Callable[[slice], tuple[Tensor, ...]], number: int) -> list[Tensor]:
    """Call `of_rows` for one slice of rows after the other, and join the results of all slices.

    losses: the losses, which define the R rows. of_rows: slice of r rows → `number` tensors, (r,) each. Returns
    `number` tensors, (R,) each.
    """
    values = losses.p_R.new_zeros(number, len(losses.p_R))
    for rows in slices(len(losses.p_R), tile_size(losses.p_R.device)):
        values[:, rows] = torch.stack([v.to(values.dtype) for v in of_rows(rows)])
    return list(values.unbind())


def _finite(values: Tensor) -> Tensor:
    """Return a copy of `values` with every −inf replaced by 0; +inf and NaN stay."""
    return values.masked_fill(values == -math.inf, 0.0)

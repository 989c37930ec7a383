"""Estimators of the contrastive loss over the whole data set from small batches, with state for every sample.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def estimate(a_BB, u_B, gamma):  # a_ij = (s_ij − s_ii)/τ
    others_BB = 1 - torch.eye(len(a_BB))
    g_B = (others_BB * a_BB.exp()).sum(1) / (len(a_BB) - 1)
    u_B = (1 - gamma) * u_B + gamma * g_B.detach()
    return g_B - g_B.detach(), u_B  # the first is 0 and has the gradient of ĝ

def fastclip_v3(d_BB, tau, u_B, gamma, rho):  # one direction, d_ij = s_ij − s_ii; sogclr: rho = 0
    zero_B, u_B = estimate((d_BB.T / tau).T, u_B, gamma)  # isogclr: tau of each row, (B,)
    return (tau * (u_B.log() + zero_B / u_B + rho)).mean()  # fastclip_v0: without tau and rho

def nuclr(d_BB, tau, u_B, gamma, zeta_B, n):  # one direction
    zero_B, u_B = estimate((d_BB + zeta_B) / tau, u_B, gamma)
    D_B = u_B + (zeta_B / tau).exp() / (n - 1)
    return (tau * (((n - 1) * D_B).log() + zero_B / D_B.detach()) - zeta_B).mean()
```

Legend: n samples; b pairs (x_i, y_i) on this rank, B on all ranks; τ temperature, s_ij score of x_i and y_j, d_ij =
s_ij − s_ii; C_i the negatives of anchor i in the batch, m_i = |C_i|; a side, "x" or "y", is that of the anchors.

The exact loss needs g_i, the mean of e^(d_ij/τ) over all j of the data set. A batch gives the estimate ĝ_i =
mean_{j∈C_i} e^(d_ij/τ). The expectation of log ĝ_i is too small (Jensen's inequality), and more so for smaller batches.
So each sample keeps a running mean u_i ← (1−γ) u_i + γ ĝ_i with rate γ, and ∇ĝ_i / u_i estimates the gradient of log
g_i (Wang & Yang 2022, arXiv:2202.12396). ĝ_i and u_i are computed as logs, without overflow and without an ε in a
denominator. With γ = 1 and the whole data set as batch, everything is exact.

The relevance w_i of a pair multiplies the terms of both its anchors; u_i has no weights.

The value of a loss is computed from u, and its gradient is that of the estimator: zero_with_gradient gives a term with
value 0 and gradient ∇ĝ_i / u_i. Each rank takes these terms of its own anchors x and of all anchors y, see StateBatch.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.objectives.base import Objective, ObjectiveResult, TemperatureObjective
from dyad.train.losses.objectives.state_batch import MeanEstimates, Numbers, StateBatch, build_sample_state
from dyad.train.losses.options.choices import TemperatureGradient
from dyad.train.losses.options.estimators import EstimatorOptions, ISogCLROptions, NuclrOptions
from dyad.train.losses.sums.functions import with_gradients
from dyad.train.losses.sums.lse import Scales

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def zero_with_gradient(log_g_b: Tensor, log_u_b: Tensor) -> Tensor:
    """Return zeros, (b,), with gradient ∇ĝ_i / u_i: the estimate of ∇ log g_i for the mean g_i over the whole data set.

    Computed as e^(log ĝ_i − log u_i) minus the same value, detached. log_g_b: log ĝ_i with its graph, ĝ_i the mean over
    the batch. log_u_b: log u_i, u_i the running mean of ĝ_i.
    """
    weight_b = (log_g_b - log_u_b).exp()
    return weight_b - weight_b.detach()


class SogCLR(TemperatureObjective):
    """SogCLR: L = mean_i τ log u_i in each direction, with a fixed τ (Yuan et al. 2022, arXiv:2202.12387, alg. 1).

    u_i: the running mean of e^(d_ij/τ) over the negatives j of anchor i; d_ij: the score of (i, j) minus that of the
    pair (i, i); τ: the temperature. forward needs sample_ids_b, the indices of u; it updates u in training mode with
    gradients enabled.
    """

    gathers_ids = True

    def __init__(self, options: EstimatorOptions) -> None:
        super().__init__(options)
        self.sample_state = build_sample_state(options)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        scale = self.scale(batch.x_bD)
        in_g = self.estimate_scale(scale)
        state = StateBatch.of(self, batch, complete=False)
        state, log_g, updated = state.summed(batch, in_g, lambda: dict.fromkeys("xy", in_g * batch.pair_scores()))
        terms = {side: self.of_anchors(m.log_u(state.own), 1 / scale) for side, m in updated.items()}
        log_u = {side: m.log_u(state.seen[side]) for side, m in updated.items()}
        estimates = {
            side: self.of_anchors(zero_with_gradient(g, log_u[side]), 1 / scale.detach()) for side, g in log_g.items()
        }
        return state.result(state.mean(terms, estimates), updated, {}, lambda _: ({}, {}))

    def of_anchors(self, log_u_b: Tensor, tau: Tensor) -> Tensor:
        """Return the loss of each anchor, (b,), an affine function of log u_i.

        log_u_b: the log of each anchor's running mean u_i, or zero_with_gradient of it, (b,). tau: τ, 0-d.
        """
        return tau * log_u_b

    def estimate_scale(self, scale: Tensor) -> Tensor:
        """Return the factor of the scores in ĝ, the batch mean of e^(d_ij/τ), 0-d: the argument `scale`, 1/τ, itself.

        FastClipV0 returns the same value with twice the gradient if options.temperature_gradient=fastclip.
        """
        return scale


class FastClipV0(SogCLR):
    """FastCLIP-v0: L = mean_i log u_i in each direction, with a learning τ (Wei et al. 2024, arXiv:2407.01445, sec. 4).

    ∂L/∂τ = −mean_i Ê_j[e^(d_ij/τ) d_ij] / (τ² u_i), where Ê_j is the mean over the negatives j of anchor i in the
    batch, and u_i and d_ij are as in SogCLR. The authors' code counts the part of the gradient that goes through ĝ_i =
    Ê_j e^(d_ij/τ) twice; temperature_gradient=fastclip reproduces this.
    """

    def of_anchors(self, log_u_b: Tensor, tau: Tensor) -> Tensor:
        return log_u_b

    def estimate_scale(self, scale: Tensor) -> Tensor:
        twice = self.options.temperature_gradient is TemperatureGradient.fastclip
        return scale + (scale - scale.detach()) if twice else scale


class FastClipV3(FastClipV0):
    """FastCLIP-v3: L = mean_i τ log u_i + ρτ in each direction, with a learning τ (Wei et al. 2024, sec. 4).

    ∂L/∂τ = mean_i [log u_i + ρ − Ê_j[e^(d_ij/τ) d_ij] / (τ u_i)] in each direction, where Ê_j is the mean over the
    negatives j of anchor i in the batch, and u_i and d_ij are as in SogCLR. The last term is the gradient through ĝ_i =
    Ê_j e^(d_ij/τ). ρ: options.rho, the radius of the KL ball.
    """

    def of_anchors(self, log_u_b: Tensor, tau: Tensor) -> Tensor:
        return kl_robust(log_u_b, tau, self.options.rho)


def kl_robust(log_u_b: Tensor, tau: Tensor, rho: float) -> Tensor:
    """Return τ log u_i + ρτ of each anchor, (b,): the dual of a loss that is robust over a KL ball of radius ρ.

    log_u_b: log of the running means u_i. tau: (b,), or 0-d for all anchors.
    """
    return tau * log_u_b + rho * tau


class Leaves:
    """Detached copies of embeddings and per-sample parameters, for a loss that is differentiated within forward.

    iSogCLR and NUCLR update per-sample parameters (τ_i, ζ_i) in forward and need their gradients there. The pass over
    the scores that computes these gradients also computes the gradients of the embeddings, which are stored for the
    caller's backward. batch: the GatheredBatch with the copies. numbers: side → the copied parameters (B,).
    """

    def __init__(self, batch: GatheredBatch, numbers: Numbers) -> None:
        """Copy the embeddings of `batch` and the per-sample parameters `numbers` (side → (B,)) as detached leaves."""
        self._rows, further = batch.rows, batch.further_rows
        self._outer = batch.x_bD, batch.y_MD, *(() if further is None else (further.x_kD,))
        self._inner = x_bD, y_MD, *more = [e.detach().requires_grad_() for e in self._outer]
        further = further and replace(further, x_kD=more[0])
        self.batch = replace(batch, x_bD=x_bD, y_MD=y_MD, further_rows=further)
        self.numbers = {side: values_B.detach().requires_grad_() for side, values_B in numbers.items()}

    def differentiated(self, loss: Tensor) -> tuple[Tensor, Numbers]:
        """Return the loss with a graph to the caller's embeddings, and its gradient in the per-sample parameters.

        The gradient is side → (B,), to be summed over ranks. loss: this rank's share of the loss, 0-d, computed from
        the copies of embeddings and parameters.
        """
        total = self._rows.total
        # the gradient of a mean could underflow in float16, so that of the sum over anchors is taken and divided after
        gradients = torch.autograd.grad(loss * total, [*self._inner, *self.numbers.values()])
        of_embeddings = [de.to(loss.dtype) / total for de in gradients[: len(self._inner)]]
        loss = with_gradients(loss, self._outer, of_embeddings)
        return loss, {side: g / total for side, g in zip(self.numbers, gradients[len(self._inner) :], strict=True)}


def momentum_step(
    state: StateBatch,
    name: str,
    updated: dict[str, MeanEstimates],
    gradients: Numbers,
    lr: float,
    momentum: float,
    clip: float = math.inf,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Numbers, Numbers]:
    """Return the parameter `name` (tau or zeta) of the batch's samples after one gradient step with momentum.

    Nothing is stored; StateBatch.result stores what is returned. state: the batch with the old parameter of each
    sample. updated: the estimates by side; a sample without negatives keeps its parameter. gradients: ∂loss/∂parameter
    of each sample, summed over ranks, side → (B,). lr: learning rate. momentum: weight of the old running mean
    gradient, which starts with a sample's first gradient. clip: the largest absolute gradient. bounds: the range of the
    parameter. Returns (1) parameters and running mean gradients after the step, (B,) by name and side; (2) metrics: the
    QUANTILES of the parameter over the batch's anchors, 0-d each.
    """
    new, velocities = {}, {}
    for side, m in updated.items():
        old_B, velocity_B = (state.old(which)[side] for which in (name, f"{name}_velocity"))
        gradient_B = state.read.mean(gradients[side] / state.share(side)).clamp(-clip, clip)
        mixed_B = momentum * velocity_B + (1 - momentum) * gradient_B
        mixed_B = torch.where(velocity_B.isnan(), gradient_B, mixed_B)
        new[f"{name}_{side}"] = torch.where(m.has_negatives_B, (old_B - lr * mixed_B).clamp(*bounds), old_B)
        velocities[f"{name}_velocity_{side}"] = torch.where(m.has_negatives_B, mixed_B, velocity_B)
    values = torch.cat(list(new.values()))
    found = torch.quantile(values, torch.cat([values.new_full((1,), q) for q in QUANTILES.values()]))
    labels = (f"{name}_{label}" for label in QUANTILES)
    return new | velocities, dict(zip(labels, found.unbind(), strict=True))


class ISogCLR(Objective):
    """iSogCLR: L = mean_i τ_i log u_i + ρ τ_i, with a τ_i for each sample and direction (Qiu et al. 2023, alg. 1).

    u_i: the running mean of ĝ_i = Ê_j e^(d_ij/τ_i), where Ê_j is the mean over the negatives j of anchor i in the
    batch; d_ij: the score of (i, j) minus that of the pair (i, i); ρ: options.rho. The gradient in τ_i is log u_i + ρ −
    Ê_j[e^(d_ij/τ_i) d_ij] / (τ_i u_i). Where u_i = ĝ_i this equals ρ − KL(π_i | uniform), with π_i the softmax over
    these negatives. Each batch with the sample moves τ_i by the running mean of this gradient; the loss is computed
    with the old τ_i (arXiv:2305.11965).
    """

    gathers_ids = True

    def __init__(self, options: ISogCLROptions) -> None:
        super().__init__(options)
        self.sample_state = build_sample_state(options, tau=options.temperature, tau_velocity=math.nan)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        options, state = self.options, StateBatch.of(self, batch)
        old, own = state.old("tau"), state.own
        with torch.enable_grad():
            leaves = Leaves(batch, old)
            unused = torch.full_like(next(iter(old.values())), options.temperature)  # for a side without anchors
            tau_x_b, tau_y_B = leaves.numbers.get("x", unused)[own], leaves.numbers.get("y", unused)

            def own_logits() -> Numbers:
                s_b = leaves.batch.pair_scores()
                return {"x": s_b / tau_x_b, "y": s_b / tau_y_B[own]}

            scales = Scales(1 / tau_x_b, 1 / tau_y_B)
            state, log_g, updated = state.summed(leaves.batch, scales, own_logits)
            terms, estimates = {}, {}
            for side, g in log_g.items():
                seen = state.seen[side]
                terms[side] = kl_robust(updated[side].log_u(own), leaves.numbers[side][own], options.rho)
                estimates[side] = old[side][seen] * zero_with_gradient(g, updated[side].log_u(seen))
            loss, gradients = leaves.differentiated(state.mean(terms, estimates))
        bounds = options.min_temperature, options.max_temperature
        how = options.tau_lr, options.tau_momentum, options.tau_clip, bounds
        return state.result(loss, updated, gradients, lambda sums: momentum_step(state, "tau", updated, sums, *how))


class Nuclr(TemperatureObjective):
    """NUCLR: candidate j has weight e^(ζ_j/τ), with a learned ζ_j for every sample (Wang et al. 2024).

    arXiv:2410.09156. In each direction L = mean_i τ log Σ_j e^((d_ij + ζ_j)/τ) − mean_j ζ_j, where i and j run over all
    n samples, j = i included; d_ij is the score of (i, j) minus that of the pair (i, i), τ the temperature. The term of
    anchor i is τ log((n−1) D_i) − ζ_i with D_i = u_i + e^(ζ_i/τ)/(n−1), where u_i is the running mean of the mean of
    e^((d_ij + ζ_j)/τ) over the m_i negatives j in the batch (alg. 1).

    n ∂L/∂ζ_j = Σ_i e^((d_ij + ζ_j)/τ) / (m_i D_i) + e^(ζ_j/τ) / ((n−1) D_j) − 1. It is 0 if the weights that all
    anchors give to candidate j sum to 1. From epoch zeta_warmup on, each batch with sample j moves ζ_j by the running
    mean of this gradient.
    """

    gathers_ids = True

    def __init__(self, options: NuclrOptions) -> None:
        super().__init__(options)
        self.sample_state = build_sample_state(options, zeta=0.0, zeta_velocity=math.nan)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        options, state, scale = self.options, StateBatch.of(self, batch), self.scale(batch.x_bD)
        own, log_others = state.own, math.log(state.sample_state.num_samples - 1)
        with torch.enable_grad():
            leaves = Leaves(batch, state.old("zeta"))
            weights = {side: scale * zeta_B for side, zeta_B in leaves.numbers.items()}
            given = {"row_weights_B": weights.get("y"), "column_weights_M": weights.get("x")}
            s_b = leaves.batch.pair_scores
            state, log_g, updated = state.summed(
                leaves.batch, scale, lambda: dict.fromkeys("xy", scale * s_b()), **given
            )
            terms, estimates = {}, {}
            for side, g in log_g.items():
                log_d_B = torch.logaddexp(updated[side].log_u(slice(None)), weights[side] - log_others)
                terms[side] = (log_others + log_d_B[own]) / scale - leaves.numbers[side][own]
                estimates[side] = zero_with_gradient(g, log_d_B.detach()[state.seen[side]]) / scale.detach()
            loss, gradients = leaves.differentiated(state.mean(terms, estimates))
        how = options.zeta_lr if state.epoch >= options.zeta_warmup else 0.0, options.zeta_momentum
        return state.result(loss, updated, gradients, lambda sums: momentum_step(state, "zeta", updated, sums, *how))

"""Estimators of the contrastive loss over the whole data set from small batches, with state for every sample.

Legend: n samples; b pairs (x_i, y_i) on this rank, B on all ranks; τ temperature, s_ij score of x_i and y_j, d_ij =
s_ij − s_ii; C_i the negatives of anchor i in the batch, m_i = |C_i|; a side, "x" or "y", is that of the anchors.

The exact loss needs g_i, the mean of e^(d_ij/τ) over all j of the data set. A batch gives the estimate ĝ_i =
mean_{j∈C_i} e^(d_ij/τ). The expectation of log ĝ_i is too small (Jensen's inequality), and more so for smaller batches.
So each sample keeps a running mean u_i ← (1−γ) u_i + γ ĝ_i with rate γ, and ∇ĝ_i / u_i estimates the gradient of log
g_i (Wang & Yang 2022, arXiv:2202.12396). ĝ_i and u_i are computed as logs, without overflow and without an ε in a
denominator. With γ = 1 and the whole data set as batch, everything is exact.

The value of a loss is computed from u, and its gradient is that of the estimator: zero_with_gradient gives a term with
value 0 and gradient ∇ĝ_i / u_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.gathered.candidates import Anchors, relations
from dyad.train.losses.gathered.sample_state import SampleState, StateRead
from dyad.train.losses.objectives.base import Objective, ObjectiveResult, TemperatureObjective
from dyad.train.losses.objectives.robust import SIDES
from dyad.train.losses.objectives.softmax import score_means
from dyad.train.losses.options.common import CandidateSet, Directions, Duplicates, PairOptions
from dyad.train.losses.options.estimators import EstimatorOptions, ISogCLROptions, NuclrOptions, TemperatureGradient
from dyad.train.losses.sums.functions import with_gradients
from dyad.train.losses.sums.lse import Scales, log_partition
from dyad.train.losses.sums.tiles import Exclusion

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
Numbers = dict[str, Tensor]  # by side or by name


def sample_state(options: EstimatorOptions, **initial: float) -> SampleState:
    """Create the per-sample state of an objective: log u and the entries of `initial`, for each side of its anchors.

    u: the running mean of a sample's exponentials. initial: name → the initial value of a per-sample parameter. A
    stored name ends in its side, _x or _y: "log_u_x". Raises ConfigError if options.num_samples is not set.
    """
    if options.num_samples is None:
        raise ConfigError(
            f"objective={options.name} keeps state for every sample: say how many there are, objective.num_samples"
        )
    numbers = {"log_u": math.nan, **initial}
    names = {f"{name}_{side}": value for side in SIDES[options.directions] for name, value in numbers.items()}
    return SampleState(options.num_samples, names, options.memory_budget_mb)


@dataclass(frozen=True)
class StateBatch:
    """The global batch of one step, its anchors by side ("x", "y") and the stored state of its samples before the step.

    exclusion: the pairs that no sum over negatives contains, such as the positives. read: the state of the batch's
    samples. complete: whether it is that of all ranks. memory: the state of all samples. epoch: counted by the samples
    seen. training: whether the step changes the state.
    """

    batch: GatheredBatch
    exclusion: Exclusion | None
    anchors: dict[str, Anchors]
    read: StateRead
    complete: bool
    memory: SampleState
    options: EstimatorOptions
    epoch: int
    training: bool

    @staticmethod
    def of(objective: Objective, batch: GatheredBatch, complete: bool = True) -> StateBatch:
        """Return the samples of `batch` with their stored state, anchors and negatives. Every rank must call it.

        complete=False: each rank has the state that it stores only, until `summed`.

        If a sample occurs twice in the batch, its pairs with its own copy are masked: it is no negative of itself.
        """
        options, memory = objective.options, objective.memory
        assert memory is not None
        dtype = torch.promote_types(batch.x_bD.dtype, torch.float32)
        read = memory.read(batch.sample_ids_b, batch.rows, dtype, batch.sample_ids_B, complete)
        duplicates = options.duplicates
        if read.repeated and batch.sample_ids_b is not None:
            batch = replace(batch, keys=(*batch.keys, (batch.sample_ids_b, read.ids_B)))
            duplicates = Duplicates.mask
        pairs = PairOptions(options.name, candidates=CandidateSet.negatives, duplicates=duplicates)
        related = relations(batch, pairs)
        both = {"x": related.rows, "y": related.columns}
        anchors = {side: both[side] for side in SIDES[options.directions]}
        epoch = memory.samples_seen // (options.samples_per_epoch or memory.num_samples)
        training = objective.training and torch.is_grad_enabled()
        return StateBatch(batch, related.exclusion, anchors, read, complete, memory, options, epoch, training)

    @property
    def own(self) -> slice:
        """The slice of the global batch that holds this rank's pairs."""
        return self.batch.rows.own

    def old(self, name: str) -> Numbers:
        """Return the stored entry `name` (such as "log_u") of the batch's samples before this step: side → (B,)."""
        return {side: self.read.old[f"{name}_{side}"] for side in self.anchors}

    def summed(
        self, batch: GatheredBatch, scale: Tensor | Scales, own_logits: Callable[[], Numbers], **weights: Tensor | None
    ) -> tuple[StateBatch, Numbers, dict[str, UpdatedMeans]]:
        """Sum over negatives; return this batch with the old state of its samples, log ĝ_i, and the updated means.

        log ĝ_i, of this rank's anchors i: the log of the mean of e^(d_ij/τ) over the negatives j of anchor i, side →
        (b,), −inf for an anchor without negatives. d_ij: the score of j minus that of the positive. batch: the
        embeddings. scale, weights: as in log_partition. own_logits(): the logits of the pairs (x_i, y_i), for anchors x
        and for anchors y, side → (b,). One collective brings the column sums, and what each rank needs to know of the
        samples of others. Every rank must call it.
        """
        read, dtype = self.read, torch.promote_types(batch.x_bD.dtype, torch.float32)
        counts = {side: anchors.counts.clamp(min=1).to(dtype).log() for side, anchors in self.anchors.items()}

        def shares(rows_b: Tensor) -> Tensor:
            of_pairs = own_logits()
            if "x" in counts:
                of_pairs["x"] = rows_b - of_pairs["x"] - counts["x"]
            own = self.batch.rows.placed(torch.stack([of_pairs[side] for side in counts]))
            return own if self.complete else torch.cat([own, torch.stack([*read.old.values()])])

        inputs = batch.x_bD, batch.y_MD, scale, batch.columns, self.exclusion
        rows_b, columns_M, numbers = log_partition(*inputs, **weights, shares=shares)
        of_pairs, old_kB = numbers.split([len(counts), len(numbers) - len(counts)])
        state = self if self.complete else replace(self, read=read.with_old(old_kB))
        logits, sums = own_logits(), {"x": rows_b, "y": columns_M[self.own]}
        log_g = {side: sums[side] - logits[side] - counts[side][a.own] for side, a in self.anchors.items()}
        every = dict(zip(counts, of_pairs.unbind(), strict=True))
        if "y" in every:
            every["y"] = columns_M.detach() - every["y"] - counts["y"]
        return state, log_g, state.updated_means(every)

    def updated_means(self, log_g: Numbers) -> dict[str, UpdatedMeans]:
        """Return log ĝ and the new running means log u of all samples of the global batch, by side.

        log_g: log ĝ (the log of the batch's mean exponential) of all anchors, side → (B,). A sample in its first batch
        takes log ĝ as log u.
        """
        gamma = self.options.gamma_at(self.epoch)
        log_keep, log_take = (math.log(share) if share else -math.inf for share in (1 - gamma, gamma))
        found = {}
        for side, old_B in self.old("log_u").items():
            log_g_B = self.read.log_mean(log_g[side])
            mixed_B = torch.logaddexp(old_B + log_keep, log_g_B + log_take)
            new_B = torch.where(old_B.isnan(), log_g_B, mixed_B)
            found[side] = UpdatedMeans(log_g_B, torch.where(log_g_B == -math.inf, old_B, new_B))
        return found

    def mean(self, of_anchors: Numbers) -> Tensor:
        """Return this rank's share of the loss, 0-d, from the losses of this rank's anchors: side → (b,).

        The mean of the shares over ranks is the mean over all anchors with negatives of each side, summed or averaged
        over the sides by options.directions.
        """
        valid = {side: anchors.valid[anchors.own] for side, anchors in self.anchors.items()}
        terms = [self.share(side) * torch.where(valid[side], of_anchors[side], 0.0).sum() for side in valid]
        return torch.stack(terms).sum()

    def share(self, side: str) -> Tensor:
        """Return the factor, 0-d, from the sum of losses of this rank's anchors of `side` to its share of the loss."""
        return self.anchors[side].share * (0.5 if self.options.directions is Directions.mean else 1.0)

    def result(self, loss: Tensor, updated: dict[str, UpdatedMeans], new: Numbers, **more: Tensor) -> ObjectiveResult:
        """Store the new log u and the entries of `new` if the step is training; return the loss with its metrics.

        loss: this rank's share. updated: log ĝ and the new running means log u, by side. new: further per-sample
        parameters to store, (B,) by "<name>_<side>". more: further metrics, 0-d. The metric staleness is the mean
        |log u − log ĝ| over the anchors of the batch that have negatives.
        """
        if self.training:
            self.memory.write(self.read, {f"log_u_{side}": m.log_u_B for side, m in updated.items()} | new)
        counted = torch.cat([m.has_negatives_B for m in updated.values()])
        off = torch.where(counted, torch.cat([m.log_u_B - m.log_g_B for m in updated.values()]), 0.0).abs()
        stale, gamma = off.sum() / counted.sum().clamp(min=1), self.options.gamma_at(self.epoch)
        health = {"staleness": stale, "share_never_visited": self.memory.share_never_visited.to(stale)}
        health["gamma"] = torch.full_like(stale, gamma)
        return ObjectiveResult(loss, {**score_means(self.batch), **health, **more})


@dataclass(frozen=True)
class UpdatedMeans:
    """Two estimates for each sample of a batch, (B,) each: log ĝ of this batch, and the new running mean log u.

    log ĝ is averaged over repeated samples. A sample without negatives has log ĝ = −inf and keeps its old log u.
    """

    log_g_B: Tensor
    log_u_B: Tensor

    @property
    def has_negatives_B(self) -> Tensor:
        """Whether each sample of the global batch has negatives in the batch, (B,) bool."""
        return self.log_g_B > -math.inf

    def log_u(self, own: slice) -> Tensor:
        """Return log u of the samples in the slice `own` of the batch, (b,); 0 for samples without negatives."""
        return torch.where(self.has_negatives_B, self.log_u_B, 0.0)[own]


def zero_with_gradient(log_g_b: Tensor, log_u_b: Tensor) -> Tensor:
    """Return zeros, (b,), with gradient ∇ĝ_i / u_i: the estimate of ∇ log g_i for the mean g_i over the whole data set.

    Computed as e^(log ĝ_i − log u_i) minus the same value, detached. log_g_b: log ĝ_i, with ĝ_i the mean over the
    batch, not detached. log_u_b: log u_i, with u_i the running mean of ĝ_i.
    """
    weight_b = (log_g_b - log_u_b).exp()
    return weight_b - weight_b.detach()


class SogCLR(TemperatureObjective):
    """SogCLR: L = mean_i τ log u_i in each direction, with a fixed τ (Yuan et al. 2022, arXiv:2202.12387, alg. 1).

    u_i is the running mean of e^(d_ij/τ) over the negatives of anchor i; symbols as in the module docstring.
    """

    gathers_ids = True

    def __init__(self, options: EstimatorOptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        scale = self.scale(batch.x_bD)
        in_g = self.in_g(scale)
        state = StateBatch.of(self, batch, complete=False)
        state, log_g, updated = state.summed(batch, in_g, lambda: dict.fromkeys("xy", in_g * batch.pair_scores()))
        log_u = {side: m.log_u(state.own) for side, m in updated.items()}
        terms = {
            side: self.of_anchors(log_u[side], zero_with_gradient(g, log_u[side]), 1 / scale)
            for side, g in log_g.items()
        }
        return state.result(state.mean(terms), updated, {})

    def of_anchors(self, log_u_b: Tensor, zero_b: Tensor, tau: Tensor) -> Tensor:
        """Return each anchor's loss, (b,), from log u. zero_b: zeros with the gradient estimated for log u; tau: τ."""
        return tau * (log_u_b + zero_b)

    def in_g(self, scale: Tensor) -> Tensor:
        """Return the factor of the scores in ĝ, the batch mean of e^(d_ij/τ): scale = 1/τ.

        FastClipV0 returns the same value with twice the gradient if options.temperature_gradient=fastclip.
        """
        return scale


class FastClipV0(SogCLR):
    """FastCLIP-v0: L = mean_i log u_i in each direction, with a learning τ (Wei et al. 2024, arXiv:2407.01445, sec. 4).

    ∂L/∂τ = −mean_i Ê_j[e^(d_ij/τ) d_ij] / (τ² u_i), where Ê_j is the mean over the negatives j of anchor i in the
    batch. The authors' code counts the part of the gradient that goes through ĝ twice; temperature_gradient=fastclip
    reproduces this. Symbols as in the module docstring.
    """

    def of_anchors(self, log_u_b: Tensor, zero_b: Tensor, tau: Tensor) -> Tensor:
        return log_u_b + zero_b

    def in_g(self, scale: Tensor) -> Tensor:
        twice = self.options.temperature_gradient is TemperatureGradient.fastclip
        return scale + (scale - scale.detach()) if twice else scale


class FastClipV3(FastClipV0):
    """FastCLIP-v3: L = mean_i τ log u_i + ρτ in each direction, with a learning τ (Wei et al. 2024, sec. 4).

    ∂L/∂τ = mean_i [log u_i + ρ − Ê_j[e^(d_ij/τ) d_ij] / (τ u_i)] in each direction, where Ê_j is the mean over the
    negatives j of anchor i in the batch; the last term is the gradient through ĝ. ρ: options.rho, the radius of the KL
    ball.
    """

    def of_anchors(self, log_u_b: Tensor, zero_b: Tensor, tau: Tensor) -> Tensor:
        return kl_robust(log_u_b, zero_b, tau, self.options.rho)


def kl_robust(log_u_b: Tensor, zero_b: Tensor, tau: Tensor, rho: float) -> Tensor:
    """Return τ log u_i + ρτ of each anchor, (b,): the dual of a loss that is robust over a KL ball of radius ρ.

    log_u_b: log of the running means u_i. zero_b: zeros with the estimator's gradient (zero_with_gradient). tau: (b,),
    or 0-d for all anchors.
    """
    return tau * log_u_b + tau.detach() * zero_b + rho * tau


class Leaves:
    """Copies of embeddings and per-sample parameters, from which forward computes a loss and differentiates it at once.

    iSogCLR and NUCLR update per-sample parameters (τ_i, ζ_i) in forward and need their gradients there. The pass over
    the scores that computes these gradients also computes those of the embeddings, stored for the caller's backward.
    """

    def __init__(self, batch: GatheredBatch, numbers: Numbers) -> None:
        """Copy the embeddings of `batch` and the per-sample parameters `numbers` (side → (B,)) as detached leaves."""
        self._outer = batch
        x_bD, y_MD = (e.detach().requires_grad_() for e in (batch.x_bD, batch.y_MD))
        self.batch = replace(batch, x_bD=x_bD, y_MD=y_MD)
        self.numbers = {side: values_B.detach().requires_grad_() for side, values_B in numbers.items()}

    def differentiated(self, loss: Tensor) -> tuple[Tensor, Numbers]:
        """Return the loss, connected to the caller's embeddings, and its gradient in the per-sample parameters.

        The gradient is side → (B,), summed over ranks. loss: this rank's share, computed from the leaves (the copies of
        embeddings and parameters). Every rank must call it.
        """
        rows, inner = self._outer.rows, (self.batch.x_bD, self.batch.y_MD)
        # the gradient of a mean could underflow in float16, so that of the sum over anchors is taken and divided after
        gradients = torch.autograd.grad(loss * rows.total, [*inner, *self.numbers.values()])
        of_embeddings = [de.to(loss.dtype) / rows.total for de in gradients[:2]]
        summed = rows.sum_(torch.stack(gradients[2:]) / rows.total)
        loss = with_gradients(loss, (self._outer.x_bD, self._outer.y_MD), of_embeddings)
        return loss, dict(zip(self.numbers, summed.unbind(), strict=True))


def momentum_step(
    state: StateBatch,
    name: str,
    updated: dict[str, UpdatedMeans],
    gradients: Numbers,
    lr: float,
    momentum: float,
    clip: float = math.inf,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Numbers, Numbers]:
    """Take one step of gradient descent with momentum on the parameter `name` (tau or zeta) of the batch's samples.

    Each sample has its own parameter, stored in `state`. updated: log ĝ and log u by side; a sample without negatives
    (log ĝ = −inf) keeps its parameter. gradients: ∂loss/∂parameter of each sample, side → (B,). lr: learning rate.
    momentum: weight of the old running mean gradient, which starts with a sample's first gradient. clip: the largest
    absolute gradient. bounds: the range of the parameter. Returns (1) parameters and running mean gradients after the
    step, (B,) by name and side; (2) metrics: the QUANTILES of the parameter over the batch's anchors, 0-d each.
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

    ∂τ_i = log u_i + ρ − Ê_j[e^(d_ij/τ_i) d_ij] / (τ_i u_i), where Ê_j is the mean over the negatives j in the batch and
    ρ is options.rho. Where u_i = ĝ_i this equals ρ − KL(π_i | uniform), with π_i the softmax over these negatives.
    After each batch with the sample, the running mean of this gradient moves τ_i; the loss is computed with the old τ_i
    (arXiv:2305.11965). Symbols as in the module docstring.
    """

    gathers_ids = True

    def __init__(self, options: ISogCLROptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options, tau=options.temperature, tau_velocity=math.nan)

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
            terms = {}
            for side, g in log_g.items():
                log_u_b, tau_b = updated[side].log_u(own), leaves.numbers[side][own]
                terms[side] = kl_robust(log_u_b, zero_with_gradient(g, log_u_b), tau_b, options.rho)
            loss, gradients = leaves.differentiated(state.mean(terms))
        bounds = options.min_temperature, options.max_temperature
        step = options.tau_lr, options.tau_momentum, options.tau_clip, bounds
        new, metrics = momentum_step(state, "tau", updated, gradients, *step)
        return state.result(loss, updated, new, **metrics)


class Nuclr(TemperatureObjective):
    """NUCLR: candidate j has weight e^(ζ_j/τ), with a learned ζ_j for every sample (Wang et al. 2024).

    arXiv:2410.09156. In each direction L = mean_i τ log Σ_j e^((d_ij + ζ_j)/τ) − mean_j ζ_j, where i and j run over all
    n samples and the own pair is a candidate. The term of anchor i is τ log((n−1) D_i) − ζ_i with D_i = u_i +
    e^(ζ_i/τ)/(n−1), where u_i is the running mean of the batch mean Ê_j e^((d_ij + ζ_j)/τ) over negatives (alg. 1).

    n ∂L/∂ζ_j = Σ_i e^((d_ij + ζ_j)/τ) / (m_i D_i) + e^(ζ_j/τ) / ((n−1) D_j) − 1. It is 0 if the weights that all
    anchors give to candidate j sum to 1. After each batch with sample j the running mean of this gradient moves ζ_j,
    from epoch zeta_warmup on. Symbols as in the module docstring.
    """

    gathers_ids = True

    def __init__(self, options: NuclrOptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options, zeta=0.0, zeta_velocity=math.nan)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        options, state, scale = self.options, StateBatch.of(self, batch), self.scale(batch.x_bD)
        own, log_others = state.own, math.log(state.memory.num_samples - 1)
        with torch.enable_grad():
            leaves = Leaves(batch, state.old("zeta"))
            weights = {side: scale * zeta_B for side, zeta_B in leaves.numbers.items()}
            given = {"row_weights_B": weights.get("y"), "column_weights_M": weights.get("x")}

            def own_logits() -> Numbers:
                return dict.fromkeys("xy", scale * leaves.batch.pair_scores())

            state, log_g, updated = state.summed(leaves.batch, scale, own_logits, **given)
            terms = {}
            for side, g in log_g.items():
                log_d_b = torch.logaddexp(updated[side].log_u(own), weights[side][own] - log_others)
                zero_b = zero_with_gradient(g, log_d_b.detach())
                terms[side] = (log_others + log_d_b + zero_b) / scale - leaves.numbers[side][own]
            loss, gradients = leaves.differentiated(state.mean(terms))
        lr = options.zeta_lr if state.epoch >= options.zeta_warmup else 0.0
        new, metrics = momentum_step(state, "zeta", updated, gradients, lr, options.zeta_momentum)
        return state.result(loss, updated, new, **metrics)

"""Estimators of the contrastive loss over the whole data set from small batches, with state for every sample.

Legend: n samples, b pairs (x_i, y_i) on this rank, B on all ranks; τ temperature, d_ij = s_ij − s_ii; C_i the
negatives of anchor i in the batch, m_i = |C_i|.

The loss wants g_i = mean_j e^(d_ij/τ) over the data set. A batch has ĝ_i = mean_{j∈C_i} e^(d_ij/τ), and log ĝ_i is too
small in the mean (Jensen), by more the smaller the batch. So each sample keeps a running mean, u_i ← (1−γ) u_i + γ ĝ_i,
and the gradient of log g_i is estimated by ∇ĝ_i / u_i (Wang & Yang 2022, arXiv:2202.12396). All in logs: no overflow,
and no ε. With γ = 1 and the whole data as batch, everything is exact.

Losses have the value that u gives and the gradient of the estimator: `pull` is 0, with gradient ∇ĝ_i / u_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.errors import ConfigError
from train.losses.base import Objective, Result, TemperatureObjective
from train.losses.candidates import Anchors, Relations, relations
from train.losses.functions import with_gradients
from train.losses.memory import SampleState, Visit
from train.losses.options.common import Candidates, Directions, Duplicates, PairOptions
from train.losses.options.estimators import EstimatorOptions, ISogCLROptions, NuclrOptions, TemperatureGradient
from train.losses.pairwise import Scales, log_partition
from train.losses.softmax import score_means
from train.losses.strip import Strip

SIDES = {Directions.sum: "xy", Directions.mean: "xy", Directions.x: "x", Directions.y: "y"}  # whose anchors count
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
Numbers = dict[str, Tensor]  # by side or by name


def sample_state(options: EstimatorOptions, **initial: float) -> SampleState:
    """log u and `initial` for the anchors of each side that counts: "log_u_x" and so on."""
    if options.num_samples is None:
        raise ConfigError(
            f"objective={options.name} keeps state for every sample: say how many there are, objective.num_samples"
        )
    numbers = {"log_u": math.nan, **initial}
    names = {f"{name}_{side}": value for side in SIDES[options.directions] for name, value in numbers.items()}
    return SampleState(options.num_samples, names, options.memory_budget_mb)


@dataclass(frozen=True)
class Batch:
    """The pairs of one step, how they are related, and the samples' numbers before it."""

    strip: Strip
    related: Relations
    visit: Visit
    memory: SampleState
    options: EstimatorOptions
    epoch: int

    @staticmethod
    def of(objective: Objective, strip: Strip) -> Batch:
        """A collective. A sample is no negative of itself: where one is there twice, ids are compared."""
        options, memory = objective.options, objective.memory
        assert memory is not None
        visit = memory.read(strip.sample_ids_b, strip.rows, torch.promote_types(strip.x_bD.dtype, torch.float32))
        duplicates = options.duplicates
        if visit.repeated and strip.sample_ids_b is not None:
            strip = replace(strip, keys=(*strip.keys, (strip.sample_ids_b, visit.ids_B)))
            duplicates = Duplicates.mask
        pairs = PairOptions(options.name, candidates=Candidates.negatives, duplicates=duplicates)
        epoch = memory.samples_seen // (options.samples_per_epoch or memory.num_samples)
        return Batch(strip, relations(strip, pairs), visit, memory, options, epoch)

    @property
    def sides(self) -> str:
        return SIDES[self.options.directions]

    @property
    def own(self) -> slice:
        """The pairs of this rank among all B."""
        return self.strip.rows.own

    def old(self, name: str) -> Numbers:
        """(B,) numbers before this step, by side."""
        return {side: self.visit.old[f"{name}_{side}"] for side in self.sides}

    def log_g(self, rows_b: Tensor, columns_M: Tensor, a_x_b: Tensor, a_y_b: Tensor) -> Numbers:
        """log ĝ_i of own anchors, (b,), from the sums over negatives and the logits of own pairs; −inf without any."""
        sums = {"x": rows_b - a_x_b, "y": columns_M[self.own] - a_y_b}
        counts = {side: self._anchors(side).counts[self._anchors(side).own] for side in self.sides}
        return {side: sums[side] - counts[side].clamp(min=1).to(a_x_b).log() for side in self.sides}

    def moved(self, log_g: Numbers) -> dict[str, Moved]:
        """The running means after this step, of all samples of the batch. A collective."""
        gamma = self.options.gamma_at(self.epoch)
        log_keep, log_take = (math.log(share) if share else -math.inf for share in (1 - gamma, gamma))
        gathered = self.strip.rows.gather(torch.stack(list(log_g.values()), 1).detach())
        found = {}
        for (side, old_B), column_B in zip(self.old("log_u").items(), gathered.unbind(1), strict=True):
            log_g_B = self.visit.log_mean(column_B)
            mixed_B = torch.logaddexp(old_B + log_keep, log_g_B + log_take)
            new_B = torch.where(old_B.isnan(), log_g_B, mixed_B)
            found[side] = Moved(log_g_B, torch.where(log_g_B == -math.inf, old_B, new_B))
        return found

    def mean(self, of_anchors: Numbers) -> Tensor:
        """Means over anchors (b,) of the sides, summed or averaged: its mean over ranks is that of the batch."""
        valid = {side: self._anchors(side).valid[self._anchors(side).own] for side in self.sides}
        terms = [self.share(side) * torch.where(valid[side], of_anchors[side], 0.0).sum() for side in self.sides]
        return torch.stack(terms).sum()

    def share(self, side: str) -> Tensor:
        """What this rank's sum over anchors is multiplied by."""
        return self._anchors(side).share * (0.5 if self.options.directions is Directions.mean else 1.0)

    def result(self, loss: Tensor, moved: dict[str, Moved], **more: Tensor) -> Result:
        """staleness: mean |log u − log ĝ| over the anchors of the batch."""
        off = torch.cat([(m.log_u_B - m.log_g_B)[m.counts_B] for m in moved.values()]).abs()
        health = {
            "staleness": off.sum() / max(len(off), 1),
            "share_never_visited": off.new_tensor(self.memory.share_never_visited),
            "gamma": off.new_tensor(self.options.gamma_at(self.epoch)),
        }
        return Result(loss, {**score_means(self.strip), **health, **more})

    def _anchors(self, side: str) -> Anchors:
        return self.related.rows if side == "x" else self.related.columns


@dataclass(frozen=True)
class Moved:
    """log ĝ, averaged over equal samples, −inf for those without negatives; and the new log u, for those the old: (B,).

    counts_B: whether a sample has negatives.
    """

    log_g_B: Tensor
    log_u_B: Tensor

    @property
    def counts_B(self) -> Tensor:
        return self.log_g_B > -math.inf

    def log_u(self, own: slice) -> Tensor:
        """Of own anchors, 0 for those that do not count."""
        return torch.where(self.counts_B, self.log_u_B, 0.0)[own]


def log_u_of(moved: dict[str, Moved]) -> Numbers:
    return {f"log_u_{side}": m.log_u_B for side, m in moved.items()}


def pull(log_g_b: Tensor, log_u_b: Tensor) -> Tensor:
    """0, with gradient ∇ĝ_i / u_i."""
    weight_b = (log_g_b - log_u_b).exp()
    return weight_b - weight_b.detach()


class SogCLR(TemperatureObjective):
    """SogCLR: L = mean_i τ log u_i in each direction, τ given (Yuan et al. 2022, arXiv:2202.12387, alg. 1)."""

    def __init__(self, options: EstimatorOptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options)

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        batch, scale = Batch.of(self, strip), self.scale(strip.x_bD)
        in_g = self.in_g(scale)
        rows_b, columns_M = log_partition(strip.x_bD, strip.y_MD, in_g, strip.columns, batch.related.exclusion)
        a_b = in_g * strip.pair_scores()
        log_g = batch.log_g(rows_b, columns_M, a_b, a_b)
        moved = batch.moved(log_g)
        log_u = {side: m.log_u(batch.own) for side, m in moved.items()}
        terms = {side: self.of_anchors(log_u[side], pull(g, log_u[side]), 1 / scale) for side, g in log_g.items()}
        if self.training and torch.is_grad_enabled():
            batch.memory.write(batch.visit, log_u_of(moved))
        return batch.result(batch.mean(terms), moved)

    def of_anchors(self, log_u_b: Tensor, pull_b: Tensor, tau: Tensor) -> Tensor:
        return tau * (log_u_b + pull_b)

    def in_g(self, scale: Tensor) -> Tensor:
        """1/τ as it is in ĝ."""
        return scale


class FastClipV0(SogCLR):
    """FastCLIP-v0: L = mean_i log u_i in each direction, τ learns (Wei et al. 2024, arXiv:2407.01445, sec. 4).

    ∂L/∂τ = −mean_i Ê_j[e^(d_ij/τ) d_ij] / (τ² u_i). The authors' code has this part, through ĝ, twice.
    """

    def of_anchors(self, log_u_b: Tensor, pull_b: Tensor, tau: Tensor) -> Tensor:
        return log_u_b + pull_b

    def in_g(self, scale: Tensor) -> Tensor:
        twice = self.options.temperature_gradient is TemperatureGradient.fastclip
        return scale + (scale - scale.detach()) if twice else scale


class FastClipV3(FastClipV0):
    """FastCLIP-v3: L = mean_i τ log u_i + ρτ in each direction, τ learns (Wei et al. 2024, sec. 4).

    ∂L/∂τ = mean_i [log u_i + ρ − Ê_j[e^(d_ij/τ) d_ij] / (τ u_i)] in each direction; the last part is that through ĝ.
    """

    def of_anchors(self, log_u_b: Tensor, pull_b: Tensor, tau: Tensor) -> Tensor:
        return robust(log_u_b, pull_b, tau, self.options.rho)


def robust(log_u_b: Tensor, pull_b: Tensor, tau: Tensor, rho: float) -> Tensor:
    """τ log u_i + ρτ, the dual of robustness over a KL ball of radius ρ; τ of its own for each anchor, or one."""
    return tau * log_u_b + tau.detach() * pull_b + rho * tau


class Leaves:
    """Embeddings and numbers of samples as the leaves of a graph that is done with before the caller's backward.

    An objective that moves numbers of samples itself needs their gradients at once; the pass over the scores that
    finds them finds those of the embeddings too, and they are kept for the backward that follows.
    """

    def __init__(self, strip: Strip, numbers: Numbers) -> None:
        """numbers: (B,) by side."""
        self._outer = strip
        x_bD, y_MD = (e.detach().requires_grad_() for e in (strip.x_bD, strip.y_MD))
        self.strip = replace(strip, x_bD=x_bD, y_MD=y_MD)
        self.numbers = {side: values_B.detach().requires_grad_() for side, values_B in numbers.items()}

    def differentiated(self, loss: Tensor) -> tuple[Tensor, Numbers]:
        """The loss, with its gradient, as a function of the caller's embeddings; and of the numbers of all ranks."""
        rows, inner = self._outer.rows, (self.strip.x_bD, self.strip.y_MD)
        # Of the sum over anchors: float16, if the embeddings are, would lose what belongs to a mean
        gradients = torch.autograd.grad(loss * rows.total, [*inner, *self.numbers.values()])
        of_embeddings = [de.to(loss.dtype) / rows.total for de in gradients[:2]]
        summed = rows.sum_(torch.stack(gradients[2:]) / rows.total)
        loss = with_gradients(loss, (self._outer.x_bD, self._outer.y_MD), of_embeddings)
        return loss, dict(zip(self.numbers, summed.unbind(), strict=True))


@dataclass(frozen=True)
class Descent:
    """Steps down along a running mean of clipped gradients, of which the first is the first mean; within bounds."""

    lr: float
    momentum: float
    clip: float = math.inf
    least: float = -math.inf
    most: float = math.inf

    def __call__(self, name: str, batch: Batch, moved: dict[str, Moved], gradients: Numbers) -> Numbers:
        """The numbers `name` of the samples and their velocities after this step, by name and side."""
        new = {}
        for side, m in moved.items():
            old_B, velocity_B = (batch.old(which)[side] for which in (name, f"{name}_velocity"))
            gradient_B = batch.visit.mean(gradients[side] / batch.share(side)).clamp(-self.clip, self.clip)
            mixed_B = self.momentum * velocity_B + (1 - self.momentum) * gradient_B
            mixed_B = torch.where(velocity_B.isnan(), gradient_B, mixed_B)
            new_B = (old_B - self.lr * mixed_B).clamp(self.least, self.most)
            new[f"{name}_{side}"] = torch.where(m.counts_B, new_B, old_B)
            new[f"{name}_velocity_{side}"] = torch.where(m.counts_B, mixed_B, velocity_B)
        return new


def quantiles(name: str, sides: str, new: Numbers) -> Numbers:
    """Of the numbers `name` after this step, over the anchors of the batch."""
    values = torch.cat([new[f"{name}_{side}"] for side in sides])
    found = torch.quantile(values, values.new_tensor(list(QUANTILES.values())))
    return {f"{name}_{label}": value for label, value in zip(QUANTILES, found.unbind(), strict=True)}


class ISogCLR(Objective):
    """iSogCLR: L = mean_i τ_i log u_i + ρ τ_i, with a τ_i of each sample in each direction (Qiu et al. 2023, alg. 1).

    ∂τ_i = log u_i + ρ − Ê_j[e^(d_ij/τ_i) d_ij] / (τ_i u_i), which is ρ − KL(π_i | uniform) where u_i = ĝ_i. Averaged
    over time it moves τ_i after each visit; the loss is that of the τ_i before (arXiv:2305.11965).
    """

    def __init__(self, options: ISogCLROptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options, tau=options.temperature, tau_velocity=math.nan)
        self._descent = Descent(
            options.tau_lr, options.tau_momentum, options.tau_clip, options.min_temperature, options.max_temperature
        )

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        options, batch = self.options, Batch.of(self, strip)
        old, own = batch.old("tau"), batch.own
        training = self.training and torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = Leaves(strip, old)
            unused = torch.full_like(next(iter(old.values())), options.temperature)  # of a side that has no anchors
            tau_x_b, tau_y_B = leaves.numbers.get("x", unused)[own], leaves.numbers.get("y", unused)
            x_bD, y_MD, scales = leaves.strip.x_bD, leaves.strip.y_MD, Scales(1 / tau_x_b, 1 / tau_y_B)
            rows_b, columns_M = log_partition(x_bD, y_MD, scales, strip.columns, batch.related.exclusion)
            s_b = leaves.strip.pair_scores()
            log_g = batch.log_g(rows_b, columns_M, s_b / tau_x_b, s_b / tau_y_B[own])
            moved = batch.moved(log_g)
            terms = {}
            for side, g in log_g.items():
                log_u_b, tau_b = moved[side].log_u(own), leaves.numbers[side][own]
                terms[side] = robust(log_u_b, pull(g, log_u_b), tau_b, options.rho)
            loss, gradients = leaves.differentiated(batch.mean(terms))
        new = log_u_of(moved) | self._descent("tau", batch, moved, gradients)
        if training:
            batch.memory.write(batch.visit, new)
        return batch.result(loss, moved, **quantiles("tau", batch.sides, new))


class Nuclr(TemperatureObjective):
    """NUCLR: candidates weigh e^(ζ_j/τ), and ζ_j is learned for every sample (Wang et al. 2024, arXiv:2410.09156).

    L = mean_i τ log Σ_j e^((d_ij + ζ_j)/τ) − mean_j ζ_j over the data set, own pair included, in each direction:
    τ log((n−1) D_i) − ζ_i with D_i = u_i + e^(ζ_i/τ)/(n−1), u_i the running mean of Ê_j e^((d_ij + ζ_j)/τ) (alg. 1).
    n ∂ζ_j = Σ_i e^((d_ij + ζ_j)/τ) / (m_i D_i) + e^(ζ_j/τ) / ((n−1) D_j) − 1 is 0 where each candidate gets as much
    as one anchor gives. Averaged over time it moves ζ_j after each visit, from epoch zeta_warmup on.
    """

    def __init__(self, options: NuclrOptions) -> None:
        super().__init__(options)
        self.memory = sample_state(options, zeta=0.0, zeta_velocity=math.nan)

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        options, batch, scale = self.options, Batch.of(self, strip), self.scale(strip.x_bD)
        own = batch.own
        log_others = math.log(batch.memory.num_samples - 1)
        training = self.training and torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = Leaves(strip, batch.old("zeta"))
            weights = {side: scale * zeta_B for side, zeta_B in leaves.numbers.items()}
            rows_b, columns_M = log_partition(
                leaves.strip.x_bD,
                leaves.strip.y_MD,
                scale,
                strip.columns,
                batch.related.exclusion,
                row_weights_b=weights["y"][own] if "y" in weights else None,
                column_weights_M=weights.get("x"),
            )
            a_b = scale * leaves.strip.pair_scores()
            log_g = batch.log_g(rows_b, columns_M, a_b, a_b)
            moved = batch.moved(log_g)
            terms = {}
            for side, g in log_g.items():
                log_d_b = torch.logaddexp(moved[side].log_u(own), weights[side][own] - log_others)
                pull_b = pull(g, log_d_b.detach())
                terms[side] = (log_others + log_d_b + pull_b) / scale - leaves.numbers[side][own]
            loss, gradients = leaves.differentiated(batch.mean(terms))
        lr = options.zeta_lr if batch.epoch >= options.zeta_warmup else 0.0
        new = log_u_of(moved) | Descent(lr, options.zeta_momentum)("zeta", batch, moved, gradients)
        if training:
            batch.memory.write(batch.visit, new)
        return batch.result(loss, moved, **quantiles("zeta", batch.sides, new))

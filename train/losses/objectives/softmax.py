"""The softmax family (InfoNCE, CLIP, DPR, SimCLR, symmetric and one-sided DPM): formulas over log-sums of sums/lse.py.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def info_nce(a_BM):  # of each row, whose positive is the column of the same number
    return a_BM.logsumexp(1) - a_BM.diagonal()

def clip(x_BD, y_BD, tau):  # rows of length 1, for a cosine
    a_BB = x_BD @ y_BD.T / tau
    return (info_nce(a_BB) + info_nce(a_BB.T)).mean() / 2

def one_sided_dpm(x_BD, y_BD, tau, log_q_B):
    a_BB = x_BD @ y_BD.T / tau
    return tau * ((a_BB - log_q_B).logsumexp(1) - a_BB.diagonal()).mean()

def simclr(x_BD, y_BD, tau):
    z_MD = torch.cat([x_BD, y_BD])  # M = 2B views
    a_MM = (z_MD @ z_MD.T / tau).fill_diagonal_(-math.inf)
    return info_nce(a_MM.roll(len(x_BD), 1)).mean()
```

Legend: b pairs (x_i, y_i) on this rank, B on all W ranks, M ≥ B columns, D width; τ temperature, s_ij = <x_i, y_j>
scores, logits a_ij = s_ij/τ; an anchor is a row or column whose positives are to be found; C_i the candidates of anchor
i (the columns in its sum), m_i = |C_i|, P_i its positives, p one of them, P without index the number of listed positive
pairs; d_ij = s_ij − s_ip; LSE = log-sum-exp.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.batch import GatheredBatch, Index, at
from dyad.train.losses.gathered.candidates import Anchors, Relations, one_positive_per_sum, relations, without_positives
from dyad.train.losses.gathered.importance import open_number_file
from dyad.train.losses.objectives.base import ObjectiveResult, TemperatureObjective, score_means, shapes
from dyad.train.losses.options.choices import Directions, Importance, Partition, Positives, Views
from dyad.train.losses.options.softmax import OneSidedDPMOptions, SimCLROptions, SoftmaxOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import known_sizes
from dyad.train.losses.sums.functions import weighted
from dyad.train.losses.sums.lse import log_partition
from dyad.train.losses.sums.row_losses import row_losses
from dyad.train.losses.sums.tiles import Exclusion

DIRECTIONS: dict[Directions, Callable[[Tensor, Tensor], Tensor]] = {
    Directions.sum: lambda row, column: row + column,
    Directions.mean: lambda row, column: (row + column) / 2,
    Directions.x: lambda row, column: row,
    Directions.y: lambda row, column: column,
}


def symmetric_dpm(
    row: Tensor,
    column: Tensor,
    scale: Tensor,
    options: SoftmaxOptions,
    relevance: tuple[Tensor | float, Tensor | float] = (1.0, 1.0),
) -> Tensor:
    """Combine the losses of both directions to that of symmetric discriminative probabilistic modelling (DPM), 0-d.

    L = mean_i f_i^row + mean_j f_j^column, where f_i is the loss of anchor i as in core_terms. The model is p(y|x) ∝
    p(y) exp(s(x, y)/τ) in both directions, with the batch as a sample of p (Wang et al. 2024, arXiv:2410.09156). row,
    column: this rank's shares of the means over anchors of f/τ, 0-d. scale: 1/τ. options.directions chooses the sum,
    the mean, or one of them. tau_scaled=false leaves out the factor τ of f. With tau_scaled a radius ρ (options.rho)
    adds ρτ times the mean `relevance` to each direction: the loss is robust over a KL ball (Qiu et al. 2023, eq. 4).

    CLIP is ½ mean_i [−log (e^a_ii / Σ_j e^a_ij) − log (e^a_ii / Σ_j e^a_ji)] = L / (2τ), with logits a = s/τ (Radford
    et al. 2021).
    """
    if options.tau_scaled:
        tau, sides = 1 / scale, zip((row, column), relevance, strict=True)
        row, column = (tau * f + tau * (options.rho or 0.0) * weight for f, weight in sides)
    return DIRECTIONS[options.directions](row, column)


class SoftmaxObjective(TemperatureObjective):
    """An objective of the softmax family, such as CLIP: symmetric_dpm of the means over anchors from core_terms."""

    options: SoftmaxOptions

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        options, scale, weights_M = self.options, self.scale(batch.x_bD), self._log_weights(batch)
        related = relations(batch, options)
        negatives, in_sum_P = without_positives(related, options)
        if options.directions is Directions.x and related.plain and weights_M is None:
            row = column = rows_alone(related, in_sum_P, negatives, scale, options)
        else:
            layout = None if options.directions is Directions.x else batch.columns  # no sums over ranks for rows
            rows_b, columns_M = log_partition(
                batch.x_bD, batch.y_MD, scale, layout, negatives, column_weights_M=weights_M
            )
            if batch.further_rows is not None:
                columns_M = batch.further_rows.joined(columns_M, batch.y_MD, scale, batch.columns)
            row, column = core_terms(related, in_sum_P, (rows_b, columns_M), scale, options, weights_M)
        loss = symmetric_dpm(row, column, scale, options, related.mean_relevance() if options.rho else (1.0, 1.0))
        with torch.no_grad():  # the bound holds without weights only
            bound = mi_bound(related, row, column, options) if weights_M is None else {}
            return ObjectiveResult(loss, {**score_means(batch), **bound})

    def _log_weights(self, batch: GatheredBatch) -> Tensor | None:
        """Return log-weights of all columns, (M,), to add to the logits of the row sums; None for no weights.

        The base class returns None. If options.importance is not none, OneSidedDPM returns −log q (q: the density from
        which candidates are drawn) or ζ/τ (ζ: given for each column). Every rank must call it.
        """


class OneSidedDPM(SoftmaxObjective):
    """One-sided DPM: a model of p(y|x) whose candidates y_j were drawn with probability ∝ q_j and so have weight 1/q_j.

    f_i = τ LSE_{j∈C_i}(d_ij/τ + ω_j), with log-weights ω_j = −log q_j or ζ_j/τ (Wang et al. 2024, arXiv:2410.09156, eq.
    4). The score of the positive that is subtracted in d_ij has no weight. With options.importance=log_q or zeta, the
    argument `importance` of forward, (m,) of this rank's y, or else options.importance_file gives log q or ζ. forward
    raises ConfigError without either, and for further columns without a file by content key.
    """

    def __init__(self, options: OneSidedDPMOptions) -> None:
        super().__init__(options)
        self._importance = options.importance
        self.table = open_number_file(options, options.importance)

    def _log_weights(self, batch: GatheredBatch) -> Tensor | None:
        importance, given_m, scale = self._importance, batch.importance_m, self.scale(batch.x_bD)
        if importance is Importance.none:
            if given_m is not None:
                raise ConfigError("objective.importance=none: set it to log_q or zeta, or give no importance")
            return None
        if given_m is not None:
            if len(batch.y_MD) != batch.columns.total:
                raise ConfigError(f"objective.importance={importance}: further columns have no weight")
            own = batch.columns.sizes[batch.columns.rank]
            if given_m.shape != (own,):
                raise ConfigError(f"objective.importance: {shapes(given_m)} values for {own} columns of this rank")
            values_M = batch.columns.gather(given_m.to(scale.dtype))
            if not values_M.isfinite().all():
                raise ValueError(f"importance must be finite, not {float(values_M[~values_M.isfinite()][0])}")
        elif self.table is not None:
            values_M = self.table.of_columns(batch, scale)
        else:
            raise ConfigError(
                f"objective.importance={importance}: give the objective importance=(m,) values of own columns, or set "
                "objective.importance_file"
            )
        return -values_M if importance is Importance.log_q else scale * values_M


class SimCLR(TemperatureObjective):
    """SimCLR (NT-Xent): each of 2N views against all others; its positive is the other view (Chen et al. 2020, eq. 1).

    x and y are two views of N items; or y is None and x (2N, D) holds both, by options.views stacked (all first views,
    then all second ones) or interleaved. All views are anchors and candidates, so row sums give the whole loss.
    """

    options: SimCLROptions

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        if y_mD is None and len(x_bD) % 2:
            raise ValueError(f"two views of each item are an even number of rows, not {len(x_bD)}")
        if y_mD is not None:
            first, second = x_bD, y_mD
        elif self.options.views is Views.interleaved:
            first, second = x_bD[::2], x_bD[1::2]
        else:
            first, second = x_bD.chunk(2)
        if first.shape != second.shape:
            raise ValueError(f"two views must be alike, not {shapes(first, second)}")
        z = torch.cat([first, second])
        if (sizes := known_sizes()) and y_mD is not None:
            layout = Layout(tuple(2 * size for size in sizes.rows.sizes), sizes.rows.rank)
        else:
            (layout,) = Layout.of(z)
        if layout.total == 0:
            raise ValueError("the global batch has no pair")
        of_ranks = torch.arange(layout.total // 2, device=z.device).split([size // 2 for size in layout.sizes])
        item_M = torch.cat([items.repeat(2) for items in of_ranks])
        scale = self.scale(z)
        negatives = Exclusion(((item_M[layout.own], item_M),))  # leaves out the view itself and its partner
        rows_b, _ = log_partition(z, layout.gather(z), scale, layout, negatives)
        partner_b = (first.to(scale.dtype) * second.to(scale.dtype)).sum(1).repeat(2)
        share = layout.share
        relevance = inputs["relevance"]
        terms_b = weighted(softplus(rows_b - scale * partner_b), None if relevance is None else relevance.repeat(2))
        loss = terms_b.sum() * share
        return ObjectiveResult(
            loss / scale if self.options.tau_scaled else loss, {"positive_score": partner_b.sum() * share}
        )


def softplus(a: Tensor) -> Tensor:
    """Return sp(a) = log(1 + e^a), exact in float64 too.

    The default threshold of F.softplus would return `a` itself where the difference e^−a is still 2e-9.
    """
    return F.softplus(a, threshold=40.0)


def rows_alone(
    related: Relations, in_sum_b: Tensor, negatives: Exclusion, scale: Tensor, options: SoftmaxOptions
) -> Tensor:
    """Return this rank's share of the mean over rows of f_i/τ (see core_terms), 0-d, without the sums of columns.

    Each row must have one positive, y_i. in_sum_b: whether y_i is in C_i. negatives: leaves out y_i too. scale: 1/τ.
    """

    def f(log_sum: Tensor, omega: Tensor, log_count: Tensor, weight: Tensor) -> Tensor:
        return weight * (torch.logaddexp(log_sum.where(weight > 0, 0.0), omega) - log_count)

    batch, p_b = related.batch, related.batch.pair_scores()
    if related.complete:
        f_own = partial(_own_positive_losses, len(batch.y_MD), options.partition)
        rows = () if batch.relevance is None else (batch.relevance,)
        return row_losses(f_own, batch.x_bD, batch.y_MD, p_b, scale, negatives, rows=rows)[0] * batch.rows.share
    anchors, _ = related.anchors
    omega_b = torch.zeros_like(p_b).masked_fill(~in_sum_b, -math.inf)
    mean = options.partition is Partition.mean
    log_counts_b = anchors.counts.clamp(min=1).to(p_b).log() if mean else torch.zeros_like(p_b)
    of_rows = omega_b, log_counts_b, weighted(anchors.share * anchors.weights(p_b), batch.relevance)
    return row_losses(f, batch.x_bD, batch.y_MD, p_b, scale, negatives, rows=of_rows)[0]


def core_terms(
    related: Relations,
    in_sum_P: Tensor,
    sums: tuple[Tensor, Tensor],
    scale: Tensor,
    options: SoftmaxOptions,
    weights_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the means over anchors of f_i/τ = LSE_{j∈C_i}(d_ij/τ) − c_i for rows and for columns, 0-d each.

    d_ij = s_ij − s_ip is the score of candidate j minus that of the positive p, and C_i holds the m_i candidates of
    anchor i. c_i is 0 (options.partition=sum) or log m_i (mean). The results are this rank's shares: their means over
    ranks are the means over the anchors of the global batch. s: scores; a = s/τ: logits; P_i: positives of anchor i.

    related: the candidates and positives of the batch. in_sum_P: whether each listed positive is in C_i. sums: N_i =
    LSE a_ij over the candidates that are not listed as positives, for rows (b,) and columns (M,). scale: 1/τ. options:
    see the last paragraph. weights_M: the log-weights ω_j that were added to the logits of the row sums.

    f_i/τ is computed as log(e^(N_i − a_ip) + Σ_{q∈P_i∩C_i} e^(a_iq − a_ip)) − c_i, which keeps all digits near a loss
    of 0. The difference LSE_{C_i} − a_ip would lose them, as both terms are near 1/τ.

    options.positives says what happens with several positives: each (the mean over p ∈ P_i), exclude (the same, with
    the other positives left out of C_i), or merge (LSE over C_i − LSE over P_i). The relevance of a pair (i, p)
    multiplies its term of that mean, in both directions. An anchor without candidates or positive is skipped.
    """
    batch, indices = related.batch, related.batch.positive_indices()
    a_P = scale * batch.pair_scores()
    if related.complete and weights_M is None:
        sides = zip(sums, indices, (len(batch.y_MD), batch.rows.total), strict=True)
        f_b = (_own_positive_losses(n, options.partition, at(N, i) - a_P, batch.relevance) for N, i, n in sides)
        row, column = (f.sum() * batch.rows.share for f in f_b)
        return row, column
    weights_P = torch.zeros_like(a_P) if weights_M is None else weights_M[indices[1]]
    single = batch.positives.own is not None or one_positive_per_sum(options)
    mean = _merged if options.positives is Positives.merge else _by_key if related.same else _each
    omegas = [weights.masked_fill(~in_sum_P, -math.inf) for weights in (weights_P, torch.zeros_like(a_P))]
    of_pairs = [(index, omega_P, single, batch.relevance) for index, omega_P in zip(indices, omegas, strict=True)]
    rows, columns = related.anchors
    row = mean(DirectionSums(rows, sums[0], options.partition, *of_pairs[0], None), a_P)
    column = mean(DirectionSums(columns, sums[1], options.partition, *of_pairs[1], batch.columns), a_P)
    if related.same:
        correction = _own_minus_mean(related, scale)
        row, column = row + rows.share * correction[0], column + columns.share * correction[1]
    return row, column


def _own_positive_losses(count: int, partition: Partition, difference_b: Tensor, w_b: Tensor | None = None) -> Tensor:
    """Return w_i f_i/τ, (b,), with f as in core_terms, of anchors whose one positive is the item of their pair.

    count: candidates of an anchor. difference_b: N_i − a_ii, see core_terms. w_b: relevance of the pairs; None: 1.
    """
    return weighted(softplus(difference_b) - (math.log(count) if partition is Partition.mean else 0.0), w_b)


@dataclass(frozen=True)
class DirectionSums:
    """One direction (rows or columns): its anchors, their log-sums over negatives, and this rank's P positive pairs.

    log_sums: N_i of each anchor, see core_terms. index: the anchor of each pair. omega_P: the log-weight of each pair's
    positive in the sum of its anchor i, −inf if the positive is no candidate of i. single: whether the sum for each
    positive contains no other positive. relevance_P: weight of each pair; None: 1. layout: how anchors are distributed
    over ranks, if pairs of one anchor lie on several ranks; else None.
    """

    anchors: Anchors
    log_sums: Tensor
    partition: Partition
    index: Index
    omega_P: Tensor
    single: bool
    relevance_P: Tensor | None
    layout: Layout | None

    def f(self, index: Index, a: Tensor, log_positives: Tensor) -> Tensor:
        """Return the loss f_i/τ = log(e^(N_i − a) + e^log_positives) − c_i of the anchors i at `index`.

        N_i: see core_terms. a: the logit of each anchor's positive; of merged ones, their log-sum. log_positives: the
        log-sum of the positives in the anchor's sum, minus a. c_i: 0 (partition=sum), or the log of the number of
        candidates (mean). The result is finite also for anchors that are skipped.
        """
        valid, counts = self.anchors.valid[index], self.anchors.counts[index].clamp(min=1)
        c = counts.to(a).log() if self.partition is Partition.mean else 0.0
        return torch.logaddexp(torch.where(valid, self.log_sums[index] - a, 0.0), log_positives) - c

    def log_sum_over_positives(self, values_P: Tensor) -> Tensor:
        """Return the log-sum-exp of values_P over the positives of each anchor (row or column), one entry per anchor.

        values_P: one exponent (such as the logit) for each of the P listed positive pairs. An anchor without positives
        gets −inf. If self.layout is given (pairs of one anchor lie on several ranks), every rank must call this method.
        """
        anchor_P = torch.arange(len(self.log_sums), device=values_P.device)[self.index]
        highest = torch.full_like(self.log_sums.detach(), -math.inf)
        highest = highest.scatter_reduce(0, anchor_P, values_P.detach(), "amax")
        if self.layout:
            self.layout.max_(highest)
        highest = highest.masked_fill(highest == -math.inf, 0.0)
        sums = torch.zeros_like(self.log_sums).index_add(0, anchor_P, (values_P - highest[anchor_P]).exp())
        sums = self.layout.sum(sums) if self.layout else sums
        return (highest + torch.where(sums > 0, sums, 1.0).log()).masked_fill(sums == 0, -math.inf)


def _each(side: DirectionSums, a_P: Tensor) -> Tensor:
    """Return this rank's share of the mean over anchors of the mean of f/τ over their positives (positives=each).

    f: as in core_terms. a_P: the logits of the P listed positive pairs.
    """
    log_positives = side.omega_P
    if not side.single:
        all_positives_P = side.log_sum_over_positives(a_P + side.omega_P)[side.index] - a_P
        # an anchor with one positive takes its exact value, without the rounding of the sum
        log_positives = torch.where(side.anchors.positives[side.index] == 1, side.omega_P, all_positives_P)
    f_P = side.f(side.index, a_P, log_positives)
    return side.anchors.mean(weighted(f_P, side.relevance_P), side.index)


def _merged(side: DirectionSums, a_P: Tensor) -> Tensor:
    """Return this rank's share of the mean over anchors of f/τ with positives=merge.

    f: as in core_terms, with the log-sum-exp over the anchor's positives in place of the logit s_ip/τ. a_P: the logits
    of the P listed positive pairs.
    """
    merged, in_sum = side.log_sum_over_positives(a_P), side.log_sum_over_positives(a_P + side.omega_P)
    f = side.f(slice(None), merged, torch.where(in_sum == merged, 0.0, in_sum - merged))
    return side.anchors.share * torch.where(side.anchors.valid, f, 0.0)[side.anchors.own].sum()


def _by_key(side: DirectionSums, a_b: Tensor) -> Tensor:
    """Return this rank's share of the mean over anchors i of f/τ, with the pair (x_i, y_i) as the only positive.

    f: as in core_terms. a_b: the logits of the pairs (x_i, y_i). Other pairs with equal keys are positives too, but are
    contained in the log-sums over negatives here; _own_minus_mean adds the correction for the mean over these
    positives.
    """
    f_b = side.f(side.index, a_b, side.omega_P)
    return side.anchors.share * torch.where(side.anchors.valid[side.index], f_b, 0.0).sum()


def _own_minus_mean(related: Relations, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of Σ_i (a_ii − mean_{p∈P_i} a_ip), over the rows and over the columns i, 0-d each.

    i ~ j: i and j are the same item. P_i: every column p ~ i. a: the logits. scale: 1/τ. Since Σ_j mean_{i~j} s_ij =
    Σ_i x_i · Σ_{j~i} y_j / |P_j|, each row computes its part of the means of columns without x of the other ranks. An
    anchor whose only positive is its own pair contributes exactly 0, also to the gradient.
    """
    batch, same, own = related.batch, related.same, related.batch.columns.own
    assert same is not None
    x_bD, y_MD = batch.x_bD.to(scale.dtype), batch.y_MD.to(scale.dtype)
    several_b, several_M = (anchors.valid & (anchors.positives > 1) for anchors in related.anchors)
    rows, columns = related.anchors
    row_weight_b, column_weight_M = rows.weights(scale) * several_b, columns.weights(scale) * several_M
    row_bD = several_b[:, None] * y_MD[own] - row_weight_b[:, None] * same.sums(y_MD, own)
    column_bD = several_M[own, None] * y_MD[own] - same.sums(y_MD * column_weight_M[:, None], own)
    return scale * (x_bD * row_bD).sum(), scale * (x_bD * column_bD).sum()


def mi_bound(related: Relations, row: Tensor, column: Tensor, options: SoftmaxOptions) -> dict[str, Tensor]:
    """Return mi_bound = log K − InfoNCE, a lower bound of the mutual information in nats, and log_k = log K.

    K = B is the number of columns (van den Oord et al. 2018, eq. 5). InfoNCE is the loss f/τ with partition=sum,
    averaged over the directions of the loss. Returns {} unless the candidates of each anchor are its one positive and
    all K − 1 others, without relevance. row, column: the means over anchors of f/τ, 0-d.
    """
    batch = related.batch
    plain = related.exclusion is None and batch.positives.own is not None and len(batch.y_MD) == batch.rows.total
    if not plain or related.same or batch.relevance is not None or batch.further_rows is not None:
        return {}
    log_k = torch.full_like(row, math.log(batch.rows.total))
    both = options.directions in (Directions.sum, Directions.mean)
    mean = DIRECTIONS[Directions.mean if both else options.directions](row, column)
    info_nce = mean + log_k if options.partition is Partition.mean else mean  # every anchor has K candidates
    return {"mi_bound": log_k - info_nce, "log_k": log_k}

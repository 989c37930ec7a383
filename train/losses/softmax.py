"""The softmax family, as formulas over the partition sums that the pairwise reduction hands them.

Legend: b pairs (x_i, y_i) on this rank, B on all W ranks, M ≥ B columns, D width; τ temperature, logits a_ij = s_ij/τ;
C_i the candidates of anchor i (what its sum runs over), m_i = |C_i|, P_i its positives, d_ij = s_ij − s_ip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.losses.base import Result, TemperatureObjective
from train.losses.candidates import Anchors, Relations, beside_positives, others_leave, relations
from train.losses.gather import Layout
from train.losses.importance import LogWeights
from train.losses.options.common import Directions, PairOptions, Positives
from train.losses.options.softmax import OneSidedDPMOptions, Partition, SimCLROptions, SoftmaxOptions, Views
from train.losses.pairwise import log_partition
from train.losses.strip import Strip
from train.losses.tiles import Exclusion

Index = slice | Tensor
Metrics = dict[str, Tensor]
DIRECTIONS: dict[Directions, Callable[[Tensor, Tensor], Tensor]] = {
    Directions.sum: lambda row, column: row + column,
    Directions.mean: lambda row, column: (row + column) / 2,
    Directions.x: lambda row, column: row,
    Directions.y: lambda row, column: column,
}


def symmetric_dpm(row: Tensor, column: Tensor, tau: Tensor, options: SoftmaxOptions) -> Tensor:
    """Symmetric discriminative probabilistic modelling: L = mean_i f_i^row + mean_j f_j^column.

    p(y|x) ∝ p(y) exp(s(x, y)/τ) in both directions, the batch as sample of p (Wang et al. 2024, arXiv:2410.09156).
    row, column: means of f/τ. `directions` replaces the sum of the two, `tau_scaled: false` drops the factor τ of f.
    With a radius ρ, each direction is the dual of robustness over a KL ball: + ρτ (Qiu et al. 2023, eq. 4).

    CLIP is ½ mean_i [−log (e^a_ii / Σ_j e^a_ij) − log (e^a_ii / Σ_j e^a_ji)] = L / 2τ (Radford et al. 2021); GCL has
    the negatives alone in the sum, and their mean; info_nce, dpr and epr are the rows' direction.
    """
    if options.tau_scaled:
        row, column = (tau * f + tau * (options.rho or 0.0) for f in (row, column))
    return DIRECTIONS[options.directions](row, column)


class SoftmaxObjective(TemperatureObjective):
    """An objective of the softmax family."""

    takes = frozenset({"negatives", "positives", "excluded"})
    options: SoftmaxOptions

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        options, scale, weights_M = self.options, self.scale(strip.x_bD), self._weights(strip, more)
        related = relations(strip, options)
        negatives, stands_P = beside_positives(related, options)
        sums = log_partition(strip.x_bD, strip.y_MD, scale, strip.columns, negatives, column_weights_M=weights_M)
        row, column = core_terms(related, stands_P, sums, scale, options, options.partition, weights_M)
        loss = symmetric_dpm(row, column, 1 / scale, options)
        with torch.no_grad():
            bound = mi_bound(related, stands_P, sums, scale, options) if weights_M is None else {}
            return Result(loss, {**score_means(strip), **bound})

    def _weights(self, strip: Strip, more: dict[str, Tensor]) -> Tensor | None:
        """ω_j, added to the logits of the rows' sums."""


class OneSidedDPM(SoftmaxObjective):
    """One-sided DPM: p(y|x) with candidates y_j that were drawn with probability ∝ q_j, so that they weigh 1/q_j.

    f_i = τ LSE_{j∈C_i}(d_ij/τ + ω_j), ω_j = −log q_j or ζ_j/τ (Wang et al. 2024, arXiv:2410.09156, eq. 4). The
    positive's own score has no weight.
    """

    takes = frozenset({"negatives", "positives", "excluded", "importance"})

    def __init__(self, options: OneSidedDPMOptions) -> None:
        super().__init__(options)
        self._source = LogWeights(options)

    def _weights(self, strip: Strip, more: dict[str, Tensor]) -> Tensor | None:
        return self._source(strip, self.scale(strip.x_bD), more.get("importance"))


class SimCLR(TemperatureObjective):
    """SimCLR: 2N views, each against all but itself, its partner the positive (Chen et al. 2020, eq. 1).

    x and y are two views of the same N items; or x holds both (`views`) and y is None. Every view is both anchor and
    candidate, so that the rows' direction is all there is.
    """

    options: SimCLROptions

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> Result:
        first, second = self._views(x_bD) if y_mD is None else (x_bD, y_mD)
        if first.shape != second.shape:
            raise ValueError(f"two views must be alike, not {tuple(first.shape)} and {tuple(second.shape)}")
        z = torch.cat([first, second])
        (layout,) = Layout.of(z)
        if layout.total == 0:
            raise ValueError("the global batch has no pair")
        of_ranks = torch.arange(layout.total // 2, device=z.device).split([size // 2 for size in layout.sizes])
        item_M = torch.cat([items.repeat(2) for items in of_ranks])
        scale = self.scale(z)
        negatives = Exclusion(((item_M[layout.own], item_M),))  # neither itself nor its partner
        rows_b, _ = log_partition(z, layout.gather(z), scale, layout, negatives)
        partner_b = (first.to(scale.dtype) * second.to(scale.dtype)).sum(1).repeat(2)
        share = layout.world_size / layout.total
        loss = softplus(rows_b - scale * partner_b).sum() * share
        return Result(loss / scale if self.options.tau_scaled else loss, {"positive_score": partner_b.sum() * share})

    def _views(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if len(z) % 2:
            raise ValueError(f"two views of each item are an even number of rows, not {len(z)}")
        return (z[::2], z[1::2]) if self.options.views is Views.interleaved else (z[: len(z) // 2], z[len(z) // 2 :])


def softplus(a: Tensor) -> Tensor:
    """sp(a) = log(1 + e^a), exact in float64 too: by default torch turns to sp(a) = a where e^−a is still 2e-9."""
    return F.softplus(a, threshold=40.0)


def core_terms(
    related: Relations,
    stands_P: Tensor,
    sums: tuple[Tensor, Tensor],
    scale: Tensor,
    options: PairOptions,
    partition: Partition,
    weights_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Means over anchors of f_i/τ = LSE_{j∈C_i}(d_ij/τ) − c_i, c_i = 0 (sum) or log m_i (mean), of both directions.

    sums: N_i = LSE_{j∈C_i∖P_i} a_ij of rows (b,) and columns (M,), the negatives alone. Near a loss of 0 it is they
    that count: f_i/τ = log(e^(N_i − a_ip) + Σ_{q∈P_i∩C_i} e^(a_iq − a_ip)) − c_i has all its digits, where the
    difference of LSE_{C_i} and a_ip, both near 1/τ, has none.

    Several positives: the mean over p ∈ P_i (each); the same with C_i without the other positives (exclude); or
    LSE over C_i − LSE over P_i (merge). An anchor without candidates or positive is skipped. stands_P: whether each
    listed positive is in C_i; weights_M: the log-weights ω_j that the rows' sums were made with. Scalars whose mean
    over ranks is the value on the global batch.
    """
    strip, indices = related.strip, _indices(related)
    a_P = scale * strip.pair_scores()
    weights_P = torch.zeros_like(a_P) if weights_M is None else weights_M[indices[1]]
    apart = strip.positives.own is not None or others_leave(options)
    mean = _merged if options.positives is Positives.merge else _by_key if related.same else _each
    row, column = (
        mean(Side(anchors, log_sums, partition, index, omega_P.masked_fill(~stands_P, -math.inf), apart, layout), a_P)
        for anchors, log_sums, index, omega_P, layout in (
            (related.rows, sums[0], indices[0], weights_P, None),
            (related.columns, sums[1], indices[1], torch.zeros_like(a_P), strip.columns),
        )
    )
    if related.same:
        beyond = _own_beyond_mean(related, scale)
        row, column = row + related.rows.share * beyond[0], column + related.columns.share * beyond[1]
    return row, column


@dataclass(frozen=True)
class Side:
    """One direction: its anchors, N_i over their negatives, and the listed positive pairs (P,).

    index: the anchor of each pair; omega_P: its log-weight in that anchor's sum, −inf if it is not in C_i; apart:
    whether each pair is the only positive in its sum; layout: of the ranks on which an anchor's pairs lie, if several.
    """

    anchors: Anchors
    log_sums: Tensor
    partition: Partition
    index: Index
    omega_P: Tensor
    apart: bool
    layout: Layout | None

    def f(self, index: Index, a: Tensor, log_positives: Tensor) -> Tensor:
        """log(e^(N_i − a) + e^(log_positives)) − c_i of the anchors i at `index`; finite for those that are skipped."""
        valid, counts = self.anchors.valid[index], self.anchors.counts[index].clamp(min=1)
        c = counts.to(a).log() if self.partition is Partition.mean else 0.0
        return torch.logaddexp(torch.where(valid, self.log_sums[index] - a, 0.0), log_positives) - c

    def over_positives(self, values_P: Tensor) -> Tensor:
        """LSE over the pairs of each anchor, −inf without any. A row has all its pairs here; a column's may lie on all
        ranks: a collective."""
        anchor_P = torch.arange(len(self.log_sums), device=values_P.device)[self.index]
        highest = torch.full_like(self.log_sums.detach(), -math.inf)
        highest = highest.scatter_reduce(0, anchor_P, values_P.detach(), "amax")
        if self.layout:
            self.layout.max_(highest)
        highest = highest.masked_fill(highest == -math.inf, 0.0)
        sums = torch.zeros_like(self.log_sums).index_add(0, anchor_P, (values_P - highest[anchor_P]).exp())
        sums = self.layout.sum(sums) if self.layout else sums
        return (highest + torch.where(sums > 0, sums, 1.0).log()).masked_fill(sums == 0, -math.inf)


def _each(side: Side, a_P: Tensor) -> Tensor:
    log_positives = side.omega_P
    if not side.apart:
        together_P = side.over_positives(a_P + side.omega_P)[side.index] - a_P
        log_positives = torch.where(side.anchors.positives[side.index] == 1, side.omega_P, together_P)
    f_P = side.f(side.index, a_P, log_positives)
    return side.anchors.share * (side.anchors.weights(a_P)[side.index] @ f_P)


def _merged(side: Side, a_P: Tensor) -> Tensor:
    merged, in_sum = side.over_positives(a_P), side.over_positives(a_P + side.omega_P)
    f = side.f(slice(None), merged, torch.where(in_sum == merged, 0.0, in_sum - merged))
    return side.anchors.share * torch.where(side.anchors.valid, f, 0.0)[side.anchors.own].sum()


def _by_key(side: Side, a_b: Tensor) -> Tensor:
    """Of the own pair alone. Those with an equal key are in N_i, and _own_beyond_mean has the mean over them."""
    f_b = side.f(side.index, a_b, side.omega_P)
    return side.anchors.share * torch.where(side.anchors.valid[side.index], f_b, 0.0).sum()


def _own_beyond_mean(related: Relations, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i (a_ii − mean_{p∈P_i} a_ip) of both directions, where P_i is every column that is the same item as i.

    Σ_j mean_{i~j} s_ij = Σ_i x_i · Σ_{j~i} y_j / |P_j|: rows hold their parts of the columns' means, and x of the other
    ranks is not needed. An anchor that has its own pair alone adds nothing, to the gradient neither.
    """
    strip, same, own = related.strip, related.same, related.strip.columns.own
    assert same is not None
    x_bD, y_MD = strip.x_bD.to(scale.dtype), strip.y_MD.to(scale.dtype)
    several_b, several_M = (anchors.valid & (anchors.positives > 1) for anchors in (related.rows, related.columns))
    row_weight_b, column_weight_M = related.rows.weights(scale) * several_b, related.columns.weights(scale) * several_M
    row_bD = several_b[:, None] * y_MD[own] - row_weight_b[:, None] * same.sums(y_MD, own)
    column_bD = several_M[own, None] * y_MD[own] - same.sums(y_MD * column_weight_M[:, None], own)
    return scale * (x_bD * row_bD).sum(), scale * (x_bD * column_bD).sum()


def _indices(related: Relations) -> tuple[Index, Index]:
    """Anchors of the positive pairs of own rows: rows, and columns."""
    positives, rows = related.strip.positives, len(related.strip.x_bD)
    if positives.own is not None:
        return slice(None), slice(positives.own, positives.own + rows)
    i, j = positives.pairs_P2.unbind(1)
    return i, j


def score_means(strip: Strip) -> dict[str, Tensor]:
    """Mean raw score of the own pairs and of all others, from the sum of all columns."""
    if strip.positives.own is None or len(strip.y_MD) != strip.rows.total:
        return {}
    total = strip.rows.total
    own_b = strip.pair_scores()
    others = (strip.x_bD.to(own_b.dtype) @ strip.y_MD.sum(0, dtype=own_b.dtype)).sum() - own_b.sum()
    per_pair = strip.rows.world_size / total
    return {"positive_score": own_b.sum() * per_pair, "negative_score": others * per_pair / max(total - 1, 1)}


def mi_bound(
    related: Relations, stands_P: Tensor, sums: tuple[Tensor, Tensor], scale: Tensor, options: SoftmaxOptions
) -> Metrics:
    """log K − InfoNCE of the directions that the loss has, their mean, beside log K: nats, at most log K.

    van den Oord et al. 2018, eq. 5. Only for one positive among all K = B columns drawn as they come: with other
    candidates it is no bound.
    """
    strip = related.strip
    plain = related.exclusion is None and strip.positives.own is not None and len(strip.y_MD) == strip.rows.total
    if not plain or related.same:
        return {}
    log_k = scale.new_tensor(math.log(strip.rows.total))
    row, column = core_terms(related, stands_P, sums, scale, options, Partition.sum)
    both = options.directions in (Directions.sum, Directions.mean)
    loss = DIRECTIONS[Directions.mean if both else options.directions](row, column)
    return {"mi_bound": log_k - loss, "log_k": log_k}

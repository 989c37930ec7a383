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
from torch import Tensor

from train.losses.base import Result, TemperatureObjective
from train.losses.candidates import Anchors, Relations, relations
from train.losses.gather import Layout
from train.losses.importance import log_weights
from train.losses.options.common import Candidates, Directions, PairOptions, Positives
from train.losses.options.softmax import OneSidedDPMOptions, Partition, SimCLROptions, SoftmaxOptions, Views
from train.losses.pairwise import log_partition
from train.losses.strip import Strip
from train.losses.tiles import Exclusion, Pairs

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
        rows_b, columns_M = log_partition(
            strip.x_bD, strip.y_MD, scale, strip.columns, related.exclusion, column_weights_M=weights_M
        )
        row, column = core_terms(related, rows_b, columns_M, scale, options, options.partition, weights_M)
        loss = symmetric_dpm(row, column, 1 / scale, options)
        with torch.no_grad():
            bound = mi_bound(related, rows_b, columns_M, scale, options) if weights_M is None else {}
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
        self._source = log_weights(options)

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
        itself = Pairs.own_columns(len(z), layout.own.start, z.device)
        scale = self.scale(z)
        z_MD = layout.gather(z)
        rows_b, _ = log_partition(z, z_MD, scale, layout, Exclusion(dropped=itself))
        partner = 2 * (first.to(scale.dtype) * second.to(scale.dtype)).sum()  # each pair is two anchors' positive
        share = layout.world_size / layout.total
        loss = (rows_b.sum() - scale * partner) * share
        return Result(loss / scale if self.options.tau_scaled else loss, {"positive_score": partner * share})

    def _views(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if len(z) % 2:
            raise ValueError(f"two views of each item are an even number of rows, not {len(z)}")
        return (z[::2], z[1::2]) if self.options.views is Views.interleaved else (z[: len(z) // 2], z[len(z) // 2 :])


def core_terms(
    related: Relations,
    rows_b: Tensor,
    columns_M: Tensor,
    scale: Tensor,
    options: PairOptions,
    partition: Partition,
    weights_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Means over anchors of f_i/τ = LSE_{j∈C_i}(d_ij/τ) − c_i, c_i = 0 (sum) or log m_i (mean), of both directions.

    Several positives: the mean over p ∈ P_i (each); the same with C_i without the other positives (exclude); or
    LSE over C_i − LSE over P_i (merge). An anchor without candidates or positive is skipped. weights_M: the log-weights
    ω_j that the rows' sums were made with. Scalars whose mean over ranks is the value on the global batch.
    """
    row_index, column_index = _indices(related)
    omega_P = 0.0 if weights_M is None else weights_M[column_index]
    sides = (Side(related.rows, rows_b, partition, omega_P), Side(related.columns, columns_M, partition))
    if related.same:
        positive_sums = _positives_by_key(related, scale)
        row, column = (
            side.anchors.share * (side.log_means().sum() - a) for side, a in zip(sides, positive_sums, strict=True)
        )
        return row, column
    several = _excluding if _others_leave(options) else SEVERAL[options.positives]
    a_P = scale * related.strip.pair_scores()
    return several(sides[0], row_index, a_P, related), several(sides[1], column_index, a_P, related)


@dataclass(frozen=True)
class Side:
    """One direction: its anchors, their partition sums LSE_{j∈C_i} (a_ij + ω_j), the log-weight of each positive."""

    anchors: Anchors
    sums: Tensor
    partition: Partition
    omega_P: Tensor | float = 0.0

    def log_means(self) -> Tensor:
        """LSE_{C_i} − c_i of the anchors that this rank adds up, 0 for those that are skipped."""
        return torch.where(self.anchors.valid, self.sums - self.c(self.anchors.counts), 0.0)[self.anchors.own]

    def c(self, counts: Tensor) -> Tensor:
        logs = counts.clamp(min=1).to(self.sums).log()
        return logs if self.partition is Partition.mean else torch.zeros_like(logs)


def _each(side: Side, index: Index, a_P: Tensor, related: Relations) -> Tensor:
    return side.anchors.share * (side.log_means().sum() - side.anchors.weights(a_P)[index] @ a_P)


def _merged(side: Side, index: Index, a_P: Tensor, related: Relations) -> Tensor:
    """LSE_{C_i} − LSE_{p∈P_i} a_ip. A row has all its pairs here; a column's lie on all ranks."""
    layout = related.strip.columns if side.anchors is related.columns else None
    anchor_P = torch.arange(len(side.sums), device=a_P.device)[index]
    highest = torch.full_like(side.sums.detach(), -math.inf).scatter_reduce(0, anchor_P, a_P.detach(), "amax")
    if layout:
        layout.max_(highest)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    sums = torch.zeros_like(side.sums).index_add(0, anchor_P, (a_P - highest[anchor_P]).exp())
    sums = layout.sum(sums) if layout else sums
    merged = torch.where(side.anchors.valid, highest + torch.where(sums > 0, sums, 1.0).log(), 0.0)
    return side.anchors.share * (side.log_means().sum() - merged[side.anchors.own].sum())


def _excluding(side: Side, index: Index, a_P: Tensor, related: Relations) -> Tensor:
    """Each positive beside the negatives alone."""
    f_P = torch.logaddexp(side.sums[index], a_P + side.omega_P) - a_P - side.c(side.anchors.counts)[index]
    return side.anchors.share * (side.anchors.weights(a_P)[index] @ f_P)


SEVERAL = {Positives.single: _each, Positives.each: _each, Positives.exclude: _each, Positives.merge: _merged}


def _others_leave(options: PairOptions) -> bool:
    return options.positives is Positives.exclude and options.candidates is Candidates.all


def _indices(related: Relations) -> tuple[Index, Index]:
    """Anchors of the positive pairs of own rows: rows, and columns."""
    positives, rows = related.strip.positives, len(related.strip.x_bD)
    if positives.own is not None:
        return slice(None), slice(positives.own, positives.own + rows)
    i, j = positives.pairs_P2.unbind(1)
    return i, j


def _positives_by_key(related: Relations, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i mean_{p∈P_i} a_ip of both directions, where P_i is every column that is the same item as i.

    Σ_j mean_{i~j} s_ij = Σ_i x_i · Σ_{j~i} y_j / |P_j|: rows hold their parts of the columns' means, and x of the other
    ranks is not needed.
    """
    strip, same = related.strip, related.same
    assert same is not None
    x_bD, y_MD = strip.x_bD.to(scale.dtype), strip.y_MD.to(scale.dtype)
    own = strip.columns.own
    row_weight_b, column_weight_M = (anchors.weights(scale) for anchors in (related.rows, related.columns))
    row = ((x_bD * same.sums(y_MD, own)).sum(1) * row_weight_b).sum()
    column = (x_bD * same.sums(y_MD * column_weight_M[:, None], own)).sum()
    return scale * row, scale * column


def score_means(strip: Strip) -> dict[str, Tensor]:
    """Mean raw score of the own pairs and of all others, from the sum of all columns."""
    if strip.positives.own is None or len(strip.y_MD) != strip.rows.total:
        return {}
    total = strip.rows.total
    own_b = strip.pair_scores()
    others = (strip.x_bD.to(own_b.dtype) @ strip.y_MD.sum(0, dtype=own_b.dtype)).sum() - own_b.sum()
    per_pair = strip.rows.world_size / total
    return {"positive_score": own_b.sum() * per_pair, "negative_score": others * per_pair / max(total - 1, 1)}


def mi_bound(related: Relations, rows_b: Tensor, columns_M: Tensor, scale: Tensor, options: SoftmaxOptions) -> Metrics:
    """log K − InfoNCE of the directions that the loss has, their mean, beside log K: nats, at most log K.

    van den Oord et al. 2018, eq. 5. Only for one positive among all K = B columns drawn as they come: with other
    candidates it is no bound.
    """
    strip = related.strip
    plain = related.exclusion is None and strip.positives.own is not None and len(strip.y_MD) == strip.rows.total
    if not plain or related.same:
        return {}
    log_k = scale.new_tensor(math.log(strip.rows.total))
    row, column = core_terms(related, rows_b, columns_M, scale, options, Partition.sum)
    both = options.directions in (Directions.sum, Directions.mean)
    loss = DIRECTIONS[Directions.mean if both else options.directions](row, column)
    return {"mi_bound": log_k - loss, "log_k": log_k}

"""The objectives, as formulas over what the pairwise reductions hand them.

Legend: b pairs (x_i, y_i) on this rank, B on all W ranks, D width; keys int64; τ temperature, logits a_ij = s_ij / τ;
C_i the candidates of anchor i (what its partition sums over), m_i = |C_i|, P_i its positives. An objective returns a
loss whose mean over ranks is the loss of the global batch; averaging gradients over ranks gives its exact gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.errors import ConfigError
from train.losses.config import Candidates, Directions, Duplicates, Partition, Similarity, SoftmaxConfig, configure
from train.losses.duplicates import SameItem
from train.losses.gather import Layout
from train.losses.pairwise import Exclusion, log_partition


@dataclass(frozen=True)
class Result:
    """loss: 0-d; metrics: detached 0-d tensors. The mean over ranks of each is its value on the global batch."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Anchors:
    """One direction's anchors on this rank, (b,) each.

    partition_b: LSE_{j∈C_i} a_ij, −inf without candidates. positive_b: mean_{p∈P_i} a_ip, 0 for an anchor without
    candidates; only its sum over all ranks is used, so a rank may hold parts of other ranks' means. count_b: m_i.
    """

    partition_b: Tensor
    positive_b: Tensor
    count_b: Tensor


def core_term(anchors: Anchors, partition: Partition) -> Tensor:
    """f_i/τ = LSE_{j∈C_i}(d_ij/τ) − c_i, d_ij = s_ij − s_ip, c_i = 0 (sum) or log m_i (mean).

    Averaged over p ∈ P_i. An anchor without candidates is skipped: 0.
    """
    c_b = anchors.count_b.log() if partition is Partition.mean else 0.0
    return torch.where(anchors.count_b > 0, anchors.partition_b - c_b, 0.0) - anchors.positive_b


DIRECTIONS: dict[Directions, Callable[[Tensor, Tensor], Tensor]] = {
    Directions.sum: lambda row, column: row + column,
    Directions.mean: lambda row, column: (row + column) / 2,
    Directions.x: lambda row, column: row,
    Directions.y: lambda row, column: column,
}


def symmetric_dpm(row: Anchors, column: Anchors, tau: Tensor, options: SoftmaxConfig) -> Tensor:
    """Symmetric discriminative probabilistic modelling: L = mean_i [f_ii^row + f_ii^col].

    p(y|x) ∝ p(y) exp(s(x, y)/τ) in both directions, the batch as sample of p (Wang et al. 2024, arXiv:2410.09156).

    `directions` replaces the sum of the two, `tau_scaled: false` drops the factor τ of f. Per anchor, (b,).
    """
    loss_b = DIRECTIONS[options.directions](core_term(row, options.partition), core_term(column, options.partition))
    return tau * loss_b if options.tau_scaled else loss_b


def clip(row: Anchors, column: Anchors, tau: Tensor, options: SoftmaxConfig) -> Tensor:
    """CLIP: L = ½ mean_i [−log (e^a_ii / Σ_j e^a_ij) − log (e^a_ii / Σ_j e^a_ji)] (Radford et al. 2021).

    This is L_sym / 2τ (twice the mean, without τ): the options of ClipConfig make it out of symmetric_dpm.
    """
    return symmetric_dpm(row, column, tau, options)


Formula = Callable[[Anchors, Anchors, Tensor, SoftmaxConfig], Tensor]
OBJECTIVES: dict[str, Formula] = {"symmetric_dpm": symmetric_dpm, "clip": clip}


def build_objective(name: str, **options: Any) -> SoftmaxObjective:
    """The objective `name` of OBJECTIVES; options: the fields of its dataclass in train/losses/config.py.

    Raises ConfigError for an unknown name or option, a bad value, or options that exclude each other.
    """
    config = configure(name, **options)
    return SoftmaxObjective(OBJECTIVES[name], config)


class SoftmaxObjective(nn.Module):
    """An objective of the softmax family on in-batch pairs.

    logit_scale: log 1/τ, a parameter that has a gradient only if τ learns.
    """

    def __init__(self, formula: Formula, options: SoftmaxConfig) -> None:
        super().__init__()
        self.formula, self.options = formula, options
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(options.temperature)), options.learnable)

    def forward(
        self,
        x_bD: Tensor,
        y_bD: Tensor,
        sample_ids_b: Tensor | None = None,
        x_keys: Tensor | None = None,
        y_keys: Tensor | None = None,
    ) -> Result:
        """Loss of the global batch of which these are this rank's pairs; ranks may hold different numbers, also 0.

        x_bD, y_bD: embeddings, normalised here if the similarity is cosine; scores are float32, or float64 for float64.
        x_keys, y_keys (b,) int64: rows with an equal key are the same item; needed (one of them) unless duplicates are
        kept. sample_ids_b index per-sample state, which this family has none of. A collective: every rank calls it.
        """
        if x_bD.shape != y_bD.shape or x_bD.ndim != 2:
            raise ValueError(f"x and y must be (b, D) alike, not {tuple(x_bD.shape)} and {tuple(y_bD.shape)}")
        with torch.autocast(x_bD.device.type, enabled=False):
            x_bD, y_bD = self._comparable(x_bD), self._comparable(y_bD)
            layout = Layout.of(x_bD)
            if layout.total == 0:
                raise ValueError("the global batch has no pair")
            y_BD = layout.gather(y_bD)
            keys = self._keys(x_keys, y_keys, layout)
            return self._of_batch(x_bD, y_BD, layout, keys)

    def clamp_(self) -> None:
        """Keep a learning τ in [min_temperature, 1]; to be called after every optimiser step."""
        if self.options.learnable:
            self.logit_scale.data.clamp_(0.0, -math.log(self.options.min_temperature))

    def undo(self) -> None:
        """Restore what the last call changed: nothing, this family keeps no state."""

    def _comparable(self, e_bD: Tensor) -> Tensor:
        e_bD = e_bD.to(torch.promote_types(e_bD.dtype, torch.float32))
        return F.normalize(e_bD, dim=1) if self.options.similarity is Similarity.cosine else e_bD

    def _keys(self, x_keys: Tensor | None, y_keys: Tensor | None, layout: Layout) -> list[Tensor]:
        """Gathered keys, (B,) each; none where duplicates are kept."""
        if self.options.duplicates is Duplicates.keep:
            return []
        keys = [layout.gather(key_b) for key_b in (x_keys, y_keys) if key_b is not None]
        if not keys:
            raise ConfigError(
                f"objective.duplicates={self.options.duplicates.value} compares content keys: give the objective "
                "x_keys or y_keys, or set objective.duplicates=keep"
            )
        return keys

    def _of_batch(self, x_bD: Tensor, y_BD: Tensor, layout: Layout, keys: list[Tensor]) -> Result:
        scale = self.logit_scale.to(x_bD.dtype).exp()
        same = SameItem(keys) if keys else None
        count_B = self._candidate_counts(same, layout).to(x_bD)
        row_b, column_b = log_partition(x_bD, y_BD, scale, layout, self._exclusion(keys, layout))
        own_b = (x_bD * y_BD[layout.own]).sum(1)
        valid_B = (count_B > 0).to(count_B)
        if same is None or self.options.duplicates is Duplicates.mask:
            row_positive_b = column_positive_b = own_b * valid_B[layout.own]
        else:
            row_positive_b, column_positive_b = _mean_positives(x_bD, y_BD, same, valid_B, layout)
        row = Anchors(row_b, scale * row_positive_b, count_B[layout.own])
        column = Anchors(column_b, scale * column_positive_b, count_B[layout.own])
        loss_b = self.formula(row, column, 1 / scale, self.options)
        loss = loss_b.sum() * layout.world_size / valid_B.sum().clamp(min=1)
        with torch.no_grad():
            return Result(loss, {**_score_means(x_bD, y_BD, own_b, layout), **self._mi_bound(row, column, layout)})

    def _exclusion(self, keys: list[Tensor], layout: Layout) -> Exclusion | None:
        """What is left out of C_i: the own positive if candidates are negatives; equal keys if masked, or positives."""
        own = self.options.candidates is Candidates.negatives
        by_key = self.options.duplicates is Duplicates.mask or own
        pairs = tuple((key_B[layout.own], key_B) for key_B in keys) if by_key else ()
        return Exclusion(pairs, own) if pairs or own else None

    def _candidate_counts(self, same: SameItem | None, layout: Layout) -> Tensor:
        """m_i of all B rows, (B,); of the columns too, since being the same item is symmetric."""
        if self.options.candidates is Candidates.negatives and layout.total < 2:
            raise ConfigError("objective.candidates=negatives needs a global batch of 2 pairs or more")
        same_B = torch.ones(layout.total) if same is None else same.counts()
        if self.options.candidates is Candidates.negatives:
            return layout.total - same_B
        return layout.total - (same_B - 1) * (self.options.duplicates is Duplicates.mask)

    def _mi_bound(self, row: Anchors, column: Anchors, layout: Layout) -> dict[str, Tensor]:
        """log K − L unscaled, mean of both directions, beside log K: nats, at most log K (Oord et al. 2018).

        Only for one positive among all K = B columns: with other candidates it is no bound.
        """
        if self.options.candidates is not Candidates.all or self.options.duplicates is not Duplicates.keep:
            return {}
        log_k = row.positive_b.new_tensor(math.log(layout.total))
        loss_b = (core_term(row, Partition.sum) + core_term(column, Partition.sum)) / 2
        return {"mi_bound": log_k - loss_b.sum() * layout.world_size / layout.total, "log_k": log_k}


def _mean_positives(
    x_bD: Tensor, y_BD: Tensor, same: SameItem, valid_B: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Anchors.positive_b of both directions, as scores, where P_i is every pair that is the same item as i.

    Σ_j mean_{i~j} s_ij = Σ_i x_i · Σ_{j~i} y_j / |P_j|: rows hold their parts of the columns' means, and x of the other
    ranks is not needed.
    """
    weight_B = valid_B / same.counts()
    row_b = (x_bD * same.sums(y_BD, layout.own)).sum(1) * weight_B[layout.own]
    column_b = (x_bD * same.sums(y_BD * weight_B[:, None], layout.own)).sum(1)
    return row_b, column_b


def _score_means(x_bD: Tensor, y_BD: Tensor, own_b: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Mean raw score of the B own pairs, and of the B(B − 1) others, from the sum of all y."""
    others_b = x_bD @ y_BD.sum(0) - own_b
    per_pair = layout.world_size / layout.total
    return {
        "positive_score": own_b.sum() * per_pair,
        "negative_score": others_b.sum() * per_pair / max(layout.total - 1, 1),
    }

"""The logistic family: every pair is data (z = +1) or noise (z = −1), told apart by its logit a.

Legend: b rows of this rank, B of all W ranks, M ≥ B columns, P listed pairs; s_ij scores, τ temperature;
sp(a) = log(1 + e^a) = −log σ(−a); k_d and k_n: how many pairs of the global batch are data and noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.errors import ConfigError
from train.losses.base import Result, TemperatureObjective
from train.losses.duplicates import SameItem
from train.losses.functions import product
from train.losses.gather import Layout
from train.losses.importance import SampleTable
from train.losses.options.common import Duplicates
from train.losses.options.logistic import BinaryNceOptions, LocalNceOptions, LogisticOptions, NceOptions, Noise
from train.losses.pair_sum import Function, pair_sum
from train.losses.softmax import score_means, softplus
from train.losses.strip import Strip
from train.losses.tiles import Exclusion, Pairs

Keys = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Decisions:
    """Which pairs of a strip are data and which noise.

    Data: the positives of the strip and, where equal keys are positive, all pairs with an equal key. Noise: all other
    pairs that count. exclusion: all but the pairs that are found tile by tile: the strip's positives, which are summed
    one by one, and what counts for nothing. equal: keys that make data, as (rows (b,), columns (M,)).
    """

    strip: Strip
    exclusion: Exclusion
    equal: Keys

    def counts(self) -> tuple[Tensor, Tensor]:
        """k_d and k_n: 0-d int64. A collective."""
        strip = self.strip
        assert self.exclusion.dropped is not None
        i, j = self.exclusion.dropped.pairs_P2.unbind(1)
        others, by_key = len(strip.x_bD) * len(strip.y_MD) - len(i), 0
        if keys := self.exclusion.keys or self.equal:
            same = SameItem([columns for _, columns in keys], len(strip.y_MD))
            by_key = same.counts(len(strip.y_MD))[strip.columns.own].sum() - _any_equal(keys, i, j).sum()
        data = len(strip.positives.pairs_P2) + (by_key if self.equal else 0)
        counts = torch.stack([torch.as_tensor(n, device=strip.x_bD.device) for n in (data, others - by_key)])
        k_d, k_n = strip.rows.sum_(counts)
        return k_d, k_n


@dataclass(frozen=True)
class Formula:
    """L = w_d Σ_data sp(−a) + w_n Σ_noise sp(a), a_ij = s_ij/τ + shift + offset_j."""

    shift: Tensor
    data_weight: Tensor | float
    noise_weight: Tensor | float
    offsets_M: Tensor | None = None

    def pair_logits(self, strip: Strip, scale: Tensor) -> Tensor:
        """a of the strip's positives, in their order: (P,)."""
        a_P = scale * strip.pair_scores() + self.shift
        if self.offsets_M is None:
            return a_P
        first, pairs_P2 = strip.positives.own, strip.positives.pairs_P2
        return a_P + self.offsets_M[pairs_P2[:, 1] if first is None else slice(first, first + len(a_P))]

    def share(self, decisions: Decisions, scale: Tensor) -> Tensor:
        """This rank's share of L, in one pass over the tiles."""
        strip, equal = decisions.strip, decisions.equal
        offsets = () if self.offsets_M is None else (self.offsets_M,)
        others = pair_sum(
            _told_by_key(len(equal), self.data_weight / self.noise_weight) if equal else _noise,
            scale * strip.x_bD.to(scale.dtype),  # spares a multiplication and a sum for every score
            strip.y_MD,
            decisions.exclusion,
            rows=[rows for rows, _ in equal],
            columns=[*(columns for _, columns in equal), *offsets],
            parameters=(self.shift,),
        )
        return self.data_weight * softplus(-self.pair_logits(strip, scale)).sum() + self.noise_weight * others


def _noise(s: Tensor, *added: Tensor) -> Tensor:
    return softplus(sum(added, start=s))


def _told_by_key(keys: int, data_weight: Tensor | float) -> Function:
    """Pairs with an equal key are data, at this weight; the others are noise."""

    def decide(s: Tensor, *inputs: Tensor) -> Tensor:
        row_keys, column_keys, added = inputs[:keys], inputs[keys : 2 * keys], inputs[2 * keys :]
        a = sum(added, start=s)
        is_data = reduce(torch.logical_or, (r == c for r, c in zip(row_keys, column_keys, strict=True)))
        return torch.where(is_data, data_weight * softplus(-a), softplus(a)) if is_data.any() else softplus(a)

    return decide


class LogisticObjective(TemperatureObjective, ABC):
    """An objective of the logistic family. Subclasses say its `formula`.

    bias: added to every logit; a parameter that has a gradient only if it learns.
    """

    takes = frozenset({"negatives", "positives", "excluded"})

    def __init__(self, options: LogisticOptions) -> None:
        super().__init__(options)
        self.bias = nn.Parameter(torch.tensor(options.init_bias or 0.0), options.bias_learnable)

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        scale, decisions = self.scale(strip.x_bD), decide(strip, self.options.duplicates)
        formula = self.formula(decisions)
        loss = formula.share(decisions, scale)
        metrics = {"bias": self.bias.detach().clone(), **score_means(strip)}
        if strip.positives.own is not None:
            share = strip.rows.world_size / strip.rows.total
            metrics["data_probability"] = formula.pair_logits(strip, scale).sigmoid().sum() * share
        return Result(loss, metrics)

    @abstractmethod
    def formula(self, decisions: Decisions) -> Formula: ...


class LocalNce(LogisticObjective):
    """Local NCE, L = (1/B) Σ_i [Σ_data sp(−a_ij) + Σ_noise sp(a_ij)], and SigLIP (Zhai et al. 2023, arXiv:2303.15343).

    a = s/τ + bias. The optimum of K candidates per anchor is log p(x, y)/(p(x) p(y)) − log(K − 1): without an
    `init_bias`, −log(M − 1) of the batch stands beside the bias, so that the bias has nothing to make up for.
    """

    options: LocalNceOptions

    def formula(self, decisions: Decisions) -> Formula:
        strip = decisions.strip
        prior = -math.log(max(len(strip.y_MD) - 1, 1)) if self.options.init_bias is None else 0.0
        weight = strip.rows.world_size / strip.rows.total
        return Formula(self.bias + prior, weight, weight)


class Nce(LogisticObjective):
    """NCE with the batch as noise: L = mean_data sp(−a) + k mean_noise sp(a) (Gutmann & Hyvärinen 2012).

    a = log u − log q − log k, with log u = s/τ + bias; bias = −log Z. noise=unigram: q = p(y) stands in u too, so that
    s/τ models log p(x, y)/(p(x) p(y)). uniform: q = 1/num_samples. file: log q_j of the columns, by sample id. k:
    k_n/k_d of the batch if not given (1/k_d in a batch that has no noise).
    """

    options: NceOptions

    def __init__(self, options: NceOptions) -> None:
        super().__init__(options)
        self._table = SampleTable(options.noise_file) if options.noise_file else None
        if options.noise is Noise.uniform and options.num_samples is None:
            raise ConfigError("objective.noise=uniform: give objective.num_samples, the number of items")

    def formula(self, decisions: Decisions) -> Formula:
        strip, options = decisions.strip, self.options
        k_d, k_n = (n.clamp(min=1).to(self.scale(strip.x_bD)) for n in decisions.counts())
        k = k_n / k_d if options.k is None else torch.full_like(k_d, options.k)
        log_q = -math.log(options.num_samples or 1) if options.noise is Noise.uniform else 0.0
        weights = strip.rows.world_size / k_d, strip.rows.world_size * k / k_n
        return Formula(self.bias - k.log() - log_q, *weights, self._offsets(strip))

    def _offsets(self, strip: Strip) -> Tensor | None:
        """−log q of the columns, from the file."""
        if self._table is None:
            return None
        if len(strip.y_MD) != strip.columns.total:
            raise ConfigError("objective.noise=file: further columns have no log q")
        return -self._table.of_columns(strip, self.scale(strip.x_bD))


class BinaryNce(LogisticObjective):
    """NCE with equal priors: L = ½ mean_data sp(−a) + ½ mean_noise sp(a), a = s/τ + bias.

    Twice this is NCE with k = 1. negatives_per_positive = r: the noise of global row i is columns i+1 … i+r (mod B)
    alone, at O(b·r·D).
    """

    options: BinaryNceOptions

    def formula(self, decisions: Decisions) -> Formula:
        k_d, k_n = (n.clamp(min=1).to(self.scale(decisions.strip.x_bD)) for n in decisions.counts())
        half = decisions.strip.rows.world_size / 2
        return Formula(self.bias, half / k_d, half / k_n)

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        r = self.options.negatives_per_positive
        return super().of_strip(strip) if r is None else self._sampled(strip, r)

    def _sampled(self, strip: Strip, r: int) -> Result:
        total, scale, own = strip.rows.total, self.scale(strip.x_bD), strip.columns.own
        plain = strip.positives.own is not None and strip.excluded is None and len(strip.y_MD) == total
        if r >= total or not plain:
            raise ConfigError(
                f"objective.negatives_per_positive={r}: takes its noise from the {total} pairs of the global batch, at "
                "most one less, without hard negatives and lists of pairs. Lower it, or leave it out"
            )
        i = torch.arange(own.start, own.stop, device=strip.x_bD.device)[:, None]
        j_br = (i + torch.arange(1, r + 1, device=i.device)) % total
        s_br = product(strip.y_MD[j_br].to(scale.dtype), strip.x_bD.to(scale.dtype)[:, :, None])[:, :, 0]
        a_b, a_br = scale * strip.pair_scores() + self.bias, scale * s_br + self.bias
        equal = _keys(strip, self.options.duplicates)
        same_br = _any_equal(equal, i - own.start, j_br) if equal else torch.zeros_like(j_br, dtype=torch.bool)
        more_data = a_br[same_br] if self.options.duplicates is Duplicates.positive else a_br[:0, 0]
        data, noise = torch.cat([a_b, more_data]), a_br[~same_br]
        counts = strip.rows.sum_(torch.tensor([len(data), len(noise)], device=i.device)).clamp(min=1)
        of_data, of_noise = strip.rows.world_size / counts.to(scale.dtype)
        loss = (of_data * softplus(-data).sum() + of_noise * softplus(noise).sum()) / 2
        probabilities = {
            "data_probability": of_data * data.sigmoid().sum(),
            "noise_probability": of_noise * noise.sigmoid().sum(),
        }
        return Result(loss, {"bias": self.bias.detach().clone(), **score_means(strip), **probabilities})


def nce_from_log_u(
    log_u_data: Tensor,
    log_u_noise: Tensor,
    log_q_data: Tensor,
    log_q_noise: Tensor,
    k: float | None = None,
    log_z: Tensor | float = 0.0,
) -> Tensor:
    """NCE of an unnormalised model u/Z: mean_data sp(−a) + k mean_noise sp(a), a = log u − log Z − log q − log k.

    Gutmann & Hyvärinen 2012. log_u_data, log_q_data: at this rank's data, any shape; *_noise: at noise drawn from q.
    k: noise per data point in the model, by default as many as there are over all ranks. log_z: a number or a
    parameter, subtracted. Returns 0-d; its mean over ranks is the loss of all points. A collective.

    Raises ValueError, on all ranks, where q is 0 or infinite at a point: q must be positive wherever data are.
    """
    data, noise = Layout.of(log_u_data.flatten(), log_u_noise.flatten())
    bad = data.sum_(torch.stack([(~log_q.isfinite()).sum() for log_q in (log_q_data, log_q_noise)]))
    if bad.any():
        raise ValueError(f"log q is not finite at {int(bad[0])} data and {int(bad[1])} noise points")
    k_d, k_n = max(data.total, 1), max(noise.total, 1)
    k = k_n / k_d if k is None else k
    a_data, a_noise = (
        (log_u - log_q).to(torch.promote_types(log_u.dtype, torch.float32)) - log_z - math.log(k)
        for log_u, log_q in ((log_u_data, log_q_data), (log_u_noise, log_q_noise))
    )
    return data.world_size * (softplus(-a_data).sum() / k_d + k / k_n * softplus(a_noise).sum())


def decide(strip: Strip, duplicates: Duplicates) -> Decisions:
    keys, dropped = _keys(strip, duplicates), strip.positives
    if strip.excluded is not None:
        dropped = Pairs(strip.excluded).joined(dropped)
    positive = duplicates is Duplicates.positive
    return Decisions(strip, Exclusion(() if positive else keys, dropped=dropped), keys if positive else ())


def _keys(strip: Strip, duplicates: Duplicates) -> Keys:
    """The keys to compare, if any are."""
    if duplicates is Duplicates.keep:
        return ()
    if not strip.keys:
        raise ConfigError(
            f"objective.duplicates={duplicates.value} compares content keys: give the objective x_keys or y_keys, or "
            "set objective.duplicates=keep"
        )
    return _numbered(strip)


def _numbered(strip: Strip) -> Keys:
    """The keys of the strip as class numbers, for all M columns: those that have no key are −1, and no row is."""
    numbered = []
    for row_keys, column_keys in strip.keys:
        classes = torch.unique(torch.cat([row_keys, column_keys]), return_inverse=True)[1]
        rows, columns = classes.split([len(row_keys), len(column_keys)])
        numbered.append((rows, F.pad(columns, (0, len(strip.y_MD) - len(columns)), value=-1)))
    return tuple(numbered)


def _any_equal(keys: Keys, i: Tensor, j: Tensor) -> Tensor:
    """Whether row i and column j have an equal key, elementwise."""
    return reduce(torch.logical_or, (rows[i] == columns[j] for rows, columns in keys))

"""The logistic family: binary classification of pairs as data or noise, by their logits a.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def siglip(x_BD, y_BD, tau, bias):  # local NCE: with bias − log(B − 1)
    a_BB = x_BD @ y_BD.T / tau + bias
    data_BB = torch.eye(len(a_BB))  # 1 for a pair (x_i, y_i), else 0
    return -F.logsigmoid((2 * data_BB - 1) * a_BB).sum(1).mean()

def nce(x_BD, y_BD, tau, bias, k):  # binary NCE: half of this, with k = 1
    a_BB = x_BD @ y_BD.T / tau + bias - math.log(k)
    noise_BB = ~torch.eye(len(a_BB), dtype=torch.bool)
    return -F.logsigmoid(a_BB.diagonal()).mean() - k * F.logsigmoid(-a_BB[noise_BB]).mean()
```

Legend: b rows of this rank, B of all W ranks, M ≥ B columns, P listed pairs; s_ij scores, τ temperature; sp(a) = log(1
+ e^a) = −log σ(−a), σ the sigmoid; data pairs are positives, noise pairs are negatives; k_d, k_n: the numbers of data
and noise pairs of the global batch; k: noise pairs per data pair; q: the density of the noise.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.log_weights import LOG_Q
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.gathered.duplicates import class_indices
from dyad.train.losses.gathered.importance import open_number_file
from dyad.train.losses.objectives.base import ObjectiveResult, TemperatureObjective, score_means
from dyad.train.losses.objectives.softmax import softplus
from dyad.train.losses.options.choices import Density, Duplicates
from dyad.train.losses.options.logistic import BinaryNceOptions, LocalNceOptions, LogisticOptions, NceOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import costly_metrics_wanted, holds
from dyad.train.losses.sums.functions import product, weighted
from dyad.train.losses.sums.lse import log_partition
from dyad.train.losses.sums.pair_sum import Function, pair_sum
from dyad.train.losses.sums.tiles import Exclusion, Pairs

Keys = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class LabelledPairs:
    """The pairs of a batch, labelled as data (the positives) or noise (the negatives).

    Data are the listed positives of the batch and, with duplicates=positive, pairs with an equal key. Noise are the
    other pairs, also those of a further row and the y of a pair. Neither are excluded pairs that are not listed as
    positives, known positives of a row that are not data, and other pairs with an equal key if duplicates=mask or of a
    further row. exclusion: the pairs that the sum over tiles of the score matrix skips: those that are neither, and the
    listed positives, which are summed one by one. equal: for each kind of key, keys of rows (b,) and columns (M,);
    pairs with an equal key are data.
    """

    batch: GatheredBatch
    exclusion: Exclusion
    equal: Keys

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the counts of data pairs (positives) and noise pairs (negatives) of the global batch, 0-d int64 each.

        Every rank must call it.
        """
        batch = self.batch
        b, M = len(batch.x_bD), len(batch.y_MD)
        no_noise = replace(self.exclusion, keys=self.exclusion.keys or self.equal)
        left_out, others = (e.counts(b, M, batch.x_bD.device)[0].sum() for e in (self.exclusion, no_noise))
        data = others - left_out + len(batch.positives.pairs_P2)  # pairs of equal keys, and listed positives
        k_d, k_n = batch.rows.sum_(torch.stack([data, b * M - others]))
        return k_d, k_n if batch.further_rows is None else k_n + batch.further_rows.counts(batch.columns).sum()


@dataclass(frozen=True)
class LogisticFormula:
    """A rank's share w_d Σ_data sp(−a) + w_n Σ_noise sp(a) of a loss, with logits a_ij = s_ij/τ + shift + offset_j.

    The sums run over the data pairs (positives) and noise pairs (negatives) of this rank; s_ij: scores; τ: temperature;
    sp(a) = log(1 + e^a). data_weight: w_d. noise_weight: w_n. offsets_M: offset_j of each column; None: no offsets. The
    relevance of a data pair multiplies its term; noise pairs have none.
    """

    shift: Tensor
    data_weight: Tensor | float
    noise_weight: Tensor | float
    offsets_M: Tensor | None = None

    def pair_logits(self, batch: GatheredBatch, scale: Tensor) -> Tensor:
        """Return the logits of the P positive pairs of `batch`, (P,), in list order. scale: 1/τ, 0-d."""
        a_P = scale * batch.pair_scores() + self.shift
        return a_P if self.offsets_M is None else a_P + self.offsets_M[batch.positive_indices()[1]]

    def share(self, labelled: LabelledPairs, scale: Tensor) -> Tensor:
        """Return this rank's share of the loss, 0-d; the mean of the shares over ranks is the loss.

        labelled: the pairs, labelled as data or noise. scale: 1/τ.
        """
        batch, equal = labelled.batch, labelled.equal
        offsets = () if self.offsets_M is None else (self.offsets_M,)
        others = pair_sum(
            _labelled_by_key(len(equal), self.data_weight / self.noise_weight) if equal else _noise_loss,
            batch.x_bD,
            batch.y_MD,
            labelled.exclusion,
            scale=scale,
            rows=[rows for rows, _ in equal],
            columns=[*(columns for _, columns in equal), *offsets],
            parameters=(self.shift,),
        )
        if (further := batch.further_rows) is not None:
            B = batch.columns.total
            how = {"scale": scale, "columns": [of_M[:B] for of_M in offsets], "parameters": (self.shift,)}
            others = others + pair_sum(_noise_loss, further.x_kD, batch.y_MD[:B], further.exclusion, **how)
        data_P = weighted(softplus(-self.pair_logits(batch, scale)), batch.relevance)
        return self.data_weight * data_P.sum() + self.noise_weight * others


def _noise_loss(s: Tensor, *added: Tensor) -> Tensor:
    """Return the loss sp(a) = log(1 + e^a) of noise pairs, elementwise; the logit a is s plus all of `added`."""
    return softplus(sum(added, start=s))


def _data_probability(s: Tensor, *added: Tensor) -> Tensor:
    """Return the probability σ(a) that a pair is data, elementwise; the logit a is s plus all tensors in `added`."""
    return sum(added, start=s).sigmoid()


def _labelled_by_key(keys: int, data_weight: Tensor | float) -> Function:
    """Return a function f(s, *inputs) that computes the loss of each pair of a tile of the score matrix.

    A pair is data if the row and the column have an equal key of any kind, else noise. keys: the number of kinds of
    keys. s: the scores. inputs: the row keys, the column keys, then the terms to add to s. data_weight: the weight of
    data relative to noise.
    """

    def f(s: Tensor, *inputs: Tensor) -> Tensor:
        row_keys, column_keys, added = inputs[:keys], inputs[keys : 2 * keys], inputs[2 * keys :]
        a = sum(added, start=s)
        is_data = reduce(torch.logical_or, (r == c for r, c in zip(row_keys, column_keys, strict=True)))
        return torch.where(is_data, data_weight, 1.0) * softplus(torch.where(is_data, -a, a))

    return f


class LogisticObjective(TemperatureObjective, ABC):
    """An objective that classifies pairs as data or noise by their logits. Subclasses implement `formula`.

    bias: a parameter that is added to every logit; it has a gradient only if options.bias_learnable.
    """

    def __init__(self, options: LogisticOptions) -> None:
        super().__init__(options)
        self.bias = nn.Parameter(torch.tensor(options.init_bias or 0.0), options.bias_learnable)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        scale, labelled = self.scale(batch.x_bD), label_pairs(batch, self.options.duplicates)
        formula = self.formula(labelled)
        loss = formula.share(labelled, scale)
        metrics = {"bias": self.bias.detach().clone(), **score_means(batch)}
        if batch.positives.own is not None:
            share = batch.rows.share
            metrics["data_probability"] = formula.pair_logits(batch, scale).sigmoid().sum() * share
        return ObjectiveResult(loss, metrics)

    def calibrate(self, logit_scale: float, logit_bias: float | None, names: Collection[str]) -> dict[str, float]:
        return {}  # with the scale of a softmax, the initial bias (for NCE: log Z) would be far from its optimum

    @abstractmethod
    def formula(self, labelled: LabelledPairs) -> LogisticFormula:
        """Return the loss of this batch as a LogisticFormula.

        It holds the weights of data and of noise pairs, and the terms to add to score/τ: a shift for all pairs and an
        offset for each column. labelled: the pairs of the batch, labelled as data or noise. Every rank must call it.
        """


class LocalNce(LogisticObjective):
    """Local NCE, L = (1/B) Σ_i [Σ_data sp(−a_ij) + Σ_noise sp(a_ij)], and SigLIP (Zhai et al. 2023, arXiv:2303.15343).

    The inner sums are over the columns j whose pair (i, j) is data (a positive) or noise (a negative). a = s/τ + bias
    with scores s; sp(a) = log(1 + e^a). With K candidates per anchor, the optimal a is log p(x, y)/(p(x) p(y)) − log(K
    − 1). Without an `init_bias`, −log(M − 1) is added to the bias, with M the columns of the batch, so that the bias
    need not learn this value.
    """

    options: LocalNceOptions

    def calibrate(self, logit_scale: float, logit_bias: float | None, names: Collection[str]) -> dict[str, float]:
        if logit_bias is None or not self.options.has_logit_bias:
            return {}
        taken = TemperatureObjective.calibrate(self, logit_scale, None, names)
        if "init_bias" in names:
            self.bias.data.fill_(logit_bias)
            taken["init_bias"] = logit_bias
        return taken

    def formula(self, labelled: LabelledPairs) -> LogisticFormula:
        batch = labelled.batch
        prior = -math.log(max(len(batch.y_MD) - 1, 1)) if self.options.init_bias is None else 0.0
        weight = batch.rows.share
        return LogisticFormula(self.bias + prior, weight, weight)


class Nce(LogisticObjective):
    """NCE, L = mean_data sp(−a) + k mean_noise sp(a), a = log u − log q − log k (Gutmann & Hyvärinen 2012, eq. 2 to 4).

    sp(a) = log(1 + e^a). The model is log u = s/τ + bias, with s the score of a pair and bias = −log Z; q: the density
    of the noise; k: noise pairs per data pair, by default k_n/k_d, the counts of noise and data pairs in the global
    batch (1/k_d in a batch without noise).

    Noise is the other pairs of the batch with options.noise=batch. options.density then says what stands for q: with
    unigram q = p(y) is a factor of u too and cancels, so s/τ models log p(x, y)/(p(x) p(y)); with uniform q =
    1/num_samples; with file the file holds log q_j of the columns, by content key or by sample id.

    With any other options.noise the caller draws y items from q and gives them as further columns, with log q of these
    and of its own columns (importance). forward then takes no lists of pairs and no relevance. Every row is paired with
    all K items, and with none of the batch: k_n/k_d = K, and log u models log p(y|x), normalised at the optimum (Mnih &
    Teh 2012, who draw k for each data point).

    q must be fixed: the proof that the optimum is the normalised data density (Gutmann & Hyvärinen 2012, theorem 1)
    holds for such a q alone. A q that was learnt before is given as a file.
    """

    options: NceOptions

    def __init__(self, options: NceOptions) -> None:
        super().__init__(options)
        if options.draws:
            self.takes = frozenset({"negatives", "importance"})
        self.table = open_number_file(options, LOG_Q)
        if options.draws is None and options.density is Density.uniform and options.num_samples is None:
            raise ConfigError("objective.density=uniform: give objective.num_samples, the number of items")

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        return self._of_drawn(batch) if self.options.draws else super().of_batch(batch)

    def _of_drawn(self, batch: GatheredBatch) -> ObjectiveResult:
        """Return the loss of a batch whose K further columns are noise drawn from q, and metrics.

        Raises ConfigError without further columns, without log q of all columns, or for listed positives; ValueError if
        a log q is not finite, which collect_checks(speculative=True) of sums/conditions.py assumes not to be. Two
        metrics are left out if costly metrics are not wanted: noise_probability, the mean σ(a) of noise; and log_z, the
        mean over rows i of log (1/K) Σ_j u_ij/q_j, an estimate by importance sampling of log Σ_y u, which is 0 for a
        normalised model.
        """
        total, log_q_M = batch.columns.total, batch.log_q_M
        drawn = len(batch.y_MD) - total
        if log_q_M is None or not drawn or batch.positives.own is None:
            raise ConfigError(
                f"objective.noise={self.options.noise}: give the drawn items as negatives=Columns(…, importance_k), "
                "log q of these, and importance, log q of the pairs' y; no other positives. A run draws them itself"
            )
        if not holds(log_q_M.isfinite().all()):
            raise ValueError("log q is not finite: q must be positive where data and noise are")
        scale, k = self.scale(batch.x_bD), self.options.k or drawn
        minus_log_q_M, shift = -log_q_M.to(scale.dtype), self.bias - math.log(k)
        noise = batch.x_bD, batch.y_MD[total:]
        added = {"columns": [minus_log_q_M[total:]], "parameters": (shift,)}
        a_b = scale * batch.pair_scores() + shift + minus_log_q_M[batch.columns.own]
        share = batch.rows.share
        loss = share * (softplus(-a_b).sum() + k / drawn * pair_sum(_noise_loss, *noise, scale=scale, **added))
        metrics = {"bias": self.bias.detach().clone(), "data_probability": share * a_b.sigmoid().sum()}
        metrics["positive_score"] = share * batch.pair_scores().sum()
        if costly_metrics_wanted():
            with torch.no_grad():
                of_noise = pair_sum(_data_probability, *noise, scale=scale, **added)
                log_z_b = log_partition(*noise, scale, None, column_weights_M=minus_log_q_M[total:])[0] + self.bias
            metrics["noise_probability"] = share / drawn * of_noise
            metrics["log_z"] = share * (log_z_b - math.log(drawn)).sum()
        return ObjectiveResult(loss, metrics)

    def formula(self, labelled: LabelledPairs) -> LogisticFormula:
        batch, options = labelled.batch, self.options
        k_d, k_n = (n.clamp(min=1).to(self.scale(batch.x_bD)) for n in labelled.counts())
        k = k_n / k_d if options.k is None else torch.full_like(k_d, options.k)
        log_q = -math.log(options.num_samples or 1) if options.density is Density.uniform else 0.0
        weights = batch.rows.world_size / k_d, batch.rows.world_size * k / k_n
        minus_log_q_M = None if self.table is None else -self.table.of_columns(batch, k)
        return LogisticFormula(self.bias - k.log() - log_q, *weights, minus_log_q_M)


class BinaryNce(LogisticObjective):
    """NCE with equal priors: L = ½ mean_data sp(−a) + ½ mean_noise sp(a), a = s/τ + bias, sp(a) = log(1 + e^a).

    The means are over data pairs (positives) and noise pairs (negatives). Twice this loss is NCE with one noise pair
    per data pair. With negatives_per_positive = r, global row i is compared only with its own column and the columns
    i+1 … i+r (mod B), at a cost of O(b·r·D); forward then raises ConfigError for r ≥ B, further columns, and lists of
    pairs.
    """

    options: BinaryNceOptions

    def formula(self, labelled: LabelledPairs) -> LogisticFormula:
        k_d, k_n = (n.clamp(min=1).to(self.scale(labelled.batch.x_bD)) for n in labelled.counts())
        half = labelled.batch.rows.world_size / 2
        return LogisticFormula(self.bias, half / k_d, half / k_n)

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        r = self.options.negatives_per_positive
        return super().of_batch(batch) if r is None else self._sampled(batch, r)

    def _sampled(self, batch: GatheredBatch, r: int) -> ObjectiveResult:
        """Return the loss and metrics with the r columns after a row's own as its noise. Every rank must call it."""
        total, scale, own = batch.rows.total, self.scale(batch.x_bD), batch.columns.own
        plain = batch.positives.own is not None and batch.excluded is batch.known is None and len(batch.y_MD) == total
        if r >= total or not plain:
            raise ConfigError(
                f"objective.negatives_per_positive={r}: takes its noise from the {total} pairs of the global batch, at "
                "most one less, without hard negatives and lists of pairs. Lower it, or leave it out"
            )
        i = torch.arange(own.start, own.stop, device=batch.x_bD.device)[:, None]
        j_br = (i + torch.arange(1, r + 1, device=i.device)) % total
        s_br = product(batch.y_MD[j_br].to(scale.dtype), batch.x_bD.to(scale.dtype)[:, :, None])[:, :, 0]
        a_b, a_br = scale * batch.pair_scores() + self.bias, scale * s_br + self.bias
        equal = _class_numbers(batch, self.options.duplicates)
        pairs = (rows[i - own.start] == columns[j_br] for rows, columns in equal)
        same_br = reduce(torch.logical_or, pairs, torch.zeros_like(j_br, dtype=torch.bool))
        more_data = a_br[same_br] if self.options.duplicates is Duplicates.positive else a_br[:0, 0]
        data, noise = torch.cat([a_b, more_data]), a_br[~same_br]
        counts = batch.rows.sum_(torch.tensor([len(data), len(noise)], device=i.device)).clamp(min=1)
        of_data, of_noise = batch.rows.world_size / counts.to(scale.dtype)
        loss = (of_data * weighted(softplus(-data), batch.relevance).sum() + of_noise * softplus(noise).sum()) / 2
        probabilities = {
            "data_probability": of_data * data.sigmoid().sum(),
            "noise_probability": of_noise * noise.sigmoid().sum(),
        }
        return ObjectiveResult(loss, {"bias": self.bias.detach().clone(), **score_means(batch), **probabilities})


def nce_from_log_u(
    log_u_data: Tensor,
    log_u_noise: Tensor,
    log_q_data: Tensor,
    log_q_noise: Tensor,
    k: float | None = None,
    log_z: Tensor | float = 0.0,
) -> Tensor:
    """Return the NCE loss of an unnormalised model u/Z: mean_data sp(−a) + k mean_noise sp(a), 0-d.

    a = log u − log Z − log q − log k; sp(a) = log(1 + e^a); q: the noise density (Gutmann & Hyvärinen 2012).
    log_u_data, log_q_data: log u and log q at this rank's data points, any shape; log_u_noise, log_q_noise: the same at
    noise points drawn from q. k: noise points per data point in the model, by default their ratio over all ranks.
    log_z: log Z, a float or a parameter. The mean over ranks of the result is the loss of all points. Every rank must
    call it.

    Raises ValueError, on all ranks, if log q of a data or noise point is not finite: q must be positive there.
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


def label_pairs(batch: GatheredBatch, duplicates: Duplicates) -> LabelledPairs:
    """Label the pairs of `batch` as data or noise, as LabelledPairs says.

    duplicates: whether pairs of a row and a column with equal keys are noise (keep), neither noise nor data (mask), or
    data (positive). Raises ConfigError if keys are to be compared and the batch has none.
    """
    keys, dropped = _class_numbers(batch, duplicates), batch.positives
    if batch.excluded is not None:
        dropped = Pairs(batch.excluded).joined(dropped)
    positive = duplicates is Duplicates.positive
    exclusion = Exclusion(() if positive else keys, dropped=dropped, known=batch.known)
    return LabelledPairs(batch, exclusion, keys if positive else ())


def _class_numbers(batch: GatheredBatch, duplicates: Duplicates) -> Keys:
    """Replace the keys of a batch by class indices, equal where the keys are equal.

    Returns, for each kind of key, the indices of the rows (b,) and of all columns (M,), int64; () with duplicates=keep.
    A column without a key gets −1, which no row has. Raises ConfigError if keys are to be compared and the batch has
    none.
    """
    numbered = []
    for row_keys, column_keys in batch.compared_keys(duplicates):
        classes = class_indices(torch.cat([row_keys, column_keys]))
        rows, columns = classes.split([len(row_keys), len(column_keys)])
        numbered.append((rows, F.pad(columns, (0, len(batch.y_MD) - len(columns)), value=-1)))
    return tuple(numbered)

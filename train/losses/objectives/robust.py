"""The robust family: for every positive pair, the worst-case mean of a pair loss over weights of the candidates.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def coce(x_BD, y_BD, pair_loss, oce):  # anchors x; pair_loss and oce as those that open pair_losses.py and oce.py
    s_BB = x_BD @ y_BD.T
    others_BB = ~torch.eye(len(s_BB), dtype=torch.bool)
    d_BM = (s_BB - s_BB.diagonal()[:, None])[others_BB].view(len(s_BB), -1)  # M = B − 1
    return oce(pair_loss(d_BM)).mean()

def partial_auc(x_B1, y_M1, pair_loss, oce):  # scores of positives and of negatives
    return oce(pair_loss(y_M1.T - x_B1)).mean()
```

    L = mean_i mean_{p∈P_i} OCE_{j∈C_i} ℓ(s_ij − s_ip)

Legend: i an anchor, P_i its positives, C_i its candidates; s_ij scores, ℓ the pair loss, τ temperature; OCE the
optimised certainty equivalent of oce.py, which minimises over a scalar ν per row; φ* the conjugate of its divergence.
See Zhu et al. 2022, arXiv:2203.00176, for partial AUC, and Qiu et al. 2023, arXiv:2305.11965, for contrastive learning.
KL with the identity as pair loss is one direction of GCL. The relevance w_ip of a positive pair multiplies its OCE.

The rank that holds an anchor computes its OCE. Ranks send y and the gradient of y for anchors x, and x and the gradient
of x for anchors y.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.gathered.candidates import relations
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.objectives.base import ObjectiveResult, TemperatureObjective, score_means, shapes
from dyad.train.losses.objectives.oce import build_oce
from dyad.train.losses.objectives.pair_losses import Losses, RepeatedRows, pair_loss_of
from dyad.train.losses.options.choices import CandidateSet, Directions, Duplicates, Nu, PairLoss, Setting
from dyad.train.losses.options.common import PairOptions
from dyad.train.losses.options.robust import CoceOptions, PartialAUCOptions, RobustOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import known_sizes
from dyad.train.losses.sums.functions import weighted
from dyad.train.losses.sums.tiles import KnownPairs, Pairs

Metrics = dict[str, Tensor]
SIDES = {Directions.x: "x", Directions.y: "y", Directions.sum: "xy", Directions.mean: "xy"}  # sides with anchors


class RobustObjective(TemperatureObjective):
    """An objective made of optimised certainty equivalents (OCE), with anchors x, y or both.

    An OCE minimises over a scalar ν per row. sides: "x", "y" or "xy", the sides with anchors. nu: with options.nu=sgd a
    parameter with one ν per side, NaN before the first training batch. With options.nu=state, `sample_state` holds one
    ν for each sample and side. With options.nu=closed_form the minimising ν of each row is computed.
    """

    _nu_began = False  # whether the last call gave ν its first value
    _nu_is_known = False  # whether ν has a value: a test of the parameter itself would wait for the GPU in each call

    def __init__(self, options: RobustOptions, sides: str = "x") -> None:
        super().__init__(options)
        self._oce = build_oce(options)
        if options.nu is Nu.sgd:
            self.nu = nn.Parameter(torch.full((len(sides),), math.nan))
            self.register_load_state_dict_post_hook(_forget_nu)
        if options.nu is Nu.state:
            if options.num_samples is None:
                raise ConfigError("objective.nu=state keeps a number for every sample: set objective.num_samples")
            initial = {f"nu_{side}": math.nan for side in sides}
            self.sample_state = SampleState(options.num_samples, initial, options.memory_budget_mb)

    def values(self, losses: dict[str, Losses], sample_ids_b: Tensor | None, rows: Layout) -> tuple[Tensor, Metrics]:
        """Return OCE + ρτ of each side (anchors x, anchors y), (number of sides,), and metrics as means over the sides.

        Both are this rank's shares, whose means over ranks are the values of the global batch. OCE: the optimised
        certainty equivalent, averaged over rows; ρ: options.rho, 0 for None; τ: temperature. The relevance of a row
        multiplies both. In training mode with gradients enabled, a ν per sample is updated, and a learned ν gets its
        first value. losses: side → the losses of its rows. sample_ids_b: the samples' indices in the stored state,
        needed with options.nu=state. rows: which rank holds which samples. Every rank must call it, unless
        options.nu=closed_form.
        """
        tau = 1 / self.scale(next(iter(losses.values())).p_R)
        if self.options.nu is Nu.state:
            of_sides = self._with_state(losses, tau, sample_ids_b, rows)
        elif self.options.nu is Nu.sgd:
            of_sides = self._with_sgd(losses, tau, rows)
        else:
            of_sides = [self._with_solution(of_side, tau) for of_side in losses.values()]
        values, metrics = zip(*of_sides, strict=True)
        means = {name: torch.stack([m[name] for m in metrics]).mean() for name in metrics[0]}
        radius = (self.options.rho or 0.0) * tau  # part of each row's term, so the row's relevance multiplies it too
        shares = [of_side.mean_relevance for of_side in losses.values()]
        return torch.stack([value + radius * share for value, share in zip(values, shares, strict=True)]), means

    def undo(self) -> None:
        super().undo()
        if self._nu_began:
            self.nu.data.fill_(math.nan)
            self._nu_began = self._nu_is_known = False

    def _with_solution(self, losses: Losses, tau: Tensor) -> tuple[Tensor, Metrics]:
        """Return the weighted sum of the rows' OCE, each at its minimising ν (options.nu=closed_form), and metrics."""
        value, solution = self._oce.closed_form(losses, tau)
        of_rows = {"nu": solution.nu_R(tau.detach()), **solution.of_weights}
        return value, {name: losses.mean(values_R) for name, values_R in of_rows.items()}

    def _with_sgd(self, losses: dict[str, Losses], tau: Tensor, rows: Layout) -> list[tuple[Tensor, Metrics]]:
        """Return, for each side, the weighted sum of the rows' OCE, each at the learned ν, and metrics.

        OCE: optimised certainty equivalent, here not at its minimum over ν. ν is one scalar per side, shared by all of
        its rows and learned by SGD. Its gradient is 1 − mean_r mean_j φ*'((ℓ_rj − ν)/τ), over rows r and their losses
        ℓ_rj; φ* is the conjugate of the divergence. losses: the losses of the rows by side. tau: τ. rows: which rank
        holds which samples.
        """
        of_sides = []
        for nu, of_side in zip(self._learning_nu([*losses.values()], tau.detach(), rows), losses.values(), strict=True):
            nu_R = nu.to(tau.dtype).expand_as(of_side.p_R)
            value = self._oce.value_at(of_side, tau, nu_R, torch.zeros_like(nu_R))
            of_sides.append((value, {"nu": of_side.mean(nu_R)}))
        return of_sides

    def _learning_nu(self, losses: list[Losses], tau: Tensor, rows: Layout) -> Tensor:
        """Return the learned ν of each side; in its first batch, ν is the largest of the rows' own minimisers.

        That is 0 if no row has candidates. In training, this first value is stored in the parameter `nu`. The own
        minimiser of a row is the ν_r at which its OCE is minimal. With ν above ν_r, the OCE grows at most by ν − ν_r;
        with ν below, it would grow by e^((ν_r − ν)/τ) for KL: so a ν that is too large does less harm. losses: one
        entry per side. tau: τ. rows: which rank holds which samples. Every rank must call it.
        """
        self._nu_began = False
        self._nu_is_known = self._nu_is_known or not self.nu.isnan().any()
        if self._nu_is_known:
            return self.nu
        largest = []
        for of_side in losses:
            nu_R = self._oce.solve(of_side, tau).nu_R(tau)[of_side.weights_R > 0]
            largest.append(torch.cat([nu_R, nu_R.new_tensor([-math.inf])]).max())
        found = rows.max_(torch.stack(largest)).to(self.nu)
        found = torch.where(found == -math.inf, 0.0, found)  # a batch without negatives
        if not (self.training and torch.is_grad_enabled()):
            return found
        self.nu.data.copy_(found)
        self._nu_began, self._nu_is_known = True, bool(found.isfinite().all())
        return self.nu

    def _with_state(
        self, losses: dict[str, Losses], tau: Tensor, sample_ids_b: Tensor | None, rows: Layout
    ) -> list[tuple[Tensor, Metrics]]:
        """Return the OCE and metrics of each side with the stored ν_i of each sample.

        In training, also store every ν_i after a gradient step. A sample in its first batch has no ν_i yet and takes
        the ν_i at which its OCE is minimal. losses: the losses of the rows by side, one row per sample. sample_ids_b:
        the samples' indices in the stored state. rows: which rank holds which samples. Every rank must call it.
        """
        assert self.sample_state is not None
        read = self.sample_state.read(sample_ids_b, rows, tau.dtype)
        of_sides, new = [], {}
        for side, of_side in losses.items():
            old_b = read.old[f"nu_{side}"][rows.own]
            value, new_b = self._stepped(of_side, tau, old_b)
            of_sides.append((value, {"nu": of_side.mean(new_b.nan_to_num())}))
            new[f"nu_{side}"] = read.mean(rows.gather(new_b))
        if self.training and torch.is_grad_enabled():
            self.sample_state.write(read, new)
        return of_sides

    def _stepped(self, losses: Losses, tau: Tensor, old_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the rows' OCE at the old ν, 0-d, and each row's ν after a gradient step, (b,).

        Nothing is stored. old_b: the stored ν of each row, NaN if it has none yet. A row without a stored ν takes the
        minimising ν (closed form), where its OCE has a gradient even if the sum has a kink at ν (CVaR).
        """
        unknown_b, new_b = old_b.isnan(), old_b.clone()
        unknown = int(unknown_b.sum())  # the only number that is read from the device
        later_b, first_b = unknown_b.int().argsort(stable=True).split([len(old_b) - unknown, unknown])
        first, later = losses.chosen(first_b), losses.chosen(later_b)
        first_value, solution = self._oce.closed_form(first, tau)
        new_b[first_b] = solution.nu_R(tau.detach())
        with torch.enable_grad():
            nu_b = old_b[later_b].detach().requires_grad_()
            value = self._oce.value_at(later, tau, nu_b, torch.zeros_like(nu_b))
            (slope_b,) = torch.autograd.grad(value, nu_b, retain_graph=True)
        slope_b = slope_b / later.factors_R.where(later.factors_R > 0, 1.0)
        step_b = (self.options.nu_lr * slope_b).clamp(min=-1.0)  # with KL the slope below the minimum is exponential
        new_b[later_b] = nu_b.detach() - tau.detach() * step_b
        return first_value + value, torch.where(losses.weights_R > 0, new_b, old_b)


def _forget_nu(objective: RobustObjective, _: object) -> None:
    """Make the next call of `objective` test again whether its parameter ν is NaN, that is, without a value.

    A hook that torch calls after load_state_dict, which may have loaded a NaN. The second argument is not used.
    """
    objective._nu_began = objective._nu_is_known = False


class Coce(RobustObjective):
    """Compositional OCE (optimised certainty equivalent) of the score differences between candidates and positives.

    options.setting names the candidates of an anchor. self and supervised: all columns except the positives of the row.
    With one positive per row (self) these are the columns of the B − 1 other pairs and further columns; supervised
    means that positives are labelled, by lists or keys. semi: all columns, so that unlabelled positives may be among
    the candidates. With options.candidates=list, candidates are further limited to the row's own list: the column of
    its pair and its further columns. With setting=supervised these are the labelled negatives of the row (Zhu et al.
    2022). With options.nu=state, which has one ν for a sample, forward raises ConfigError if positives are listed or
    duplicates=positive, unless the pair loss is the identity and, with anchors y, each rank has as many x as y.
    """

    options: CoceOptions

    def __init__(self, options: CoceOptions) -> None:
        super().__init__(options, SIDES[options.directions])

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        options, sides = self.options, SIDES[self.options.directions]
        single = batch.positives.own is not None and options.duplicates is not Duplicates.positive
        same_layout = batch.rows.sizes == batch.columns.sizes or options.directions is Directions.x
        one_anchor_per_sample = single or (options.pair_loss is PairLoss.identity and same_layout)
        if self.sample_state is not None and not one_anchor_per_sample:
            raise ConfigError(
                "objective.nu=state has one ν per sample: with several positives for a row, or other numbers of x and "
                "y, set objective.nu=closed_form (objective.pair_loss=identity has one ν for all positives of a row)"
            )
        losses = {side: self._losses(batch if side == "x" else transposed(batch)) for side in sides}
        values, metrics = self.values(losses, batch.sample_ids_b, batch.rows)
        loss = values.mean() if options.directions is Directions.mean else values.sum()
        with torch.no_grad():
            return ObjectiveResult(loss, {**score_means(batch), **metrics})

    def _losses(self, batch: GatheredBatch) -> Losses:
        """Return the losses with one row for every positive pair (i, p) of an anchor i and a positive p.

        With the identity as pair loss there is one row for every anchor i, as the identity commutes with the mean over
        positives p. Every rank must call it.
        """
        options = self.options
        if options.duplicates is Duplicates.positive:  # the own pair is one of several positives
            batch = replace(batch, positives=Pairs(batch.positives.pairs_P2))
        candidates = CandidateSet.all if options.setting is Setting.semi else CandidateSet.negatives
        related = relations(batch, PairOptions(options.name, candidates=candidates, duplicates=options.duplicates))
        batch, rows = related.batch, related.anchors[0]
        p_P, share, pair_loss = batch.pair_scores(), rows.share, pair_loss_of(options)
        weights_b = share * rows.weights(p_P)
        relevance_P, of_rows = batch.relevance, (rows.counts, weights_b, related.exclusion)
        if batch.positives.own is not None:
            return Losses(pair_loss, batch.x_bD, batch.y_MD, p_P, *of_rows, relevance_P)
        i_P, order_P = batch.positives.pairs_P2[:, 0].sort(stable=True)
        p_P, relevance_P = p_P[order_P], None if relevance_P is None else relevance_P[order_P]
        if options.pair_loss is PairLoss.identity:
            # mean_p w_p (OCE_j(s_ij) − s_ip) = w (OCE_j(s_ij) − s), w the mean of w_p, s the weighted mean of s_ip
            sums_b, relevance_b = rows.positives, None
            if relevance_P is not None:
                sums_b = torch.zeros_like(weights_b).index_add(0, i_P, relevance_P)
                relevance_b = sums_b / rows.positives.clamp(min=1)
            p_b = torch.zeros_like(weights_b).index_add(0, i_P, weighted(p_P, relevance_P) / sums_b[i_P])
            weights_b = share * rows.valid.to(share.dtype)
            of_rows = rows.counts, weights_b, related.exclusion
            return Losses(pair_loss, batch.x_bD, batch.y_MD, p_b, *of_rows, relevance_b)
        exclusion = related.exclusion and RepeatedRows(base=related.exclusion, base_rows=len(batch.x_bD), row_R=i_P)
        of_rows = rows.counts[i_P], weights_b[i_P], exclusion
        return Losses(pair_loss, batch.x_bD[i_P], batch.y_MD, p_P, *of_rows, relevance_P)


class PartialAUC(RobustObjective):
    """One-way partial AUC: mean over positives i of the OCE over negatives j of ℓ(h_j⁻ − h_i⁺) (Zhu et al. 2022).

    OCE: the optimised certainty equivalent, a robust mean. ℓ: the pair loss. x (b, 1): scores h⁺ of this rank's
    positives; y (m, 1): scores h⁻ of this rank's m negatives; each positive is compared with the negatives of all
    ranks. CVaR with α as the largest false-positive rate is the exact top-α form, KL the smooth form.
    """

    options: PartialAUCOptions

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        if y_mD is None or not x_bD.ndim == y_mD.ndim == 2 or not x_bD.shape[1] == y_mD.shape[1] == 1:
            raise ValueError(f"x and y are scores, (b, 1) and (m, 1), not {shapes(x_bD, y_mD)}")
        positives, negatives = (s.rows, s.columns) if (s := known_sizes()) else Layout.of(x_bD, y_mD)
        p_b = x_bD[:, 0].to(torch.promote_types(x_bD.dtype, torch.float32))
        counts_b = torch.full_like(p_b, negatives.total, dtype=torch.int64)
        share = positives.world_size / max(positives.total, 1) if negatives.total else 0.0
        scores = torch.ones_like(x_bD), negatives.gather(y_mD), p_b
        losses = Losses(pair_loss_of(self.options), *scores, counts_b, torch.full_like(p_b, share))
        values, metrics = self.values({"x": losses}, inputs["sample_ids_b"], positives)
        return ObjectiveResult(values.sum(), metrics)


def transposed(batch: GatheredBatch) -> GatheredBatch:
    """Exchange x and y of a batch: return a batch with this rank's y as rows and x of all ranks as columns.

    Further columns (y items that belong to no pair) are dropped, as they are no anchors; further rows (x items that
    belong to no pair) become further columns. Every rank must call it.
    """
    own, further = batch.columns.own, batch.further_rows
    pairs, relevance = batch.positives, batch.relevance
    if pairs.own is not None:
        positives = Pairs.own_columns(own.stop - own.start, batch.rows.own.start, batch.y_MD.device)
    else:
        pairs_P2, relevance = _of_columns(batch, pairs.pairs_P2, relevance)
        positives = Pairs(pairs_P2)
    excluded = None if batch.excluded is None else _of_columns(batch, batch.excluded)[0]
    keys = [(of_columns[own], batch.rows.gather(of_rows)) for of_rows, of_columns in batch.keys]
    x_MD = batch.rows.gather(batch.x_bD)
    if further is not None:
        (layout,) = Layout.of(further.x_kD)
        x_MD = torch.cat([x_MD, layout.gather(further.x_kD)])
        if further.keys_k is not None:  # the first kind of key is that of x
            keys[0] = keys[0][0], torch.cat([keys[0][1], layout.gather(further.keys_k)])
    keys, known = tuple(keys), batch.known
    if known:
        ids = known.columns_M[own], torch.arange(len(x_MD), device=x_MD.device)
        known = KnownPairs(*ids, _of_all_ranks(batch, known.listed_P2)[0].flip(1), keys if known.spared else ())
    of_pairs = positives, excluded, keys, batch.sample_ids_b
    whole = {"known": known, "relevance": relevance}
    return GatheredBatch(batch.y_MD[own], x_MD, batch.columns, batch.rows, *of_pairs, **whole)


def _of_columns(
    batch: GatheredBatch, pairs_P2: Tensor, relevance_P: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the listed pairs of all ranks whose column belongs to this rank, as (local column, global row).

    pairs_P2: this rank's pairs (local row, global column). relevance_P: the relevance of each of these pairs; None: all
    1. The second result is the relevance of the pairs returned, or None. Every rank must call it.
    """
    whole_P2, *weights = _of_all_ranks(batch, pairs_P2, *(() if relevance_P is None else (relevance_P,)))
    (i, j), own = whole_P2.unbind(1), batch.columns.own
    mine = (j >= own.start) & (j < own.stop)
    return torch.stack([j[mine] - own.start, i[mine]], 1), weights[0][mine] if weights else None


def _of_all_ranks(batch: GatheredBatch, pairs_P2: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Gather lists of (local row, another index), (P, 2), from all ranks, and convert local to global rows.

    more: tensors (P,), one number for each pair, which are gathered too. Returns the list and these tensors of all
    ranks. Every rank must call it.
    """
    (layout,) = Layout.of(pairs_P2)
    return layout.gathered(pairs_P2 + pairs_P2.new_tensor([batch.rows.own.start, 0]), *more)

"""The global batch of one step with the stored state of its samples, for the objectives of estimators.py.

Symbols as in estimators.py: ĝ_i is the mean of e^(d_ij/τ) over the negatives j of anchor i in the batch, with d_ij the
score of j minus that of the positive, and u_i the running mean of ĝ_i over the batches with sample i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.config import AUTO
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.gathered.candidates import Anchors, relations
from dyad.train.losses.gathered.sample_state import SampleState, StateRead
from dyad.train.losses.objectives.base import Objective, ObjectiveResult, score_means
from dyad.train.losses.objectives.robust import SIDES
from dyad.train.losses.options.choices import CandidateSet, Directions, Duplicates
from dyad.train.losses.options.common import PairOptions
from dyad.train.losses.options.estimators import ONE_POSITIVE, EstimatorOptions
from dyad.train.losses.sums.conditions import summed_later
from dyad.train.losses.sums.functions import weighted
from dyad.train.losses.sums.lse import Scales, log_partition
from dyad.train.losses.sums.tiles import Exclusion

Numbers = dict[str, Tensor]  # by side or by name
Step = Callable[[Numbers], tuple[Numbers, Numbers]]  # from gradients to new parameters, and metrics


def build_sample_state(options: EstimatorOptions, **initial: float) -> SampleState:
    """Create the per-sample state of an objective: log u and the entries of `initial`, for each side of its anchors.

    u: the running mean of a sample's exponentials; log u is NaN before a sample's first batch. initial: name → the
    initial value of a per-sample parameter, NaN for none. A stored name ends in the side of the anchors, _x or _y, as
    in "log_u_x". Raises ConfigError if options.num_samples is not set, or options.gamma_epochs is not set for
    gamma=auto.
    """
    if options.num_samples is None:
        raise ConfigError(
            f"objective={options.name} keeps state for every sample: say how many there are, objective.num_samples"
        )
    if options.gamma == AUTO and options.gamma_epochs is None:
        raise ConfigError(
            f"objective={options.name} with objective.gamma=auto, a schedule over the run: say how many epochs it has, "
            "objective.gamma_epochs, or choose a constant, such as objective.gamma=0.8"
        )
    numbers = {"log_u": math.nan, **initial}
    names = {f"{name}_{side}": value for side in SIDES[options.directions] for name, value in numbers.items()}
    return SampleState(options.num_samples, names, options.memory_budget_mb)


@dataclass(frozen=True)
class StateBatch:
    """The global batch of one step, its anchors by side ("x", "y") and the stored state of its samples before the step.

    batch: the batch; B: the number of pairs of all ranks. exclusion: the pairs that no sum over negatives contains,
    such as the positives. read: the state of the batch's samples. complete: whether `read` has the state stored on all
    ranks, or only that of this rank. sample_state: the state of all samples. epoch: the current epoch from 0, by the
    number of samples seen. training: whether the step changes the state. relevance_B: weights in (0, 1] of the pairs of
    all ranks, (B,); None: all 1.
    """

    batch: GatheredBatch
    exclusion: Exclusion | None
    anchors: dict[str, Anchors]
    read: StateRead
    complete: bool
    sample_state: SampleState
    options: EstimatorOptions
    epoch: int
    training: bool
    relevance_B: Tensor | None

    @staticmethod
    def of(objective: Objective, batch: GatheredBatch, complete: bool = True) -> StateBatch:
        """Return `batch` with the stored state, the anchors and the negatives of its samples. Every rank must call it.

        complete: whether to sum the state over ranks now; False: each rank has only the state that it stores, until
        `summed`. If a sample occurs twice in the batch, pairs of the sample with its copy are left out: a sample is no
        negative of itself. Further columns (y items of no pair) are candidates of anchors x, and further rows (x items
        of no pair) of anchors y; they are no anchors and have no state. Raises ConfigError if the batch lists positives
        other than the pairs (x_i, y_i).
        """
        if batch.positives.own is None:
            raise ConfigError(f"objective={objective.options.name}: a sample has one positive. {ONE_POSITIVE}")
        options, sample_state = objective.options, objective.sample_state
        assert sample_state is not None
        dtype = torch.promote_types(batch.x_bD.dtype, torch.float32)
        read = sample_state.read(batch.sample_ids_b, batch.rows, dtype, batch.sample_ids_B, complete)
        duplicates = options.duplicates
        if read.repeated and batch.sample_ids_b is not None:
            batch = replace(batch, keys=(*batch.keys, (batch.sample_ids_b, read.ids_B)))
            duplicates = Duplicates.mask
        pairs = PairOptions(options.name, candidates=CandidateSet.negatives, duplicates=duplicates)
        related = relations(batch, pairs)
        both = {"x": related.anchors[0], "y": related.anchors[1].first(batch.columns.total)}
        anchors = {side: both[side] for side in SIDES[options.directions]}
        epoch = sample_state.samples_seen // (options.samples_per_epoch or sample_state.num_samples)
        training = objective.training and torch.is_grad_enabled()
        relevance_B = None if batch.relevance is None else batch.rows.gather(batch.relevance)
        state = batch, related.exclusion, anchors, read, complete, sample_state, options, epoch, training
        return StateBatch(*state, relevance_B)

    @property
    def own(self) -> slice:
        """The slice of the global batch that holds this rank's pairs."""
        return self.batch.rows.own

    @property
    def seen(self) -> dict[str, slice]:
        """The slice of the global batch whose anchors this rank differentiates: for x its own rows, for y all rows."""
        return {side: self.own if side == "x" else slice(None) for side in self.anchors}

    def old(self, name: str) -> Numbers:
        """Return the stored entry `name` (such as "log_u") of the batch's samples before this step: side → (B,)."""
        return {side: self.read.old[f"{name}_{side}"] for side in self.anchors}

    def summed(
        self, batch: GatheredBatch, scale: Tensor | Scales, own_logits: Callable[[], Numbers], **weights: Tensor | None
    ) -> tuple[StateBatch, Numbers, dict[str, MeanEstimates]]:
        """Sum over negatives; return this batch with the whole old state, log ĝ_i, and the MeanEstimates.

        ĝ_i: the mean of e^(d_ij/τ) over the negatives j of anchor i, d_ij the score of j minus that of the positive;
        log-weights, if given, are added to d_ij/τ. The first result is complete (`complete` of `of`). The second is log
        ĝ_i of the anchors in `seen`, with gradient: side → (b,) for x and (B,) for y, −inf for an anchor without
        negatives. The third is the result of mean_estimates, without gradient.

        batch: self.batch, or a copy with other embeddings. scale: as in log_partition (sums/lse.py), but with Scales of
        the columns of pairs alone, (B,). own_logits(): the logits of the pairs (x_i, y_i), for anchors x and for
        anchors y, side → (b,). weights: row_weights_B and column_weights_M of log_partition, the latter also of the
        columns of pairs alone, (B,); further columns have the scale 1 and the log-weight 0.

        All ranks know log ĝ of all anchors y. Each rank must compute the loss of all of them, as `mean` does, since
        backward does not sum their gradients over ranks. One collective sends the column sums and the state of the
        samples of the batch. Every rank must call it.
        """
        read, dtype = self.read, torch.promote_types(batch.x_bD.dtype, torch.float32)
        counts = {side: anchors.counts.clamp(min=1).to(dtype).log() for side, anchors in self.anchors.items()}

        def shares(rows_b: Tensor) -> Tensor:
            of_pairs = own_logits()
            of_pairs |= {"x": rows_b - of_pairs["x"] - counts["x"]} if "x" in counts else {}
            own = self.batch.rows.placed(torch.stack([of_pairs[side] for side in counts]))
            return own if self.complete else torch.cat([own, torch.stack([*read.old.values()])])

        if (of_columns := weights.get("column_weights_M")) is not None:
            weights["column_weights_M"] = self._of_columns(of_columns, 0.0)
        if isinstance(scale, Scales):
            scale = replace(scale, columns_M=self._of_columns(scale.columns_M, 1.0))
        inputs = batch.x_bD, batch.y_MD, scale, batch.columns, self.exclusion
        rows_b, columns_M, numbers = log_partition(*inputs, **weights, shares=shares, whole_gradients=True)
        if batch.further_rows is not None:
            of_columns = columns_M, batch.y_MD, scale, batch.columns
            columns_M = batch.further_rows.joined(*of_columns, whole_gradients=True)
        of_pairs, old_kB = numbers.split([len(counts), len(numbers) - len(counts)])
        state = self if self.complete else replace(self, read=read.with_old(old_kB))
        logits, sums = own_logits(), {"x": rows_b, "y": columns_M[: batch.columns.total]}
        every = dict(zip(counts, of_pairs.unbind(), strict=True))
        if "y" in every:  # of all pairs; only those of this rank have a gradient in their embeddings
            logits["y"] = every["y"].slice_scatter(logits["y"], 0, self.own.start, self.own.stop)
        log_g = {side: sums[side] - logits[side] - counts[side] for side in counts}
        every |= {"y": log_g["y"].detach()} if "y" in every else {}
        return state, log_g, state.mean_estimates(every)

    def _of_columns(self, values_B: Tensor, other: float) -> Tensor:
        """Return values_B extended to all M columns, (M,), with `other` for the further columns."""
        further = len(self.batch.y_MD) - self.batch.columns.total
        return F.pad(values_B, (0, further), value=other) if further else values_B

    def mean_estimates(self, log_g: Numbers) -> dict[str, MeanEstimates]:
        """Return log ĝ and the new running means log u of all samples of the global batch, by side. Nothing is stored.

        log_g: log ĝ (the log of the batch's mean exponential) of all anchors, side → (B,). A sample in its first batch
        takes log ĝ as log u; one without negatives in this batch keeps its log u.
        """
        gamma = self.options.gamma_at(self.epoch)
        log_keep, log_take = (math.log(share) if share else -math.inf for share in (1 - gamma, gamma))
        found = {}
        for side, old_B in self.old("log_u").items():
            log_g_B = self.read.log_mean(log_g[side])
            mixed_B = torch.logaddexp(old_B + log_keep, log_g_B + log_take)
            new_B = torch.where(old_B.isnan(), log_g_B, mixed_B)
            found[side] = MeanEstimates(log_g_B, torch.where(log_g_B == -math.inf, old_B, new_B))
        return found

    def mean(self, of_anchors: Numbers, estimates: Numbers) -> Tensor:
        """Return this rank's share of the loss, 0-d, from the losses of this rank's anchors: side → (b,).

        The mean of the shares over ranks is the mean over all anchors with negatives of each side, summed or averaged
        over the sides by options.directions. estimates: side → terms for all anchors of `seen`, of which only the
        gradient is used, that of the estimator; their values are subtracted. The relevance of an anchor's pair
        multiplies its loss and its estimate, so that the gradient is that of the weighted loss, also in a temperature
        or ζ (the log-weight of NUCLR) per sample.
        """
        valid = {side: anchors.valid[anchors.own] for side, anchors in self.anchors.items()}
        of_anchors = {side: weighted(values, self._relevance(self.own)) for side, values in of_anchors.items()}
        estimates = {side: weighted(values, self._relevance(self.seen[side])) for side, values in estimates.items()}
        terms = [self.share(side) * torch.where(valid[side], of_anchors[side], 0.0).sum() for side in valid]
        for side, a in self.anchors.items():
            terms.append(self.share(side) * torch.where(a.valid, estimates[side] - estimates[side].detach(), 0.0).sum())
        return torch.stack(terms).sum()

    def _relevance(self, part: slice) -> Tensor | None:
        """Return the relevance of the pairs in a slice of the global batch; None: all 1."""
        return None if self.relevance_B is None else self.relevance_B[part]

    def share(self, side: str) -> Tensor:
        """Return the factor, 0-d, from the sum of losses of this rank's anchors to this rank's share of the loss.

        side: the side of the anchors, "x" or "y".
        """
        return self.anchors[side].share * (0.5 if self.options.directions is Directions.mean else 1.0)

    def result(self, loss: Tensor, means: dict[str, MeanEstimates], gradients: Numbers, step: Step) -> ObjectiveResult:
        """Return the loss with its metrics, and store the new log u and per-sample parameters if self.training.

        loss: this rank's share of the loss. means: log ĝ and the new running means log u, by side. gradients: this
        rank's share of the gradients in per-sample parameters, (B,) by side, maybe {}. step: a function from the sums
        of `gradients` over ranks to the new parameters, (B,) by "<name>_<side>", and further metrics, 0-d; a trainer
        sums and calls it later, see summed_later. The metric staleness is the mean |log u − log ĝ| over the anchors of
        the batch that have negatives.
        """

        def stored(sums: Tensor) -> Numbers:
            new, metrics = step(dict(zip(gradients, sums.chunk(len(means)), strict=False)))
            if self.training:
                self.sample_state.write(self.read, {f"log_u_{side}": m.log_u_B for side, m in means.items()} | new)
            return {"share_never_visited": self.sample_state.share_never_visited.to(stale), **metrics}

        counted = torch.cat([m.has_negatives_B for m in means.values()])
        off = torch.where(counted, torch.cat([m.log_u_B - m.log_g_B for m in means.values()]), 0.0).abs()
        stale, gamma = off.sum() / counted.sum().clamp(min=1), self.options.gamma_at(self.epoch)
        health = {"staleness": stale, "gamma": torch.full_like(stale, gamma)}
        health |= summed_later(torch.cat([off[:0], *gradients.values()]), self.batch.rows, stored)
        return ObjectiveResult(loss, {**score_means(self.batch), **health})


@dataclass(frozen=True)
class MeanEstimates:
    """Two estimates of the mean of e^(d_ij/τ) over the negatives j of an anchor i, for all B samples i of the batch.

    d_ij: the score of j minus that of the positive; NUCLR adds ζ_j. log_g_B (B,): log of the mean over the negatives in
    this batch; a sample that occurs more than once has the mean over its places. log_u_B (B,): log of the running mean
    over batches, this one included. A sample without negatives in this batch has log_g_B = −inf and keeps its log_u_B,
    which is NaN before its first batch with negatives. No gradients.
    """

    log_g_B: Tensor
    log_u_B: Tensor

    @property
    def has_negatives_B(self) -> Tensor:
        """Whether each sample of the global batch has negatives in the batch, (B,) bool."""
        return self.log_g_B > -math.inf

    def log_u(self, own: slice) -> Tensor:
        """Return log_u_B of the samples in the slice `own` of the global batch; 0 for samples without negatives."""
        return torch.where(self.has_negatives_B, self.log_u_B, 0.0)[own]

"""Options of the robust family (compositional OCE, partial AUC), and its presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.choices import (
    CandidateSet,
    Directions,
    Divergence,
    Duplicates,
    Nu,
    PairLoss,
    Setting,
    Similarity,
)
from dyad.train.losses.options.common import (
    DIRECTIONS,
    RELATED,
    X_NEGATIVES,
    ExpectedBatch,
    TemperatureOptions,
    number,
    preset,
)


@dataclass
class RobustOptions(TemperatureOptions):
    """Options of the robust family: the optimised certainty equivalent of a pair loss over an anchor's candidates.

    This is the worst-case mean of the loss over reweighted candidates, with a divergence that limits the weights; see
    objectives/oce.py, also for the symbols in the fields.
    """

    temperature: float = number(0.07, "τ: weight of the divergence", "above 0")
    learnable: bool = described(False, "whether τ learns: only with a radius rho")
    divergence: Divergence = described(Divergence.kl, "kl, chi2, or cvar (the mean of the top alpha share)")
    alpha: float = described(0.1, "cvar: share of the candidates that counts, in (0, 1]")
    pair_loss: PairLoss = described(PairLoss.identity, "ℓ of the score difference s_ij − s_ip")
    margin: float = described(1.0, "c of the hinges (c + d)₊")
    rho: float | None = described(None, "radius of the divergence ball: adds ρτ")
    nu: Nu = described(
        Nu.closed_form,
        "ν: solved per anchor; one that learns by SGD, from the first batch's largest; or one per sample, as state",
    )
    nu_lr: float = described(0.1, "state: step size of ν, in units of τ; a step is at most τ")
    num_samples: int | None = number(None, "state: number of samples; null: of the training data", "1 or more")
    memory_budget_mb: int = number(
        4096, "state: MiB per rank kept in memory; a larger one lies in a scratch file", "0 or more"
    )

    @property
    def by_sample_id(self) -> bool:
        return self.nu is Nu.state

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        cvar = self.divergence is Divergence.cvar
        if not 0 < self.alpha <= 1:
            yield f"objective.alpha={self.alpha}: a share of the candidates, above 0 and at most 1"
        if self.learnable and cvar:
            yield (
                "objective.learnable=true with objective.divergence=cvar: τ plays no part in CVaR. Set "
                "objective.learnable=false"
            )
        if self.learnable and self.rho is None:
            yield (
                "objective.learnable=true: the loss falls with τ whatever the data, so τ runs to its largest. Set "
                "objective.learnable=false, or a radius objective.rho"
            )
        if self.rho is not None and (cvar or not self.rho > 0):
            yield f"objective.rho={self.rho}: must be above 0, and not with divergence=cvar"
        if self.nu is Nu.state and not self.nu_lr > 0:
            yield f"objective.nu_lr={self.nu_lr}: must be above 0"


@dataclass
class CoceOptions(RobustOptions):
    """Compositional OCE: robust contrastive learning over a chosen set of candidates (Zhu et al. 2022).

    Options of the class Coce in objectives/robust.py. OCE: optimised certainty equivalent.
    """

    formula: ClassVar[str] = "robust:Coce"
    takes: ClassVar[frozenset[str]] = RELATED | X_NEGATIVES

    setting: Setting = described(
        Setting.self,
        "candidates: other pairs' items (self), all but the labelled positives (supervised), everything (semi)",
    )
    candidates: CandidateSet = described(
        CandidateSet.all, "of those of setting: all, or the row's own list alone, such as its labelled negatives"
    )
    duplicates: Duplicates = described(Duplicates.keep, "columns with equal keys: negatives, left out, or positives")
    directions: Directions = described(Directions.x, DIRECTIONS)

    @property
    def no_x_negatives_because(self) -> str:
        if self.duplicates is Duplicates.positive:
            return (
                "objective=coce with duplicates=positive: a wrong x equal to the x of a pair would be right for its y. "
                "Set objective.duplicates=mask or keep"
            )
        return super().no_x_negatives_because

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.candidates is CandidateSet.negatives:
            yield "objective.candidates=negatives: objective.setting=self leaves out positives. Set it to all or list"
        if self.candidates is CandidateSet.list and self.directions is not Directions.x:
            yield f"objective.candidates=list: columns have no lists. Set objective.directions={self.directions} to x"

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        if self.candidates is CandidateSet.list and not batch.has_lists:
            yield batch.no_lists
        one_sided = batch.pairs < 2 and batch.has_others(self.directions) and self.directions is not Directions.x
        if one_sided and self.setting is not Setting.semi:  # further y are no anchors: no y has another x
            yield f"objective.directions={self.directions}: {batch.no_others}"
        several = batch.several or self.duplicates is Duplicates.positive
        if self.nu is Nu.state and several and self.pair_loss is not PairLoss.identity:
            yield (
                "objective.nu=state keeps one ν for a sample, and a row has several positives: set "
                "objective.nu=closed_form"
            )


@dataclass
class PartialAUCOptions(RobustOptions):
    """One-way partial AUC: every positive score x (b, 1) against all negative scores y (m, 1).

    Options of the class PartialAUC in objectives/robust.py.
    """

    formula: ClassVar[str] = "robust:PartialAUC"
    inputs: ClassVar[str] = "scores"

    similarity: Similarity = described(Similarity.dot, "x and y are scores: dot")
    divergence: Divergence = described(Divergence.cvar, "cvar: alpha is the largest false-positive rate; kl: smooth")

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.similarity is Similarity.cosine:
            yield "objective.similarity=cosine: partial_auc takes scores, not embeddings; set objective.similarity=dot"


OBJECTIVES = [preset("coce", CoceOptions), preset("partial_auc", PartialAUCOptions)]

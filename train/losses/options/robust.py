"""Options of the robust (compositional OCE) family, and its objectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from dyad.data.config import described
from dyad.train.losses.options.common import (
    DIRECTIONS,
    NONE_IN_ONE,
    Directions,
    Duplicates,
    ExpectedBatch,
    ObjectiveRow,
    Similarity,
    TemperatureOptions,
    number,
)

Divergence = Enum("Divergence", {"kl": "kl", "chi2": "chi2", "cvar": "cvar"})
PairLoss = Enum(
    "PairLoss",
    {"identity": "identity", "hinge": "hinge", "squared_hinge": "squared_hinge", "logistic": "logistic"},
)
Setting = Enum("Setting", {"supervised": "supervised", "semi": "semi", "self": "self"})
Nu = Enum("Nu", {"closed_form": "closed_form", "sgd": "sgd", "state": "state"})


@dataclass
class RobustOptions(TemperatureOptions):
    """The optimised certainty equivalent of a pair loss over an anchor's candidates."""

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

    def broken_rules(self) -> dict[str, bool]:
        cvar = self.divergence is Divergence.cvar
        return {
            **super().broken_rules(),
            f"objective.alpha={self.alpha}: a share of the candidates, above 0 and at most 1": not 0 < self.alpha <= 1,
            "objective.learnable=true with objective.divergence=cvar: τ plays no part in CVaR. "
            "Set objective.learnable=false": self.learnable and cvar,
            "objective.learnable=true: the loss falls with τ whatever the data, so τ runs to its largest. "
            "Set objective.learnable=false, or a radius objective.rho": self.learnable and self.rho is None,
            f"objective.rho={self.rho}: must be above 0, and not with divergence=cvar": (
                self.rho is not None and (cvar or not self.rho > 0)
            ),
            f"objective.nu_lr={self.nu_lr}: must be above 0": self.nu is Nu.state and not self.nu_lr > 0,
        }


@dataclass
class CoceOptions(RobustOptions):
    """Compositional OCE: robust contrastive learning over a chosen set of candidates (Zhu et al. 2022)."""

    formula: ClassVar[str] = "dyad.train.losses.objectives.robust:Coce"

    setting: Setting = described(
        Setting.self,
        "candidates: other pairs' items (self), all but the labelled positives (supervised), everything (semi)",
    )
    duplicates: Duplicates = described(Duplicates.keep, "columns with equal keys: negatives, left out, or positives")
    directions: Directions = described(Directions.x, DIRECTIONS)

    def broken_by(self, batch: ExpectedBatch) -> dict[str, bool]:
        several = batch.several or self.duplicates is Duplicates.positive
        one_each = self.pair_loss is PairLoss.identity
        no_negatives = batch.without_negatives if self.directions is Directions.x else batch.pairs < 2
        return {
            **super().broken_by(batch),
            f"objective.setting={self.setting.value}: {NONE_IN_ONE}": self.setting is not Setting.semi and no_negatives,
            "objective.nu=state keeps one ν for a sample, and a row has several positives: set "
            "objective.nu=closed_form": self.nu is Nu.state and several and not one_each,
        }


@dataclass
class PartialAUCOptions(RobustOptions):
    """One-way partial AUC: every positive score x (b, 1) against all negative scores y (m, 1)."""

    formula: ClassVar[str] = "dyad.train.losses.objectives.robust:PartialAUC"
    inputs: ClassVar[str] = "scores"

    similarity: Similarity = described(Similarity.dot, "x and y are scores: dot")
    divergence: Divergence = described(Divergence.cvar, "cvar: alpha is the largest false-positive rate; kl: smooth")

    def broken_rules(self) -> dict[str, bool]:
        return {
            **super().broken_rules(),
            "objective.similarity=cosine: partial_auc takes scores, not embeddings; set objective.similarity=dot": (
                self.similarity is Similarity.cosine
            ),
        }


OBJECTIVES = [
    ObjectiveRow("coce", CoceOptions),
    ObjectiveRow("partial_auc", PartialAUCOptions),
]

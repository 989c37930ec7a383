"""The objectives by name. Each is a module: see train/losses/base.py for what it takes and returns.

The formulas stand in softmax.py, robust.py, logistic.py, cpc.py, spectral.py and estimators.py.
"""

from __future__ import annotations

from typing import Any

from train.losses.base import Objective, Result
from train.losses.config import configure
from train.losses.cpc import Cpc
from train.losses.estimators import FastClipV0, FastClipV3, ISogCLR, Nuclr, SogCLR
from train.losses.logistic import BinaryNce, LocalNce, Nce
from train.losses.robust import Coce, PartialAUC
from train.losses.softmax import OneSidedDPM, SimCLR, SoftmaxObjective
from train.losses.spectral import PcaPenalty, Spectral, SpectralAlternating
from train.losses.strip import Columns

OBJECTIVES: dict[str, type[Objective]] = {
    "symmetric_dpm": SoftmaxObjective,
    "clip": SoftmaxObjective,
    "gcl": SoftmaxObjective,
    "one_sided_dpm": OneSidedDPM,
    "info_nce": SoftmaxObjective,
    "simclr": SimCLR,
    "dpr": SoftmaxObjective,
    "epr": SoftmaxObjective,
    "coce": Coce,
    "cross_entropy": SoftmaxObjective,
    "listwise_ce": SoftmaxObjective,
    "partial_auc": PartialAUC,
    "nce": Nce,
    "binary_nce": BinaryNce,
    "local_nce": LocalNce,
    "siglip": LocalNce,
    "cpc": Cpc,
    "sogclr": SogCLR,
    "isogclr": ISogCLR,
    "fastclip_v0": FastClipV0,
    "fastclip_v3": FastClipV3,
    "nuclr": Nuclr,
    "spectral": Spectral,
    "spectral_alternating": SpectralAlternating,
    "pca_penalty": PcaPenalty,
}


def build_objective(name: str, **options: Any) -> Objective:
    """The objective `name` of OBJECTIVES; options: the fields of its dataclass in train/losses/options.

    Raises ConfigError for an unknown name or option, a bad value, or options that exclude each other.
    """
    config = configure(name, **options)
    return OBJECTIVES[name](config)


__all__ = ["OBJECTIVES", "Columns", "Result", "build_objective"]

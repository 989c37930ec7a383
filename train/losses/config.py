"""The options of every objective by name, and making them from what a user says. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, nearest
from train.losses.options import estimators, logistic, robust, softmax, spectral
from train.losses.options.common import ObjectiveOptions

CONFIGS: dict[str, type[ObjectiveOptions]] = {
    "symmetric_dpm": softmax.SymmetricDPMOptions,
    "clip": softmax.ClipOptions,
    "gcl": softmax.GclOptions,
    "one_sided_dpm": softmax.OneSidedDPMOptions,
    "info_nce": softmax.InfoNCEOptions,
    "simclr": softmax.SimCLROptions,
    "dpr": softmax.DprOptions,
    "epr": softmax.EprOptions,
    "coce": robust.CoceOptions,
    "cross_entropy": softmax.CrossEntropyOptions,
    "listwise_ce": softmax.ListwiseCEOptions,
    "partial_auc": robust.PartialAUCOptions,
    "nce": logistic.NceOptions,
    "binary_nce": logistic.BinaryNceOptions,
    "local_nce": logistic.LocalNceOptions,
    "siglip": logistic.SiglipOptions,
    "cpc": logistic.CpcOptions,
    "sogclr": estimators.SogCLROptions,
    "isogclr": estimators.ISogCLROptions,
    "fastclip_v0": estimators.FastClipV0Options,
    "fastclip_v3": estimators.FastClipV3Options,
    "nuclr": estimators.NuclrOptions,
    "spectral": spectral.SpectralOptions,
    "spectral_alternating": spectral.SpectralAlternatingOptions,
    "pca_penalty": spectral.PcaPenaltyOptions,
}


def configure(name: str, **options: Any) -> ObjectiveOptions:
    """The options of objective `name`; choices may be given as str.

    Raises ConfigError for an unknown name or option (with the nearest one), a value of the wrong type or out of range,
    and options that exclude each other.
    """
    if name not in CONFIGS:
        raise ConfigError(f"objective={name}: no such objective.{nearest(name, CONFIGS)} Choices: {', '.join(CONFIGS)}")
    known = [f.name for f in fields(CONFIGS[name]) if f.name != "name"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"objective.{option}: {name} has no such option.{nearest(option, known)} Options: {', '.join(known)}"
            )
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CONFIGS[name]), options))
    except OmegaConfBaseException as error:
        raise ConfigError(f"objective.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, ObjectiveOptions)
    return config

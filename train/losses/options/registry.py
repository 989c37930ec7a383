"""The objectives by name, and building one from what a user says.

This module imports no torch: the module with the formula is imported when an objective is built. To add an objective,
write its formula and a row beside its options in train/losses/options.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError, nearest
from dyad.train.losses.options import estimators, logistic, robust, softmax, spectral
from dyad.train.losses.options.common import ObjectiveOptions, ObjectiveRow

if TYPE_CHECKING:
    from dyad.train.losses.objectives.base import Objective

OBJECTIVES: dict[str, ObjectiveRow] = {
    row.name: row for family in (softmax, robust, logistic, estimators, spectral) for row in family.OBJECTIVES
}


def configure(name: str, **options: Any) -> ObjectiveOptions:
    """The options of objective `name`; choices may be given as str.

    Raises ConfigError for an unknown name or option (with the nearest one), a value of the wrong type or out of range,
    and options that exclude each other.
    """
    if name not in OBJECTIVES:
        choices = ", ".join(OBJECTIVES)
        raise ConfigError(f"objective={name}: no such objective.{nearest(name, OBJECTIVES)} Choices: {choices}")
    config = OBJECTIVES[name].options
    names = [f.name for f in fields(config) if f.name != "name"]
    for option in options:
        if option not in names:
            raise ConfigError(
                f"objective.{option}: {name} has no such option.{nearest(option, names)} Options: {', '.join(names)}"
            )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), options))  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(f"objective.{error.full_key}: {str(error).splitlines()[0]}") from error


def build_objective(name: str, **options: Any) -> Objective:
    """The objective `name` of OBJECTIVES; options: the fields of its dataclass in train/losses/options.

    Raises ConfigError for an unknown name or option, a bad value, or options that exclude each other.
    """
    config = configure(name, **options)
    return OBJECTIVES[name].load()(config)

"""The objectives by name, and the check of the options that a user gives to one.

To add an objective, write its options class and a preset in train/losses/options/<family>.py, the choices of its
options in choices.py beside it, and its formula in train/losses/objectives/<family>.py.
"""

from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError, nearest
from dyad.train.losses.options import (
    distillation,
    estimators,
    likelihood,
    logistic,
    robust,
    scored_pairs,
    softmax,
    spectral,
)
from dyad.train.losses.options.common import ObjectiveOptions

OBJECTIVES: dict[str, type[ObjectiveOptions]] = {
    options.name: options
    for family in (softmax, robust, logistic, estimators, spectral, likelihood, distillation, scored_pairs)
    for options in family.OBJECTIVES
}


def configure(name: str, **options: Any) -> ObjectiveOptions:
    """Build and check the options of the objective `name`, a key of OBJECTIVES.

    options: name of an option → its value; a member of an enum may be given as text. Options that are not given have
    the defaults of the preset. Raises ConfigError for an unknown name or option, a value of the wrong type or out of
    range, and options that exclude each other.
    """
    if name not in OBJECTIVES:
        choices = ", ".join(OBJECTIVES)
        raise ConfigError(f"objective={name}: no such objective.{nearest(name, OBJECTIVES)} Choices: {choices}")
    names = [f.name for f in fields(OBJECTIVES[name]) if f.name != "name"]
    for option in options:
        if option not in names:
            raise ConfigError(
                f"objective.{option}: {name} has no such option.{nearest(option, names)} Options: {', '.join(names)}"
            )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OBJECTIVES[name]), options))  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(f"objective.{error.full_key}: {str(error).splitlines()[0]}") from error

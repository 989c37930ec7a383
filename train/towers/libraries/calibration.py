"""The scale and bias of the logit of a pair that pretrained weights hold beside the towers. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dyad.data.base.errors import ConfigError, first_line
from dyad.train.losses.options.common import ObjectiveOptions
from dyad.train.towers.libraries.published import file_of, read_json

SETTINGS = "dyad.json"  # file of an export with the settings that the format of the export has no place for


@dataclass(frozen=True)
class Calibration:
    """The scale and bias with which weights were trained: the logit of a pair is exp(logit_scale) · s + logit_bias.

    s: the score of the pair. similarity: how s is computed, "cosine" or "dot". logit_bias: None for weights trained
    with a softmax, which has no bias. source: the configuration key and value that named the weights, for the log.
    """

    source: str
    logit_scale: float
    logit_bias: float | None = None
    similarity: str = "cosine"

    @classmethod
    def of(cls, source: str, logit_scale: Any, logit_bias: Any = None) -> "Calibration | None":
        """Return a Calibration, for cosine similarity, of scale and bias: tensors with one element, numbers or None.

        Returns None if logit_scale is None, or is a tensor on the meta device, which has no value. source: as of the
        class.
        """
        if logit_scale is None or getattr(logit_scale, "is_meta", False):
            return None
        scale, bias = (tensor.item() if hasattr(tensor, "item") else tensor for tensor in (logit_scale, logit_bias))
        return cls(source, float(scale), None if bias is None else float(bias))

    @classmethod
    def of_run(cls, source: str, weights: Mapping[str, Any], options: ObjectiveOptions) -> "Calibration | None":
        """Return the Calibration of a checkpoint of this program; None if its objective has no temperature.

        source: as of the class. weights: the tensors of the checkpoint by name, such as Checkpoint.weights(). options:
        the options of its objective, which give the similarity and say whether there is a bias.
        """
        bias = weights.get("objective.bias") if options.has_logit_bias else None
        known = cls.of(source, weights.get("objective.logit_scale"), bias)
        return known and replace(known, similarity=options.similarity.value)

    @property
    def temperature(self) -> float:
        """The temperature τ = exp(−logit_scale), by which the logit divides scores."""
        return math.exp(-self.logit_scale)


def exported(name: str, source: str = "") -> tuple[dict[str, Any], Calibration | None]:
    """Return the configuration keys (name → value) and the Calibration in the file SETTINGS of an export of Dyad.

    The keys are dotted, such as "objective.similarity". The Calibration is None if the objective had no temperature.
    Returns ({}, None) for a model without this file, and for one that cannot be reached. name: a folder,
    pkg:PACKAGE/FOLDER or a published model, of which the file is downloaded if the hub's cache lacks it. source: as in
    Calibration. Raises ConfigError for a damaged file, and for a link that leads out of the folder.
    """
    path = file_of(name, SETTINGS, fetch=True)
    saved = {} if path is None else read_json(path)
    try:
        keys = dict(saved.get("keys", {}))
        known = Calibration.of(source, saved.get("logit_scale"), saved.get("logit_bias"))
        return keys, known and replace(known, similarity=str(keys.get("objective.similarity", known.similarity)))
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not of an export of this version: {first_line(error)}") from error

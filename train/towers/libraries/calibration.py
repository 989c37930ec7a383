"""What weights know of the logit of a pair, beside the towers: its scale and bias. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dyad.data.base.errors import ConfigError, first_line
from dyad.train.losses.options.common import ObjectiveOptions
from dyad.train.towers.libraries.published import file_of, read_json

SETTINGS = "dyad.json"  # of an export: what its format has no place for


@dataclass(frozen=True)
class Calibration:
    """What weights know of the logit of a pair with score s: exp(logit_scale) · s + logit_bias.

    source: the key and value that named the weights, for the log. logit_bias: None for a softmax, which has none.
    similarity: what s is, cosine or dot.
    """

    source: str
    logit_scale: float
    logit_bias: float | None = None
    similarity: str = "cosine"

    @classmethod
    def of(cls, source: str, logit_scale: Any, logit_bias: Any = None) -> "Calibration | None":
        """Make one of tensors with one element, or numbers; None without a scale, or on the meta device."""
        if logit_scale is None or getattr(logit_scale, "is_meta", False):
            return None
        scale, bias = (tensor.item() if hasattr(tensor, "item") else tensor for tensor in (logit_scale, logit_bias))
        return cls(source, float(scale), None if bias is None else float(bias))

    @classmethod
    def of_run(cls, source: str, weights: Mapping[str, Any], options: ObjectiveOptions) -> "Calibration | None":
        """Return that of a checkpoint of ours. weights: its tensors by name. options: of its objective."""
        bias = weights.get("objective.bias") if options.has_logit_bias else None
        known = cls.of(source, weights.get("objective.logit_scale"), bias)
        return known and replace(known, similarity=options.similarity.value)

    @property
    def temperature(self) -> float:
        """The temperature τ = exp(−logit_scale), by which scores are divided."""
        return math.exp(-self.logit_scale)


def exported(name: str, source: str = "") -> tuple[dict[str, Any], Calibration | None]:
    """Return the keys of our configuration that an export of ours keeps in its file SETTINGS, and its calibration.

    Both are empty for another model. source: as of Calibration. Raises ConfigError for a damaged file.
    """
    path = file_of(name, SETTINGS, fetch=True)
    saved = {} if path is None else read_json(path)
    try:
        keys = dict(saved.get("keys", {}))
        known = Calibration.of(source, saved.get("logit_scale"), saved.get("logit_bias"))
        return keys, known and replace(known, similarity=str(keys.get("objective.similarity", known.similarity)))
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not of an export of this version: {first_line(error)}") from error

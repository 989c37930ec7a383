"""Check the state of AdamW in a checkpoint that a stranger may have written."""

from collections.abc import Mapping
from typing import Any

from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import ConfigError


def refuse_moments(slots: Mapping[int, Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise ConfigError if state of a parameter, by its position, is none of AdamW. The fused kernel believes shapes:
    it would write behind the end of a short tensor."""
    if not isinstance(optimizer, AdamW):
        return
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        shapes = {key: getattr(value, "shape", None) for key, value in slots.get(i, {}).items()}
        if shapes and shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            of = ", ".join(f"{key} {'' if shape is None else tuple(shape)}".strip() for key, shape in shapes.items())
            raise ConfigError(f"optimiser state of a weight {tuple(parameter.shape)} is none of AdamW: {of}")

"""Optimisers of timm by name (optim.name). One whose state a checkpoint cannot hold is refused at the start."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, first_line, nearest
from dyad.train.config import OptimConfig
from dyad.train.run_folder.checkpoint import capture

TO_LIST = 'python -c "import timm.optim; print(*timm.optim.list_optimizers())"'


def optimizer_of_timm(groups: Sequence[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Build timm's optimiser `config.name` over `groups` of parameters.

    Learning rate and weight decay are those of `config`; all else is timm's default or in config.options, also β and ε,
    whose usual values differ between optimisers. Raises ConfigError for a name or option that timm does not have, for a
    package that is not installed, and for an optimiser whose state is neither tensors nor numbers.
    """
    from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

    if config.name not in (names := [*map(str, list_optimizers())]):
        raise ConfigError(f"optim.name={config.name}: no such optimiser.{nearest(config.name, names)} All: {TO_LIST}")

    def build(groups: Sequence[dict[str, Any]]) -> Optimizer:
        own = {"lr": config.lr, "weight_decay": config.weight_decay}
        return create_optimizer_v2(groups, config.name, **own, **config.options)

    device = groups[0]["params"][0].device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a step, to see that it can be saved
            module = nn.Linear(3, 3, device=device)
            trial = build([{"params": [*module.parameters()], "lr_scale": 1.0}])
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            trial.step()
            capture({"": module}, trial, 1, {})
        return build(groups)
    except Exception as error:  # whatever its code makes of options, packages and devices
        raise ConfigError(f"optim.name={config.name}, optim.options={config.options}: {first_line(error)}") from error

"""Optimisers of timm by name (optim.name). One whose state a checkpoint cannot hold to the bit is refused."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyad.data.base.errors import ConfigError, first_line, nearest
from dyad.train.config import OptimConfig
from dyad.train.run_folder.checkpoint import capture, restore

TO_LIST = 'python -c "import timm.optim; print(*timm.optim.list_optimizers())"'


def optimizer_of_timm(groups: Sequence[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Build timm's optimiser `config.name` over `groups` of parameters.

    Learning rate and weight decay are those of `config`; all else is timm's default or in config.options, also β and ε,
    whose usual values differ between optimisers. Raises ConfigError for a name or option that timm does not have, for a
    package that is not installed, and for an optimiser that could not go on exactly from a checkpoint.
    """
    from timm.optim import create_optimizer_v2, list_optimizers

    if config.name not in (names := list_optimizers()):
        raise ConfigError(
            f"optim.name={config.name}: no such optimiser.{nearest(config.name, names)} To list them: {TO_LIST}"
        )

    def build(groups: Sequence[dict[str, Any]]) -> Optimizer:
        own = {"lr": config.lr, "weight_decay": config.weight_decay}
        return create_optimizer_v2(groups, config.name, **own, **config.options)

    device = groups[0]["params"][0].device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            resumes = _resumes(build, device)
        optimizer = build(groups)
    except Exception as error:  # whatever its code makes of options, packages and devices
        raise ConfigError(f"optim.name={config.name}, optim.options={config.options}: {first_line(error)}") from error
    if not resumes:
        raise ConfigError(f"optim.name={config.name}: keeps numbers that no checkpoint holds. Take another optimiser")
    return optimizer


def _resumes(build: Callable[[Sequence[dict[str, Any]]], Optimizer], device: torch.device) -> bool:
    """Whether an optimiser goes on to the bit from what a checkpoint holds of it: tried on a few small parameters."""

    def small() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 6)).to(device)
        return module, build([{"params": [*module.parameters()], "lr_scale": 1.0}])

    def train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

    (module, optimizer), (other, fresh) = small(), small()
    train(module, optimizer, range(3))
    restore(deepcopy(capture({"": module}, optimizer, 3, {})), {"": other}, fresh)
    train(module, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))

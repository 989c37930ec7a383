"""Build the optimiser, AdamW or one of timm, with open_clip's rule for weight decay; learning rates by layer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import ConfigError, first_line, nearest
from dyad.train.config import OptimConfig
from dyad.train.run_folder.checkpoint_state import capture

FUSED = {"cpu", "cuda"}  # devices for which torch has AdamW as one kernel
LAYER = re.compile(r"(.*?\.)??\d+\.")  # the beginning of a parameter's name up to its first number, that of its layer
TO_LIST = 'python -c "import timm.optim; print(*timm.optim.list_optimizers())"'


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig, scales: Mapping[str, float] | None = None
) -> Optimizer:
    """Build the optimiser optim.name over the parameters that require gradients.

    named_parameters: (name, parameter) pairs; a parameter that occurs twice counts once, under its last name. config:
    the keys optim.*. scales: name → factor of the learning rate, 1 for all other parameters. The factor is only stored,
    as the entry "lr_scale" of a parameter group: the caller multiplies by it. Parameters with fewer than two
    dimensions, or with bn, ln, bias or logit_scale in their name, get no weight decay, as in open_clip_train 3.3.
    Raises ConfigError if no parameter requires gradients, for an optimiser or options that timm does not have, and for
    an optimiser that lacks a package or whose state a checkpoint cannot hold.
    """
    trained = {id(p): (name, p) for name, p in named_parameters if p.requires_grad}.values()
    if not trained:
        raise ConfigError("nothing trains: both towers are frozen and the temperature does not learn")
    parameters: dict[tuple[bool, float, bool], list[Parameter]] = {}
    for name, p in trained:
        decays = p.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        key = not decays, (scales or {}).get(name, 1.0), isinstance(p, DTensor)  # torch mixes no sharded with others
        parameters.setdefault(key, []).append(p)
    groups = [
        {"params": params, "weight_decay": 0.0 if is_plain else config.weight_decay, "lr_scale": scale}
        for (is_plain, scale, _), params in sorted(parameters.items(), key=lambda item: item[0])
    ]
    if config.name != "adamw":
        return _of_timm(groups, config)
    fused = all(p.device.type in FUSED for _, p in trained)
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def _of_timm(groups: Sequence[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Build timm's optimiser `config.name` over the parameter groups `groups`.

    Learning rate and weight decay are those of `config`. All other arguments, also β and ε, are in config.options or
    timm's defaults, as their usual values differ between optimisers. Raises ConfigError for a name or option that timm
    does not have, for a package that is not installed, and for an optimiser whose state a checkpoint cannot hold
    because it is neither tensors nor numbers: a trial on a small module finds these.
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


def learning_rate_scales(towers: nn.Module, decay: float) -> dict[str, float]:
    """Return "towers.<name of a parameter>" → factor of its learning rate, for the parameters in trunks of `towers`.

    The factor is decay (optim.layer_decay) to the power (largest depth of the trunk − depth of the parameter), as in
    BEiT (Bao et al. 2022, arXiv 2106.08254). The depths are those of `layer_depths`: 0 before the layers (embeddings,
    stem), i in layer i.

    towers: a TwoTower. Projections and the temperature are not in the result: their factor is 1.
    """
    scales: dict[str, float] = {}
    for tower, module in towers.named_children():
        depths = layer_depths(cast(nn.Module, module.trunk))
        top = max(depths.values(), default=0)
        scales |= {f"towers.{tower}.trunk.{name}": decay ** (top - depth) for name, depth in depths.items()}
    return scales


def layer_depths(trunk: nn.Module) -> dict[str, int]:
    """Return name of a parameter → depth of its layer, counted from 0, for every parameter of a trunk.

    The layers of a timm model, also inside an open_clip tower, are those of its group_matcher. The layers of any other
    trunk are its numbered modules (as in "blocks.3.") in the order of its parameters: the blocks of open_clip's towers,
    the layers of transformers, the blocks of each stage of a ResNet. These n layers have depths 1 to n; a parameter
    outside of them has depth 0 before the first layer, n + 1 after it. A parameter outside of the timm model has the
    largest depth in it.
    """
    names = [name for name, _ in trunk.named_parameters()]
    for prefix, module in trunk.named_modules():
        if matcher := getattr(module, "group_matcher", None):
            from timm.models import group_parameters

            found = cast(dict[str, int], group_parameters(module, matcher(), reverse=True))
            listed = {f"{prefix}.{name}".removeprefix("."): depth for name, depth in found.items()}
            return {name: listed.get(name, max(found.values())) for name in names}
    blocks: list[Any] = [found and found[0] for found in map(LAYER.match, names)]
    order = {block: depth for depth, block in enumerate(dict.fromkeys(filter(None, blocks)), start=1)}
    before = next((i for i, block in enumerate(blocks) if block), len(names))
    return {
        name: order.get(block, 0 if i < before else len(order) + 1)
        for i, (name, block) in enumerate(zip(names, blocks, strict=True))
    }

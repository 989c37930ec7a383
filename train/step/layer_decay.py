"""Layer-wise learning rates (optim.layer_decay): a tower's layer trains at the rate of the next one times the decay.

As in BEiT (Bao et al. 2022, arXiv 2106.08254): of a trunk with n layers, what precedes the layers (embeddings, stem)
has depth 0, layer i has depth i, and what follows (the last norm, the pooling) has depth n + 1 and the full rate.
"""

import re
from typing import Any, cast

from torch import nn

BLOCK = re.compile(r"(.*?\.)??\d+\.")  # of a parameter's name: up to its first number, the number of its layer


def learning_rate_scales(towers: nn.Module, decay: float) -> dict[str, float]:
    """Return "towers.<name of a parameter>" → factor of its learning rate, for the parameters in trunks of `towers`.

    towers: a TwoTower. Projections and the temperature are not in the result: they train at the rate of the schedule.
    """
    scales: dict[str, float] = {}
    for tower, module in towers.named_children():
        depths = layer_depths(cast(nn.Module, module.trunk))
        top = max(depths.values(), default=0)
        scales |= {f"towers.{tower}.trunk.{name}": decay ** (top - depth) for name, depth in depths.items()}
    return scales


def layer_depths(trunk: nn.Module) -> dict[str, int]:
    """Return name of a parameter → depth of its layer, counted from 0, for every parameter of a trunk.

    The layers of a timm model, also inside an open_clip tower, are those that timm itself lists for this purpose. Of
    any other trunk they are its numbered modules in the order of its parameters: blocks of open_clip's towers, layers
    of transformers, stages of a ResNet block by block.
    """
    names = [name for name, _ in trunk.named_parameters()]
    for prefix, module in trunk.named_modules():
        if matcher := getattr(module, "group_matcher", None):
            from timm.models import group_parameters

            found = cast(dict[str, int], group_parameters(module, matcher(), reverse=True))
            listed = {f"{prefix}.{name}".removeprefix("."): depth for name, depth in found.items()}
            return {name: listed.get(name, max(found.values())) for name in names}
    blocks: list[Any] = [found and found[0] for found in map(BLOCK.match, names)]
    order = {block: depth for depth, block in enumerate(dict.fromkeys(filter(None, blocks)), start=1)}
    before = next((i for i, block in enumerate(blocks) if block), len(names))
    return {
        name: order.get(block, 0 if i < before else len(order) + 1)
        for i, (name, block) in enumerate(zip(names, blocks, strict=True))
    }

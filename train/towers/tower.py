"""A tower (inputs of one kind → embeddings), a pair of towers, and functions that freeze parts of a tower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn

from dyad.train.towers.frozen_cache import FrozenCache


class Tower(nn.Module):
    """Embeds inputs: (b, …) → prepare → trunk → projection → (b, D), not normalised.

    If no parameter of the trunk trains, the trunk's outputs are cached (FrozenCache) and have no autograd graph. Frozen
    modules stay in eval() mode. cache_bytes, pad: the arguments `capacity` and `pad` of FrozenCache.
    """

    def __init__(
        self,
        trunk: nn.Module,
        projection: nn.Module,
        *,
        prepare: nn.Module | None = None,
        cache_bytes: int = 0,
        pad: int | None = None,
    ) -> None:
        super().__init__()
        self.prepare, self.trunk, self.projection = prepare or nn.Identity(), trunk, projection
        self._frozen_cache = FrozenCache(cache_bytes, pad) if _is_frozen(trunk) else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self._frozen_cache is None:
            return self.projection(self.features(inputs))
        # A change of precision or of any weight (which raises its version) empties the cache.
        weights = [*self.trunk.parameters(), *self.trunk.buffers()]
        depends_on = (precision_of(inputs.device), *((t.data_ptr(), t._version) for t in weights))
        return self.projection(self._frozen_cache(self.features, inputs, depends_on))

    def features(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the tower's trunk for `inputs` (b, …), before the projection, without the cache."""
        return self.trunk(self.prepare(inputs))

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        for module in self.trunk.modules():
            if _is_frozen(module):
                module.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile only the trunk of the tower, with the arguments of torch.compile; the cache is plain Python."""
        self.trunk.compile(*args, **kwargs)


class TwoTower(nn.Module):
    """Holds x_tower and y_tower, which each embed (b, …) inputs as (b, D), not normalised.

    When the two towers share weights, both are the same module.
    """

    def __init__(self, x_tower: nn.Module, y_tower: nn.Module) -> None:
        super().__init__()
        self.x_tower, self.y_tower = x_tower, y_tower


def precision_of(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the torch.autocast context that this call runs in, for `device`; None outside of autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def freeze(trunk: nn.Module, parts: Sequence[nn.Module], count: int) -> None:
    """Freeze `trunk` except for the last `count` layers of `parts`, and what follows them in trunk.parameters().

    parts: layers of the trunk, in the order in which trunk.parameters() yields their parameters. count=0 freezes all.
    """
    trunk.requires_grad_(False)
    if count > 0:
        first = next(parts[-min(count, len(parts))].parameters())
        for parameter in dropwhile(lambda p: p is not first, trunk.parameters()):
            parameter.requires_grad_(True)


def _is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)

"""A tower (inputs of one kind → embeddings), a pair of towers, and the freezing that builders share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn

from dyad.train.towers.frozen_cache import FrozenCache


class Tower(nn.Module):
    """Inputs (b, …) → prepare → trunk → projection → (b, D), not normalised.

    If no parameter of the trunk trains, its outputs are cached (FrozenCache) and have no graph. Frozen modules stay in
    eval(). cache_bytes, pad: `capacity` and `pad` of FrozenCache.
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
        """The outputs of the trunk, computed without the cache: what the projection takes."""
        return self.trunk(self.prepare(inputs))

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        for module in self.trunk.modules():
            if _is_frozen(module):
                module.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the trunk only: the cache is Python."""
        self.trunk.compile(*args, **kwargs)


class TwoTower(nn.Module):
    """x_tower and y_tower, each (b, …) inputs → (b, D) embeddings, not normalised. Sharing weights: the same module."""

    def __init__(self, x_tower: nn.Module, y_tower: nn.Module) -> None:
        super().__init__()
        self.x_tower, self.y_tower = x_tower, y_tower


def precision_of(device: torch.device) -> torch.dtype | None:
    """The dtype of the surrounding autocast on this device, None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def freeze(trunk: nn.Module, parts: Sequence[nn.Module], count: int) -> None:
    """Freeze `trunk` except for the last `count` of its `parts` and all parameters after them."""
    trunk.requires_grad_(False)
    if count > 0:
        first = next(parts[-min(count, len(parts))].parameters())
        for parameter in dropwhile(lambda p: p is not first, trunk.parameters()):
            parameter.requires_grad_(True)


def _is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)

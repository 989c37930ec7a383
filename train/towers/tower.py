"""A tower (inputs of one kind → embeddings), a pair of towers, and the precision in which towers compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.batch import Lengths
from dyad.train.towers.frozen_cache import FrozenCache
from dyad.train.towers.text.rows import Grouped

COLOURS = 3  # channels of an image
_TF32_LOCK, _TF32_BEFORE = Lock(), list[str]()  # the precisions that threads found, of `tf32_products`


class Tower(nn.Module):
    """Embeds inputs (b, …) as (b, D), by the modules prepare, trunk and projection, one after the other.

    Embeddings are not normalised: objectives and evaluation normalise them. prepare=None: the trunk gets the inputs
    unchanged. If the trunk has parameters, and none trains when the tower is made, its outputs are cached (FrozenCache)
    and have no autograd graph. Modules of the trunk that have parameters, all of them frozen, stay in eval() mode, with
    all modules in them. cache_mb: size of the cache in MiB (model.frozen_cache_mb); 0: nothing is cached; None: 512 on
    CPUs, 0 on GPUs.
    """

    def __init__(
        self, trunk: nn.Module, projection: nn.Module, *, prepare: nn.Module | None = None, cache_mb: int | None = 0
    ) -> None:
        super().__init__()
        self.prepare, self.trunk, self.projection = prepare or nn.Identity(), trunk, projection
        capacity = None if cache_mb is None else cache_mb << 20
        texts = (trunk.count, trunk.fills) if isinstance(trunk, Grouped) and not trunk.one_length else None
        self._frozen_cache = FrozenCache(capacity, texts) if _is_frozen(trunk) else None

    def forward(self, inputs: Tensor, lengths: Lengths | None = None) -> Tensor:
        """Embed inputs (b, …) as (b, D).

        lengths: for texts, the number of tokens of each row that the trunk needs, int64 (b,) in NumPy; None: the inputs
        are no texts, the trunk needs all tokens, or they are to be counted here.
        """
        if self._frozen_cache is None:
            return self.projection(self._features(inputs, lengths))
        return self.projection(self._frozen_cache(self._features, inputs, partial(self._state, inputs.device), lengths))

    def drop_cache(self) -> None:
        """Drop the cache of a frozen trunk, in place; its features are then computed in every forward pass."""
        self._frozen_cache = None

    def features(self, inputs: Tensor, lengths: Lengths | None = None) -> Tensor:
        """Return the outputs of the trunk for `inputs` (b, …), before the projection, without use of the cache.

        They are (b, H), or feature maps (b, C, H, W) of a trunk that does not pool. They have an autograd graph if
        gradients are on and parameters of the trunk train. lengths: as in forward.
        """
        return self._features(inputs, lengths)

    def _features(self, inputs: Tensor, lengths: Lengths | None = None) -> Tensor:
        prepared = self.prepare(inputs)
        return self.trunk(prepared) if lengths is None else self.trunk(prepared, lengths)

    def _state(self, device: torch.device) -> Hashable:
        """Return a key of all that the trunk's outputs depend on besides the inputs: precision, and version of weights.

        The version of weights is the address and torch's version of each tensor, which rises at each change in place.
        """
        weights = [*self.trunk.parameters(), *self.trunk.buffers()]
        return (precision_of(device), *((t.data_ptr(), t._version) for t in weights))

    def train(self, mode: bool = True) -> Tower:
        """Set the mode of the tower, except for frozen modules of the trunk, which stay in eval() mode (see Tower)."""
        super().train(mode)
        for module in self.trunk.modules():
            if _is_frozen(module):
                module.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the tower in place, with the arguments of torch.compile.

        If the tower has a cache (FrozenCache) or a Grouped trunk, only the trunk is compiled: the cache and the
        grouping of rows are plain Python.
        """
        whole = self._frozen_cache is None and not isinstance(self.trunk, Grouped)
        (super() if whole else self.trunk).compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tower:
        """Apply `fn` to every parameter and buffer, which is how torch's .to() and .cuda() move a module.

        If the trunk has convolutions of feature maps (`convolves`), 4-d tensors become channels-last unless they are
        then on a CPU: cuDNN is much faster with this memory format. For CPUs see NormalizePixels.
        """

        def placed(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dim() != 4 or moved.device.type == "cpu":
                return moved
            return moved.contiguous(memory_format=torch.channels_last)

        return super()._apply(placed if convolves(self.trunk) else fn, recurse)


class TwoTower(nn.Module):
    """Holds x_tower and y_tower, which each embed (b, …) inputs as (b, D), not normalised.

    If the two towers share all weights, both are the same module.
    """

    def __init__(self, x_tower: nn.Module, y_tower: nn.Module) -> None:
        super().__init__()
        self.x_tower, self.y_tower = x_tower, y_tower

    def frozen_copy(self) -> TwoTower:
        """Return a copy of both towers, with copied values of the weights that train, and with all weights frozen.

        The copy shares all other tensors (frozen weights, buffers) and the caches of frozen trunks with this module. It
        has the mode of this module, train() or eval(). Call it before torch.compile: compiled functions of the copy
        would use the weights of this module.
        """
        shared = [*self.buffers(), *(p for p in self.parameters() if not p.requires_grad)]
        shared += [module._frozen_cache for module in self.modules() if isinstance(module, Tower)]
        return copy.deepcopy(self, {id(part): part for part in shared}).requires_grad_(False)


def precision_of(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the torch.autocast context that this call runs in, for `device`; None outside of autocast."""
    # the meta device has no autocast; torch.amp.is_autocast_available would break the graph of a tower in torch 2.11
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """In the `with` block, let a GPU multiply float32 matrices in TF32, which is faster than float32.

    TF32 rounds the factors to 10 bits of mantissa, and sums in float32. Use it around the forward and backward passes
    of towers only: scores and losses need float32. The setting is that of the process: of threads that are in such
    blocks at the same time, the last to leave restores it. Does nothing if `device` is no GPU.
    """
    if device.type != "cuda":
        yield
        return
    with _TF32_LOCK:
        _TF32_BEFORE.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        with _TF32_LOCK:
            torch.set_float32_matmul_precision(_TF32_BEFORE.pop())  # the last takes what the first has found


def convolves(trunk: nn.Module) -> bool:
    """Whether a trunk has an nn.Conv2d with more input channels than an image, as a CNN has and a plain ViT has not."""
    return any(isinstance(module, nn.Conv2d) and module.in_channels > COLOURS for module in trunk.modules())


def _is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)

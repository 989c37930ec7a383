"""Tensors of which a rank may hold a part (DTensor): this rank's rows, and norms over both kinds of tensors.

torch.distributed.tensor is not imported here: it takes a second, and evaluation on one process needs none of it.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T", bound=Tensor)


def is_sharded(tensor: Tensor) -> "TypeIs[DTensor]":
    """Whether `tensor` is a DTensor. No DTensor exists before torch.distributed.tensor has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor (DTensor), sharing its memory; return any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def split_sharded(tensors: Iterable[T]) -> tuple[list[T], list[T]]:
    """Split tensors into (the plain tensors, the sharded DTensors), each list in the given order.

    torch's operations on lists of tensors do not take both kinds in one list.
    """
    found: tuple[list[T], list[T]] = [], []
    for tensor in tensors:
        found[is_sharded(tensor)].append(tensor)
    return found


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of one or more gradients, some of which may be sharded, as a plain 0-d tensor.

    The norm of a sharded gradient is that of the whole tensor over all ranks, so every rank must call it.
    """
    norms = [torch.nn.utils.get_total_norm(part) for part in split_sharded(gradients) if part]
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def own_rows(tensor: Tensor) -> slice | None:
    """Return the slice along dimension 0 that this rank has of a sharded tensor; None for a tensor that is not sharded.

    tensor: sharded along dimension 0, as fully_shard does it. The slice is empty if no row is left for this rank.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Shard

    dim = next(i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    each = -(-len(tensor) // tensor.device_mesh.size(dim))
    start = min(tensor.device_mesh.get_local_rank(dim) * each, len(tensor))
    return slice(start, min(start + each, len(tensor)))

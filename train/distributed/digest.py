"""Are all ranks alike? At the start: what they were started with. Now and then: their weights, to the last bit."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.errors import ConfigError, HardwareError, UserError
from train.distributed.contact import ranks
from train.distributed.world import World, all_reduce_sum, gather_objects

ROOT = Path(__file__).resolve().parents[2]


def check_same_config(world: World, facts: Mapping[str, object]) -> None:
    """Raise ConfigError on all ranks, told by rank 0, unless `facts`, name → value, are the same everywhere.

    A collective.
    """
    of_ranks = gather_objects({name: str(value) for name, value in facts.items()}, world)
    names = {name: None for of_rank in of_ranks for name in of_rank}
    differing = {name: values for name in names if len(set(values := [f.get(name, "none") for f in of_ranks])) > 1}
    if not differing:
        return
    name, values = next(iter(differing.items()))
    odd = minority_ranks(values)
    rest = next(rank for rank in range(world.size) if values[rank] != values[odd[0]])
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    raise _everywhere(
        world,
        ConfigError(
            f"{ranks(odd)} of {world.size} started with {name}={values[odd[0]][:60]}, rank {rest} with "
            f"{values[rest][:60]}{more}: give all ranks the same command, code and data"
        ),
    )


def check_same_weights(world: World, named: Mapping[str, Tensor], step: int) -> None:
    """Raise HardwareError on all ranks, told by rank 0, unless `named` has the same bits everywhere.

    A collective, of one number per rank while they agree.
    """
    sums_n = bit_sums(list(named.values()))
    places_n = 2 * torch.arange(len(sums_n), device=sums_n.device) + 1
    digests_W = torch.zeros(world.size, dtype=torch.int64, device=sums_n.device)
    digests_W[world.rank] = (sums_n * places_n).sum()
    if len(set(all_reduce_sum(digests_W, world).tolist())) == 1:
        return
    sums, hosts = zip(*gather_objects((tuple(sums_n.tolist()), socket.gethostname()), world), strict=True)
    odd = minority_ranks(sums)
    first = next(name for name, values in zip(named, zip(*sums, strict=True), strict=True) if len(set(values)) > 1)
    which = f"{ranks(odd)} of {world.size} ({', '.join(sorted({hosts[rank] for rank in odd}))})"
    what = f"after step {step} the weights of {which} differ from those of the others"
    if len(odd) == world.size:
        what = f"after step {step} {which} have different weights, and no majority tells which are right"
    raise _everywhere(
        world,
        HardwareError(
            f"{what}, first in {first}. Checkpoints are compared before they are written: the same command goes on "
            "from the newest. If a rank is named again, leave its machine out"
        ),
    )


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(n,) int64: of each tensor the bytes, by eight as whole numbers, summed modulo 2⁶⁴: exact in any order."""
    return torch.stack([_bit_sum(tensor) for tensor in tensors])


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    by_eight = len(flat) // 8 * 8
    return flat[:by_eight].view(torch.int64).sum() + flat[by_eight:].sum(dtype=torch.int64)


def minority_ranks(values: Sequence[Hashable]) -> list[int]:
    """The ranks whose value is not that of more than half of all; all ranks when no value is."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, other in enumerate(values) if other != value or 2 * count <= len(values)]


def code_digest() -> str:
    """SHA-256 of our own Python files with their names: 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(p for package in ("data", "eval", "train") for p in (ROOT / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _everywhere(world: World, error: UserError) -> UserError:
    if world.rank > 0:
        error.args = ()
    error.everywhere = True
    return error

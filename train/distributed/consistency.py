"""Checks that all ranks have the same configuration at the start, and bit-identical weights during training."""

import hashlib
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError, HardwareError, UserError
from dyad.data.base.plugins import plugin_files
from dyad.train.distributed.failures import list_ranks
from dyad.train.distributed.world import World, all_reduce_sum, gather_objects

PACKAGE = Path(__file__).absolute().parents[2]  # the folder dyad, in which the other folders are, or links to them


def check_same_config(world: World, facts: Mapping[str, object]) -> None:
    """Raise ConfigError on all ranks unless all ranks pass equal `facts` (name → value).

    The values, for example of configuration keys or versions, are compared as text; a name that a rank does not pass
    has the value "none". The message has the first name that differs; only rank 0 prints it. Every rank must call it.
    """
    facts_W = gather_objects({name: str(value) for name, value in facts.items()}, world)
    names = {name: None for facts_of_rank in facts_W for name in facts_of_rank}  # in order, without repeats
    differing = {name: values for name in names if len(set(values := [f.get(name, "none") for f in facts_W])) > 1}
    if not differing:
        return
    name, values = next(iter(differing.items()))
    minority = minority_ranks(values)
    other = next(rank for rank in range(world.size) if values[rank] != values[minority[0]])
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    message = (
        f"{list_ranks(minority)} of {world.size} started with {name}={values[minority[0]][:60]}, rank {other} with "
        f"{values[other][:60]}{more}: give all ranks the same command, code and data"
    )
    raise on_all_ranks(world, ConfigError(message))


def check_same_weights(world: World, named: Mapping[str, Tensor], step: int, shards: int = 1) -> None:
    """Raise HardwareError on all ranks unless the tensors `named` (name → tensor) have the same bits on all ranks.

    named: at least one tensor, with the same names in the same order on all ranks; of a sharded tensor (DTensor), the
    part of this rank. shards: how many ranks share one copy of the weights, a divisor of the number of ranks; then rank
    r is compared with r ± shards, r ± 2 shards, …. step: number of finished steps, for the message. The error has the
    differing ranks in `ranks`; only rank 0 prints it. Every rank must call it. Not the bits but checksums of them are
    compared (`bit_sum`): a rank sends one int64 number for all its tensors, and one per tensor if ranks differ.
    """
    sums_n = torch.stack([bit_sum(tensor) for tensor in named.values()])
    # Odd weights 1, 3, 5, … are invertible modulo 2⁶⁴, so that a difference in one tensor always changes the digest.
    # They are different, so that tensors that were exchanged change it too.
    weights_n = 2 * torch.arange(len(sums_n), device=sums_n.device) + 1
    digests_W = torch.zeros(world.size, dtype=torch.int64)
    digests_W[world.rank] = (sums_n * weights_n).sum()
    of_copies = all_reduce_sum(digests_W, world).view(-1, shards)
    if bool((of_copies == of_copies[0]).all()):
        return
    sums, hosts = zip(*gather_objects((tuple(sums_n.tolist()), socket.gethostname()), world), strict=True)
    copies = (range(shard, world.size, shards) for shard in range(shards))
    ranks = next(own for own in copies if len({sums[rank] for rank in own}) > 1)
    sums = [sums[rank] for rank in ranks]
    minority = [ranks[i] for i in minority_ranks(sums)]
    first = next(name for name, values in zip(named, zip(*sums, strict=True), strict=True) if len(set(values)) > 1)
    who = f"{list_ranks(minority)} of {world.size} ({', '.join(sorted({hosts[rank] for rank in minority}))})"
    what = f"after step {step} the weights of {who} differ from those of the others"
    if len(minority) == len(ranks):
        what = f"after step {step} {who} have different weights, and no majority tells which are right"
    message = (
        f"{what}, first in {first}. Checkpoints are compared before they are written: the same command goes on "
        "from the newest. If a rank is named again, leave its machine out"
    )
    error = HardwareError(message)
    error.ranks = minority
    raise on_all_ranks(world, error)


def bit_sum(tensor: Tensor) -> Tensor:
    """Compute a checksum of a tensor's bits: the sum of its bytes, read as 8-byte integers, modulo 2⁶⁴, as 0-d int64.

    The result is on the tensor's device. The last bytes, fewer than 8, are added one by one. Integer sums are exact, so
    the order of summation on the device does not matter.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # view(int64) needs an aligned start
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def minority_ranks(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose value differs from that of the majority (more than half of the ranks).

    Without a majority, all ranks are returned. values: one per rank, in rank order.
    """
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, other in enumerate(values) if other != value or 2 * count <= len(values)]


def code_digest() -> str:
    """Return 16 hex digits of a SHA-256 of the Python files of the package dyad and of plugins, names included."""
    digest = hashlib.sha256()
    links = [PACKAGE / name for name in ("data", "train", "eval")]  # rglob does not follow links
    ours = sorted({path for folder in (PACKAGE, *links) for path in folder.rglob("*.py")})
    for name, path in [*((path.relative_to(PACKAGE), path) for path in ours), *plugin_files()]:
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def on_all_ranks(world: World, error: UserError) -> UserError:
    """Set error.everywhere = True, which says that every rank raises this error, and return `error`.

    A rank does not report such an error to the other ranks. On ranks other than 0 the message of the error is removed,
    so that only rank 0 prints it.
    """
    if world.rank > 0:
        error.args = ()
    error.everywhere = True
    return error

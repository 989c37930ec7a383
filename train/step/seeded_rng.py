"""Random numbers of dropout and other noise in the towers, equal in both passes of a step and in a resumed run."""

import hashlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_rng(device: torch.device, *key: Hashable) -> Iterator[None]:
    """Context manager: seed torch's generators of the CPU and of `device` from `key`; restore them after the block.

    key: numbers and names, for example (seed, step, rank, side, chunk). Equal keys give equal random numbers. If
    `device` is a GPU, the generators of all other GPUs are seeded too, and not restored.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would also format a stack trace for each kind of device that is not in use
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        yield

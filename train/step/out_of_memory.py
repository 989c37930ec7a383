"""Turns CUDA out of memory into one line that says which chunk_size to try next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dyad.data.base.errors import HardwareError
from dyad.train.config import TrainConfig
from dyad.train.distributed.world import World


@contextmanager
def explained_out_of_memory(config: TrainConfig, world: World) -> Iterator[None]:
    """Turn torch.OutOfMemoryError of the block into a HardwareError: peak memory, chunk_size now, the next smaller."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        pairs = math.ceil(config.global_batch_size / world.size)
        now = min(config.chunk_size or pairs, pairs)
        smaller = next_smaller(pairs, now)
        fix = f"Set chunk_size={smaller}" if smaller else "Take fewer pairs (global_batch_size) or more GPUs"
        peak = torch.cuda.max_memory_allocated() / 2**30
        raise HardwareError(
            f"rank {world.rank}: CUDA out of memory, {peak:.1f} GiB at the peak. chunk_size is {now} of {pairs} pairs "
            f"per rank. {fix}, or model.grad_checkpointing=true"
        ) from error


def next_smaller(pairs: int, chunk_size: int) -> int | None:
    """Return the largest divisor of `pairs` below `chunk_size`, so that all chunks are equal; None if there is none."""
    return next((size for size in range(chunk_size - 1, 0, -1) if pairs % size == 0), None)

"""What the hardware does on the simplest work: rates that figures are compared with, each measured once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

WARM_UP = {"cpu": 1, "cuda": 3}  # calls that pay for what is compiled, cached and tuned at first
TURNS = {"cpu": 2, "cuda": 10}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str = "cuda") -> float:
    """Of one call."""
    turns = TURNS[device]
    for _ in range(WARM_UP[device]):
        run()
    synchronize(device)
    start = perf_counter()
    for _ in range(turns):
        run()
    synchronize(device)
    return (perf_counter() - start) / turns


@cache
def flops_per_second(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of the product of two square matrices of random numbers; of zeros it would be faster."""
    size = 8192 if device == "cuda" else 128
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    return 2 * size**3 / seconds(lambda: torch.mm(left, right, out=out), device)


@cache
def bytes_per_second(device: str) -> float:
    """Bytes that a copy within the memory of the device reads and writes in a second."""
    source = torch.ones(2**30 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: target.copy_(source), device)


@cache
def bytes_per_second_to(device: str) -> float:
    """Bytes that are copied to the device in a second, from pinned memory."""
    source = torch.ones(2**28 if device == "cuda" else 2**20, dtype=torch.uint8)
    source = source.pin_memory() if device == "cuda" else source
    target = torch.empty_like(source, device=device)
    return len(source) / seconds(lambda: target.copy_(source, non_blocking=True), device)

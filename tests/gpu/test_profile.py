"""What torch.profiler sees of a step: one wait of the host; and of batches that are copied ahead: they cost no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.step import batch, towers, train_step

from dyad.data.batch import Batch
from dyad.data.loading.ahead import copied_ahead
from dyad.train.config import Precision
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.monitor.stragglers import LocalTimer
from gpu.bare import bytes_per_second_to, seconds
from gpu.needs import DEVICES, KERNELS
from gpu.profiled import CALL, profiled, seen

BATCHES = 8
SIZES = {"cpu": (2**10, 16), "cuda": (2**27, 8192)}  # bytes of a batch, rows of the matrices of a step


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_trace_is_read() -> None:
    """Times in µs: the call 100 … 200; kernels run in 110 … 150 and 160 … 220; a copy of 20, half beside a kernel."""
    found = seen(
        [
            event("user_annotation", CALL, 100, 100),
            event("kernel", "one", 110, 30),
            event("kernel", "beside it", 120, 30),
            event("kernel", "late", 160, 60),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 145, 10),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 160, 10),
            event("cuda_runtime", "cudaStreamSynchronize", 190, 5),
            event("cuda_runtime", "cudaLaunchKernel", 191, 5),
            event("cuda_runtime", "cudaDeviceSynchronize", 205, 20),
        ]
    )
    assert found.waits == {"cudaStreamSynchronize": 1}
    times = [1e6 * t for t in (found.whole, found.busy, found.copying, found.hidden)]
    assert times == pytest.approx([120, 100, 10, 5])


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["clip", "siglip", "sogclr"])
def test_the_profiler_sees_one_wait_in_a_step(name: str, device: str, record_property: Any) -> None:
    world = World(device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    state = {"num_samples": 64, "gamma": 0.8} if name == "sogclr" else {}
    model, objective = towers().float().to(world.device), build_objective(name, **state).to(world.device)
    step = train_step(model, 64, world=world, objective=objective, precision=Precision.bf16, chunk_size=16)
    rows = batch(64, dtype=torch.float32)
    rows = rows.pin_memory() if device == "cuda" else rows
    for i in range(3):
        step(rows, i)
    found = profiled(lambda: step(rows, 3), device)
    record_property(f"{name}: waits of the host in a step, by the profiler", found.waits.total())
    assert found.waits.total() == (device == "cuda"), found.waits


@pytest.mark.parametrize("device", DEVICES)
def test_batches_are_copied_beside_the_steps_before_them(device: str, record_property: Any) -> None:
    """Steps are products of matrices, several times as long as a copy."""
    size, width = SIZES[device]
    there, ids = torch.device(device), torch.arange(1)
    pixels = [torch.ones(size, dtype=torch.uint8) for _ in range(BATCHES)]
    batches = [Batch(part, ids, ids, ids, ids) for part in pixels]
    batches = [part.pin_memory() for part in batches] if device == "cuda" else batches
    left = torch.randn(width, width, device=device).bfloat16()
    timer = LocalTimer(there)

    def steps(inputs: Any) -> None:
        for rows in inputs:
            for _ in range(10):
                torch.mm(left, left)
            rows.x.sum()

    def ahead() -> None:
        steps(copied_ahead(batches, there, timer))

    resident = [rows.to(there) for rows in batches]
    copies = seconds(lambda: [rows.to(there) for rows in batches], device)
    bare, with_copies = seconds(lambda: steps(resident), device), seconds(ahead, device)
    found = profiled(ahead, device)
    rate = BATCHES * size / copies
    record_property("batches to the device: GB/s", (rate / 1e9, rate / bytes_per_second_to(device), "a bare copy"))
    record_property("steps with copies beside them", (bare / with_copies, bare / with_copies, "the steps alone"))
    if device == "cuda":
        record_property("copies that run beside kernels, by the profiler: share", found.hidden / found.copying)
        assert with_copies - bare <= 0.3 * copies  # the first has no step before it

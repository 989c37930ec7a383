"""Training steps on a GPU: the numbers of a CPU, equal bits, one wait of the host, and constant memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.step import batch, same_bits, snapshot, towers, train_step
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra
from dyad.train.config import OptimConfig, Precision
from dyad.train.distributed.devices import chosen_kernels
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import TwoTower
from gpu.needs import DEVICES, KERNELS, ON_GPU

STEPS = 20
MOST = {Precision.fp32: 1e-4, Precision.bf16: 1e-2}
STATEFUL = ("sogclr", "fastclip_v3", "nuclr")


class Dropping(nn.Module):
    """(b, 6) → (b, 5) with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def step_on(device: str, model: TwoTower, count: int, objective: str = "clip", **options: Any) -> TrainStep:
    world = World(device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    state = {"num_samples": count, "gamma": 0.8} if objective in STATEFUL else {}
    built = build_objective(objective, **state).to(world.device)
    return train_step(model.to(world.device), count, world=world, objective=built, **options)


def single(count: int) -> Batch:
    """batch(count) in float32."""
    pairs = batch(count)
    return replace(pairs, x=pairs.x.float(), y=pairs.y.float())


def run(step: TrainStep, rows: Batch, steps: int = STEPS) -> list[float]:
    return [step(rows, i)["loss"] for i in range(steps)]


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", MOST)
def test_twenty_steps_are_those_of_float64(precision: Precision, device: str) -> None:
    optim = OptimConfig(lr=1e-3)
    step = step_on(device, towers().float(), 64, precision=precision, optim=optim)
    exact = step_on("cpu", towers(), 64, optim=optim)
    got, want = run(step, single(64)), run(exact, batch(64))
    assert got == pytest.approx(want, rel=MOST[precision])
    for name, weight in exact.towers.state_dict().items():
        error = (step.towers.state_dict()[name].cpu().double() - weight).norm() / weight.norm()
        assert error.item() <= MOST[precision], name


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_graphs_that_are_kept_change_no_bit_also_with_dropout(chunks: int, device: str) -> None:
    def end(keep_graphs: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = TwoTower(Dropping(), Dropping())
        step = step_on(device, model, 64, chunk_size=64 // chunks, keep_graphs=keep_graphs)
        run(step, single(64), 3)
        return snapshot(step)

    with chosen_kernels(deterministic=True):
        first, *others = (end(keep) for keep in (1, 2, None))
    assert all(same_bits(first, other) for other in others)


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("objective", ["clip", "siglip", "sogclr"])
def test_two_deterministic_runs_have_equal_bits(objective: str, device: str) -> None:
    def end() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = TwoTower(Dropping(), Dropping())
        step = step_on(device, model, 64, objective, chunk_size=16, precision=Precision.bf16)
        run(step, single(64), 5)
        return snapshot(step)

    with chosen_kernels(deterministic=True):
        assert same_bits(end(), end())


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_change_no_number(device: str) -> None:
    losses = [run(step_on(device, towers().float(), 64, chunk_size=64 // chunks), single(64)) for chunks in (1, 4, 16)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
def test_fp16_skips_what_overflows_and_goes_on(device: str) -> None:
    step = step_on(device, towers().float(), 16, precision=Precision.fp16)
    state = step.state_dict()
    step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 2.0**28}})
    rows, skipped = single(16), []
    before = snapshot(step)
    for i in range(30):
        step(rows, i)
        skipped.append(step.skip_reason)
        if i == 0:
            assert same_bits(before, {name: t for name, t in snapshot(step).items() if name in before})
    assert skipped[0] == "nonfinite" and skipped[-1] == ""
    assert step.state_dict()["scaler"]["scale"] < 2.0**28


@KERNELS
@ON_GPU
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("name", ["clip", "symmetric_dpm", "siglip", "nce", "simclr", "dpr", "spectral", *STATEFUL])
def test_the_host_waits_once(name: str, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the one list of numbers; everything else that waits raises. tests/gpu_less/test_census.py says where."""
    step = step_on("cuda", towers().float(), 64, name, precision=Precision.bf16, chunk_size=chunk_size)
    rows = single(64)
    if name == "dpr":  # with hard negatives
        negatives = torch.arange(32)
        rows.extra = Extra(rows.y[:32] + 1, negatives, negatives + 1000, torch.zeros(32, dtype=torch.bool))
    rows = rows.pin_memory()
    run(step, rows, 3)  # kernels are compiled and chosen here
    to_list, waits = Tensor.tolist, []

    def allowed(tensor: Tensor) -> Any:
        if tensor.is_cuda:
            waits.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_list(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Tensor, "tolist", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(rows, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1


@KERNELS
@ON_GPU
def test_memory_does_not_grow(record_property: Any) -> None:
    step = step_on("cuda", towers().float(), 256, precision=Precision.bf16, chunk_size=64)
    rows = single(256)
    run(step, rows, 20)
    before = torch.cuda.memory_allocated()
    run(step, rows, 500)
    record_property("bytes more after 500 steps", torch.cuda.memory_allocated() - before)
    assert torch.cuda.memory_allocated() <= before + 4096

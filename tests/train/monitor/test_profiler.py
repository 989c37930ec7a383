"""The summary of a trace, whose numbers are known by hand; the traces of a run are in test_telemetry.py."""

import time
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import refused
from torch.profiler import record_function

from dyad.train.config import UNTRACED
from dyad.train.monitor.profiler import summary, traced


def span(category: str, name: str, start: float, stop: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "tid": 1, "args": args}


RANGES = [
    span("user_annotation", "ProfilerStep#5", 0, 1000),
    span("user_annotation", "towers forward", 100, 300),
    span("user_annotation", "objective", 300, 400),
    span("user_annotation", "towers backward", 400, 700),
    span("user_annotation", "Optimizer.step#AdamW.step", 800, 850),
]


def test_on_a_cpu_a_part_lasts_as_long_as_its_ranges() -> None:
    operations = [
        span("cpu_op", "aten::mm", 100, 300),
        span("cpu_op", "c10d::allreduce_", 300, 400),
        span("user_annotation", "gloo:all_reduce", 290, 400) | {"tid": 2},
    ]
    table, numbers = summary([{"ph": "M"}, *RANGES, *operations], 9)
    assert numbers == pytest.approx({"outside_towers": 0.5, "exposed_comm_time": 100e-6})
    assert "towers, backward        0.30 ms    30.0%" in table and "the rest                0.35 ms" in table


def test_on_a_gpu_a_part_has_the_kernels_that_it_launched() -> None:
    """Kernels run later than they are launched; those of the backward pass are launched by another thread."""
    kernels = [
        (150, "gemm", 200, 500),  # launched in the forward pass
        (310, "softmax", 500, 520),
        (450, "gemm", 520, 900),  # in the backward pass
        (460, "ncclDevKernel_AllReduce", 850, 950),  # 50 µs of it beside the kernel before
        (820, "adamw", 950, 960),
    ]
    events = [*RANGES]
    for number, (launched, name, start, stop) in enumerate(kernels):
        events.append(span("cuda_runtime", "cudaLaunchKernel", launched, launched + 5, correlation=number) | {"tid": 9})
        events.append(span("kernel", name, start, stop, correlation=number))
    table, numbers = summary(events, 9)
    assert numbers == pytest.approx({"outside_towers": 0.32, "exposed_comm_time": 50e-6, "launches": 5})
    assert "objective               0.02 ms     2.0%" in table and "optimiser               0.01 ms" in table


def test_a_run_that_ends_early_has_a_shorter_trace_and_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    found: list[Any] = []

    def step() -> dict[str, float]:
        with record_function("towers forward"):
            time.sleep(0.01)
        return {"loss": 1.0}

    def run(folder: Path, steps: int) -> None:
        with traced(step, 50, folder, 3, found.append, found.append) as call:
            assert [call() for _ in range(steps)] == [{"loss": 1.0}] * steps
            time.sleep(0.2)  # the end of a run is no step

    (tmp_path / "file").touch()  # no folder can be made in it
    run(tmp_path / "profile", UNTRACED + 2)
    run(tmp_path / "file" / "profile", UNTRACED + 2)
    run(tmp_path / "none", UNTRACED)
    run(tmp_path / "none", UNTRACED - 1)
    numbers, line, refused_by_disk, no_step, also_none = found
    assert numbers["outside_towers"] < 0.5 and "in 2 steps" in line and "summary_rank3.txt" in line
    assert "no summary" in refused_by_disk and "the run ended before a traced step did" in no_step
    assert also_none == no_step and not (tmp_path / "none/summary_rank3.txt").exists()


def test_a_run_without_a_step_to_trace_is_refused(commands, tiny) -> None:
    refused(commands.run(*tiny({"profile": 2, "steps": 4})), 2, "profile=2", "steps=6")

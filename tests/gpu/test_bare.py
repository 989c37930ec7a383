"""The rates of the hardware that other figures are compared with, beside its data sheet; how figures are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import plugin
from gpu.bare import bytes_per_second, bytes_per_second_to, flops_per_second
from gpu.needs import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_rates_of_the_bare_hardware(device: str, record_property: Any) -> None:
    from dyad.train.config import Precision
    from dyad.train.monitor.telemetry import peak_tflops

    name = torch.cuda.get_device_name() if device == "cuda" else ""
    peak, rate = peak_tflops(name, Precision.bf16), flops_per_second(device, torch.bfloat16)
    share = None if peak is None else rate / (peak * 1e12)
    record_property("bare product, bf16: TFLOP/s", (rate / 1e12, share, "the data sheet"))
    record_property("bare product, float32: TFLOP/s", flops_per_second(device, torch.float32) / 1e12)
    record_property("copy within the device, read and written: GB/s", bytes_per_second(device) / 1e9)
    record_property("copy to the device: GB/s", bytes_per_second_to(device) / 1e9)
    assert share is None or 0.3 < share < 1.05


def test_figures_are_written_with_shares_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = "tests/gpu/test_loss.py::test_time[clip ours]"
    figures = [(test, "ms", (12.345, 0.714, "the bare products")), (test, "GB", 2), (test, "more", "does not fit")]
    monkeypatch.setattr(plugin, "_figures", figures)
    monkeypatch.setattr(plugin, "_outcomes", {"passed": 3, "skipped": 1})
    monkeypatch.setenv("DYAD_FIGURES", str(tmp_path / "RESULTS.md"))
    plugin.pytest_sessionfinish()
    said = (tmp_path / "RESULTS.md").read_text()
    command = f"`bash tests/gpu.sh '{test}'` |"
    assert "3 passed, 1 skipped." in said
    assert f"| ms | 12.35 | 0.71 of the bare products | {command}\n" in said
    assert f"| GB | 2 |  | {command}\n| more | does not fit |  | {command}\n" in said

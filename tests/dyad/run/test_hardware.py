"""Errors of CUDA that mean the GPU end with code 4, after which a launch script starts the run again."""

import socket

import pytest
import torch
from helpers.messages import raises

from dyad.data.base.errors import ExitCode, HardwareError
from dyad.run.hardware import describe_hardware, explain_device_errors
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.world import World

WORLD = World(rank=3, size=8, device=torch.device("cuda", 1))
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with TORCH_USE_CUDA_DSA"


@pytest.mark.parametrize(
    "text", ["uncorrectable ECC error encountered", "uncorrectable NVLink error detected during the execution"]
)
def test_a_gpu_that_fails_is_a_hardware_error_in_one_line(text: str) -> None:
    named = ("rank 3", "GPU 1", socket.gethostname(), f"CUDA error: {text}")
    with raises(HardwareError, *named) as caught, explain_device_errors(TrainConfig(), WORLD):
        raise RuntimeError(f"CUDA error: {text}{ADVICE}")
    assert caught.value.exit_code == ExitCode.HARDWARE and len(str(caught.value).splitlines()) == 1


def test_a_bug_stays_a_bug() -> None:
    bug = RuntimeError(f"CUDA error: device-side assert triggered{ADVICE}")
    with pytest.raises(RuntimeError) as caught, explain_device_errors(TrainConfig(), WORLD):
        raise bug
    assert caught.value is bug


@pytest.mark.parametrize(
    ("cpu", "precision", "warned"), [("AVX2", "bf16", 1), ("AVX2", "fp32", 0), ("AVX512", "bf16", 0)]
)
def test_bf16_that_a_cpu_emulates_is_told(
    cpu: str, precision: str, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    chosen = Precision(precision)
    lines = [*describe_hardware(TrainConfig(precision=chosen), World(0, 1, torch.device("cpu")), chosen)]
    assert sum("precision=fp32" in line for line in lines) == warned

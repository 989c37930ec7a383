"""Every objective against itself in float64 on a CPU, on the same rounded embeddings; and the time of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs import kernels_job
from torch import Tensor

from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.sums import lse_triton
from gpu.needs import DEVICES, KERNELS, ON_GPU, packages

PAIRED = [name for name, options in OBJECTIVES.items() if options.inputs == "pairs"]
# of the loss, and of the gradient of x (norm of the difference by norm): normalised embeddings are rounded to dtype
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 1e-2), torch.bfloat16: (1e-2, 5e-2)}
ROWS = {"cpu": 24, "cuda": 1024}


def loss_and_gradient(name: str, x: Tensor, y: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
    needed = {"num_samples": len(x), "gamma_epochs": 30}
    options = {key: value for key, value in needed.items() if hasattr(OBJECTIVES[name], key)}
    objective: Any = build_objective(name, **options).to(x.device)
    objective = objective.double() if x.dtype == torch.float64 else objective
    x = x.detach().requires_grad_()
    ids = torch.arange(len(x), device=x.device)
    loss = objective(x, y, ids, x_keys=ids, y_keys=ids, **given).loss
    return loss.detach(), torch.autograd.grad(loss, x)[0]


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PAIRED)
def test_an_objective_is_that_of_float64(name: str, dtype: torch.dtype, device: str) -> None:
    x, y = kernels_job.embeddings(ROWS[device], ROWS[device], 64, "cpu", dtype)
    loss, gradient = loss_and_gradient(name, x.to(device), y.to(device))
    want, want_gradient = loss_and_gradient(name, x.double(), y.double())
    most, most_gradient = TOLERANCE[dtype]
    assert abs(loss.item() - want.item()) <= most * max(1.0, abs(want.item()))
    error = (gradient.cpu().double() - want_gradient).norm() / want_gradient.norm()
    assert error.item() <= most_gradient


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["clip", "dpr", "siglip", "coce", "sogclr"])
def test_relevance_weighs_what_kernels_sum(name: str, device: str) -> None:
    x, y = kernels_job.embeddings(ROWS[device], ROWS[device], 64, "cpu", torch.bfloat16)
    weights = torch.linspace(0.1, 1.0, len(x))
    loss, gradient = loss_and_gradient(name, x.to(device), y.to(device), relevance=weights.to(device))
    want, want_gradient = loss_and_gradient(name, x.double(), y.double(), relevance=weights)
    most, most_gradient = TOLERANCE[torch.bfloat16]
    assert abs(loss.item() - want.item()) <= most * max(1.0, abs(want.item()))
    assert ((gradient.cpu().double() - want_gradient).norm() / want_gradient.norm()).item() <= most_gradient


@KERNELS
@ON_GPU
@pytest.mark.parametrize("width", [33, 72, 512, 768, 1280, 4096])
def test_kernels_of_every_width(width: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        kernels_job.check_symmetric_loss("cuda", size=1024, width=width, scale=100.0, dtype=dtype)


@KERNELS
@ON_GPU
@pytest.mark.parametrize("size", [32768, 131072])
def test_clip_takes_at_most_ten_sevenths_of_its_floor(size: int, record_property: Callable[..., None]) -> None:
    from benchmarks.loss_gpu import embeddings, milliseconds, ours, strip_matmuls

    assert lse_triton.available(*embeddings(128))
    took, floor = _milliseconds(ours(), size), milliseconds(strip_matmuls(size))
    record_property(f"clip at {size:,}: ms", (took, floor / took, "the bare products in bf16"))
    assert floor / took >= 0.7


def _milliseconds(loss: Callable[[Tensor, Tensor], Tensor], size: int) -> float:
    """Of a forward and a backward."""
    from benchmarks.loss_gpu import embeddings, milliseconds

    x, y = embeddings(size)

    def run() -> None:
        x.grad = y.grad = None
        loss(x, y).backward()

    return milliseconds(run)


@KERNELS
@ON_GPU
@packages("triton")
def test_shapes_that_were_tuned_once_are_kept(tmp_path: Any) -> None:
    import os
    import subprocess
    import sys

    code = (
        "import torch; from dyad.train.losses.sums import lse_triton as k;"
        "x = torch.randn(512, 64, device='cuda').bfloat16(); k.exp_sums(x, x, 1.0, 0.0); torch.cuda.synchronize()"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_PRINT_AUTOTUNING": "1"}
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(2)
    ]
    assert "autotuning" in said[0].lower() and "autotuning" not in said[1].lower()


def test_the_tolerances_see_a_rounded_embedding() -> None:
    """They would fail on embeddings of another type."""
    x, y = kernels_job.embeddings(24, 24, 64, "cpu", torch.float32)
    loss, _ = loss_and_gradient("clip", x, y)
    rounded, _ = loss_and_gradient("clip", F.normalize(x, dim=1).bfloat16().float(), y)
    assert abs(loss.item() - rounded.item()) > TOLERANCE[torch.float32][0]

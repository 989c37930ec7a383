"""Time and memory of a loss and its gradient at 8k … 256k pairs, beside open_clip's and a loop written by hand.

python -m tests.benchmarks.loss_gpu prints the same as a table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import loss_gpu

from gpu.needs import DEVICES, KERNELS, packages

SIZES = {"cpu": (64,), "cuda": tuple(2**power for power in range(13, 19))}
# of the gradient of x by its norm: ours is rounded to bf16 at the end; the others round the logits
MOST = {"ours": 5e-3}


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", loss_gpu.METHODS)
@pytest.mark.parametrize("objective", loss_gpu.PRODUCTS)
def test_time_of_a_loss_and_its_gradient(objective: str, method: str, device: str, record_property: Any) -> None:
    """The floor is the products in bf16 that no method can do without, unless it keeps all scores."""
    torch._dynamo.reset()
    error = loss_gpu.gradient_error(method, objective, device, 256 if device == "cpu" else loss_gpu.EXACT)
    record_property(f"{objective}, {method}: relative error of the gradient", error)
    for size in SIZES[device]:
        found = loss_gpu.time_and_memory(method, size, objective, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        name = f"{objective}, {size:,} pairs, {method}"
        if found is None:
            record_property(f"{name}: ms", "does not fit")
            break
        took, memory = found
        least = loss_gpu.floor(size, device, objective)
        record_property(f"{name}: ms", (took, least / took, "the bare products in bf16"))
        if device == "cuda":
            record_property(f"{name}: MB", memory)
    assert error <= MOST.get(method, 0.1)


@packages("open_clip")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("objective", loss_gpu.PRODUCTS)
def test_the_dense_loss_is_that_of_open_clip(objective: str, device: str) -> None:
    from open_clip.loss import ClipLoss, SigLipLoss

    x, y = loss_gpu.embeddings(64, device)
    learnt = loss_gpu.parameters(objective, device)
    with torch.autocast(device, torch.bfloat16):
        want = (ClipLoss() if objective == "clip" else SigLipLoss())(x, y, *learnt())
    got = loss_gpu.dense(objective, device)(x, y)
    gradients = [torch.autograd.grad(loss, (x, y)) for loss in (got, want)]
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

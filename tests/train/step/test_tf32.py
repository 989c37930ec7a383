"""On a GPU float32 towers multiply in TF32, and scores and losses do not."""

from typing import Any

import pytest
import torch
from helpers.step import batch, towers, train_step
from torch import Tensor

import dyad.train.step.loss_term
from dyad.train.towers.tower import tf32_products


class Noting(torch.autograd.Function):
    """The identity, which notes the precision of float32 products in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[str]) -> Tensor:
        ctx.found = found
        found.append(torch.get_float32_matmul_precision())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.found.append(torch.get_float32_matmul_precision())
        return gradients[0], None


def test_towers_alone_multiply_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dyad.train.step.loss_term, "tf32_products", lambda device: tf32_products(torch.device("cuda")))
    model = towers().float()
    in_towers: list[str] = []
    in_loss: list[str] = []
    model.x_tower.register_forward_hook(lambda module, inputs, output: Noting.apply(output, in_towers))
    step = train_step(model, 8, chunk_size=4, keep_graphs=1)
    measure = step.objective.forward

    def noted(x: Tensor, *rest: Any, **more: Any) -> Any:
        return measure(Noting.apply(x, in_loss), *rest, **more)

    monkeypatch.setattr(step.objective, "forward", noted)
    step(batch(8, dtype=torch.float32), 0)
    assert in_towers == ["high"] * 5  # two chunks forward, one of them again, two backward
    assert in_loss == ["highest"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


def test_of_two_threads_the_last_restores() -> None:
    first, second = (tf32_products(torch.device("cuda")) for _ in range(2))
    for block in (first, second):
        block.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "high"  # the second still computes
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"


def test_nothing_changes_on_a_cpu() -> None:
    with tf32_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_a_gpu_rounds_the_products_of_towers_only() -> None:
    left, right = torch.randn(2, 512, 512, device="cuda").unbind()
    want = left.double() @ right.double()
    with tf32_products(left.device):
        rounded = left @ right
    error = (left @ right - want).abs().max()
    assert error < 1e-4 and (rounded - want).abs().max() > 10 * error

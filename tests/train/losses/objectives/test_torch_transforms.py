"""What torch.compile and torch.func do with an objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.messages import raises
from torch import Tensor

from tests.train.losses.objectives.test_objectives import ALONE, some_call


def with_gradients(loss: Tensor, x: Tensor, y: Tensor, objective: torch.nn.Module) -> list[Tensor]:
    learning = [p for p in objective.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, [x, y, *learning], materialize_grads=True)]


@pytest.mark.parametrize("name", ALONE)
def test_a_compiled_function_gets_the_values_of_the_objective(name: str) -> None:
    (objective, x, y), (alone, *_), (within, *_) = (some_call(name) for _ in range(3))
    given: dict[str, Any] = {"sample_ids_b": torch.arange(8)}
    if name == "spectral_alternating":
        given |= {"x_target": x.detach().flip(1), "y_target": y.detach().flip(1)}
    compiled = [
        torch.compile(alone),
        torch.compile(lambda x, y, **more: within(2 * (x / 2), 2 * (y / 2), **more), backend="aot_eager"),
    ]
    for _ in range(2):  # the second call of an estimator has old means
        wanted = with_gradients(objective(x, y, **given).loss, x, y, objective)
        for call, learning in zip(compiled, (alone, within), strict=True):
            found = with_gradients(call(x, y, **given).loss, x, y, learning)
            assert all(torch.equal(value, want) for value, want in zip(found, wanted, strict=True))


def test_a_graph_without_breaks_cannot_have_an_objective() -> None:
    objective, x, y = some_call("clip")
    step = torch.compile(lambda x, y: objective(2 * x, y).loss, fullgraph=True, backend="aot_eager")
    with raises(RuntimeError):
        step(x, y)


@pytest.mark.parametrize("name", ALONE)
def test_of_torch_func_the_functional_call_works_and_the_transforms_are_refused(name: str) -> None:
    (objective, x, y), (other, *_) = some_call(name), some_call(name)
    given: dict[str, Any] = {"sample_ids_b": torch.arange(8)}
    if name == "spectral_alternating":
        given |= {"x_target": x.detach(), "y_target": y.detach()}
    replaced = {key: (p.detach() + 0.1).requires_grad_(p.requires_grad) for key, p in other.named_parameters()}
    found = torch.func.functional_call(other, replaced, (x, y), given).loss
    objective.load_state_dict({**objective.state_dict(), **{key: p.detach() for key, p in replaced.items()}})
    learning = [p for p in replaced.values() if p.requires_grad]
    gradients = torch.autograd.grad(found, [x, y, *learning], materialize_grads=True)
    wanted = with_gradients(objective(x, y, **given).loss, x, y, objective)
    assert all(torch.equal(got, want) for got, want in zip([found, *gradients], wanted, strict=True))

    def loss(x: Tensor) -> Tensor:
        return objective(x, y, **given).loss

    for transform in (torch.func.grad, torch.func.jacrev, torch.vmap):
        rows = x.detach()[None] if transform is torch.vmap else x.detach()
        with raises(RuntimeError, name, "functional_call"):
            transform(loss)(rows)

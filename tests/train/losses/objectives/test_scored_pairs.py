"""Objectives of pairs with a score, against loops over pairs in float64."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.messages import raises
from helpers.reference import close_with_gradients
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.scored_pairs import correlation
from dyad.train.losses.options.common import ExpectedBatch
from dyad.train.losses.options.registry import configure

NAMES = ("cosent", "cosine_mse")
B, D = 6, 4
SCORES = torch.tensor([4.0, 0.5, 2.0, 2.0, 5.0, 0.5]).double()


def leaves(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(B, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in "xy")
    return x, y


def loss_of(name: str, x: Tensor, y: Tensor, scores: Tensor = SCORES, **options: Any) -> Tensor:
    return build_objective(name, **options).double()(x, y, teacher=scores).loss


def by_pairs(name: str, x: Tensor, y: Tensor, tau: float) -> Tensor:
    s = F.cosine_similarity(x, y)
    if name == "cosine_mse":
        return sum(((s[i] - SCORES[i] / 5) ** 2 for i in range(B)), torch.zeros(())) / B
    terms = [((s[j] - s[i]) / tau).exp() for i, j in product(range(B), repeat=2) if SCORES[i] > SCORES[j]]
    return (1 + sum(terms, torch.zeros(()))).log()


@pytest.mark.parametrize(("name", "options"), [("cosent", {"temperature": 0.2}), ("cosine_mse", {"divisor": 5.0})])
def test_loss_and_gradients_are_those_of_a_loop_over_pairs(name: str, options: dict[str, Any]) -> None:
    inputs = leaves()
    found, wanted = loss_of(name, *inputs, **options), by_pairs(name, *inputs, 0.2)
    close_with_gradients(found, wanted, inputs, rtol=1e-7, atol=1e-9)  # the temperature itself is a float32


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    assert torch.autograd.gradcheck(lambda *e: loss_of(name, *e), leaves())


def test_any_increasing_map_of_the_scores_gives_the_same_loss_and_other_orders_another() -> None:
    x, y = leaves()
    same = [float(loss_of("cosent", x, y, f(SCORES)).detach()) for f in (torch.exp, torch.sqrt, lambda t: 3 * t - 7)]
    assert same == [float(loss_of("cosent", x, y).detach())] * 3
    assert abs(float(loss_of("cosent", x, y, -SCORES).detach()) - same[0]) > 0.1


@pytest.mark.parametrize("tau", [1e-4, 1e-2, 1.0, 1e3])
def test_float32_is_stable_at_any_temperature(tau: float) -> None:
    x, y = (F.normalize(e.detach(), dim=1) for e in leaves())
    narrow = [e.float().requires_grad_() for e in (x, y)]
    wide = [e.detach().double().requires_grad_() for e in narrow]  # the same numbers
    objective = build_objective("cosent", temperature=tau)
    losses = objective(*narrow, teacher=SCORES.float()).loss, objective.double()(*wide, teacher=SCORES).loss
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=1e-6)
    found, wanted = (torch.autograd.grad(loss, leaf) for loss, leaf in zip(losses, (narrow, wide), strict=True))
    for got, exact in zip(found, wanted, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), exact, rtol=2e-3, atol=1e-4 / tau)


def test_equal_scores_leave_nothing_to_order() -> None:
    x, y = leaves()
    result = build_objective("cosent").double()(x, y, teacher=torch.ones(B))
    gradients = torch.autograd.grad(result.loss, (x, y))
    assert float(result.loss.detach()) == 0 and not any(g.any() for g in gradients)
    assert float(result.metrics["pair_correlation"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_metric_is_the_correlation_of_the_batch(name: str) -> None:
    x, y = leaves()
    found = build_objective(name).double()(x, y, teacher=SCORES).metrics["pair_correlation"]
    both = torch.stack([F.cosine_similarity(x, y).detach(), SCORES])
    assert float(found) == pytest.approx(float(both.corrcoef()[0, 1]), abs=1e-12)


@pytest.mark.parametrize("count", [3, 7, 10])
def test_constants_correlate_with_nothing(count: int) -> None:
    """Their mean is rounded, so that a deviation from it may be another number than 0."""
    constant, values = torch.full((count,), 0.7), torch.arange(count) ** 0.5
    for given in ((constant, constant - 0.4), (constant, values), (values, constant)):
        assert correlation(*given) == 0


def test_memory_is_linear_in_the_batch() -> None:
    """A matrix of 200,000 × 200,000 differences would be 160 GB."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200_000, 2, generator=generator) for _ in "xy")
    loss = build_objective("cosent", temperature=1.0)(x, y, teacher=torch.rand(200_000, generator=generator)).loss
    pairs, mean = 200_000**2 / 2, (F.cosine_similarity(x, y).exp().mean() * (-F.cosine_similarity(x, y)).exp().mean())
    assert float(loss) == pytest.approx(math.log(pairs * float(mean)), abs=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name: str) -> None:
    (x, y), objective = leaves(), build_objective(name).double()
    with raises(ConfigError, name, "teacher=(b,)", "data.teacher"):
        objective(x, y)
    with raises(ValueError, "(6,)", "(5,)"):
        objective(x, y, teacher=SCORES[:5])
    with raises(ValueError, "(6, 4)", "(5, 4)"):
        objective(x, y[:5], teacher=SCORES)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["cosent", "cosine_mse"])
def test_scores_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with raises(ValueError, "teacher", str(value)):
        build_objective(name)(*torch.randn(2, 3, 4), teacher=torch.tensor([0.5, value, 1]))


def test_a_run_is_refused_before_it_begins() -> None:
    pairs, options = ExpectedBatch(B, inputs="scored pairs"), configure("cosent")
    assert not [*options.broken_by(pairs)]
    for objective, batch, named in (
        (options, replace(pairs, further=True, inputs="scored lists"), ("cosent", "data.negatives.per_row=0")),
        (options, ExpectedBatch(B), ("cosent", "data.teacher=FIELD")),
        (configure("dpr"), pairs, ("dpr", "cosent", "data.teacher=null")),
    ):
        with raises(ConfigError, *named):
            for message in objective.broken_by(batch):
                raise ConfigError(message)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_inference_and_pickling(name: str) -> None:
    x, y = leaves()
    assert torch.autograd.gradgradcheck(lambda *e: loss_of(name, *e), (x, y))
    objective = build_objective(name)
    copied = pickle.loads(pickle.dumps(objective))
    with torch.inference_mode():
        found = copied(x, y, teacher=SCORES).loss
    torch.testing.assert_close(found, objective(x, y, teacher=SCORES).loss.detach())

"""The softmax family where the answer is known in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.reference import build, close, embeddings, on_scores

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective


def test_equal_scores() -> None:
    scores = torch.full((7, 7), 0.3)
    for name in ("clip", "info_nce", "dpr"):
        close(on_scores(scores, name)[0], math.log(7))
    close(on_scores(scores, "cross_entropy")[0], 0.0)
    close(on_scores(scores, "symmetric_dpm", temperature=0.2)[0], 2 * 0.2 * math.log(7))
    close(on_scores(scores, "one_sided_dpm", temperature=0.2)[0], 0.2 * math.log(7))
    close(on_scores(scores, "gcl")[0], 0.0)
    ones = torch.ones(7, 3, dtype=torch.float64)
    close(build("simclr")(ones, ones).loss, math.log(2 * 7 - 1))
    metrics = build("clip")(ones, ones).metrics
    close(metrics["mi_bound"], 0.0)
    close(metrics["log_k"], math.log(7))


@pytest.mark.parametrize("h", [1, 3])
def test_equal_scores_with_hard_negatives(h: int) -> None:
    ones = torch.ones(7, 3, dtype=torch.float64)
    hard = torch.ones(7, h, 3, dtype=torch.float64)
    close(build("dpr")(ones, ones, negatives=hard).loss, math.log(7 * (1 + h)))
    if h == 1:
        close(build("epr")(ones, ones, negatives=hard).loss, math.log(2 * 7))


def test_two_by_two() -> None:
    a, b, tau = 0.4, 0.9, 0.25
    scores = torch.tensor([[a, b], [b, a]], dtype=torch.float64)
    close(on_scores(scores, "clip", temperature=tau)[0], math.log1p(math.exp((b - a) / tau)))
    for temperature in (tau, 10 * tau):  # the difference to the one negative, whatever τ
        value, gradient = on_scores(scores, "gcl", temperature=temperature)
        close(value, 2 * (b - a))
        close(gradient, torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    objective = build("gcl", temperature=tau)
    objective.logit_scale.requires_grad_()
    (slope,) = torch.autograd.grad(objective(*embeddings(2)).loss, objective.logit_scale)
    close(slope, 0.0)


def test_identity_scores() -> None:
    close(on_scores(torch.eye(6), "clip", temperature=0.5)[0], math.log(1 + 5 * math.exp(-2.0)))


def test_zero_logits_gradient() -> None:
    n = 5
    _, gradient = on_scores(torch.zeros(n, n), "clip", temperature=1.0)
    close(gradient, (1 / n - torch.eye(n, dtype=torch.float64)) / n)
    _, gradient = on_scores(torch.zeros(n, n), "symmetric_dpm")
    close(gradient, 2 * (1 / n - torch.eye(n, dtype=torch.float64)) / n)


def test_wrong_way_round_at_a_thousandth() -> None:
    scores = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    value, gradient = on_scores(scores, "clip", temperature=1e-3, learnable=False)
    close(value, 2000.0)
    assert gradient.isfinite().all() and gradient.abs().max() > 400
    x = scores.clone().requires_grad_()
    loss = build_objective("clip", temperature=1e-3, learnable=False, similarity="dot")(x, torch.eye(2)).loss
    loss.backward()
    close(loss.detach(), 2000.0, 1e-4)
    close(x.grad.double(), gradient, 1e-4)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("name", ["clip", "symmetric_dpm", "one_sided_dpm", "info_nce", "dpr", "simclr"])
def test_one_candidate_is_no_task(name: str) -> None:
    x, y = embeddings(1)
    loss = build(name)(x, y).loss
    close(loss.detach(), 0.0)
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(loss, (x, y)))


def test_no_negative_is_refused() -> None:
    with raises(ConfigError, "objective=gcl"):
        build("gcl")(*embeddings(1))


def test_limits_of_the_temperature() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row: dict[str, Any] = {"directions": "x"}
    others = scores.masked_fill(torch.eye(6, dtype=torch.bool), -math.inf)
    close(on_scores(scores, "gcl", temperature=1e-5, **row)[0], (others.amax(1) - scores.diag()).mean(), 1e-4)
    mean = (scores.sum(1) - scores.diag()) / 5
    close(on_scores(scores, "gcl", temperature=1e5, **row)[0], (mean - scores.diag()).mean(), 1e-4)


@pytest.mark.parametrize("partition", ["sum", "mean"])
def test_slope_in_tau_of_a_scaled_term_is_an_entropy(partition: str) -> None:
    """H(π) for sums, −KL(π‖uniform) for means; with a radius ρ more."""
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_pi = torch.log_softmax(scores / 0.7, 1)
    entropy = -(log_pi.exp() * log_pi).sum(1).mean()
    for rho in (0.0, 0.4) if partition == "mean" else (0.0,):
        radius = {"rho": rho} if rho else {}
        options: dict[str, Any] = dict(directions="x", partition=partition, tau_scaled=True, similarity="dot", **radius)
        objective = build("clip", temperature=0.7, **options)
        objective.logit_scale.requires_grad_()
        loss = objective(scores, torch.eye(6, dtype=torch.float64)).loss
        (slope,) = torch.autograd.grad(loss, objective.logit_scale)
        want = entropy - (math.log(6) if partition == "mean" else 0.0) + rho
        close(-slope / 0.7, want)  # ∂/∂λ = −τ ∂/∂τ


def test_an_exact_duplicate_costs_log_2_unless_it_is_known() -> None:
    x, y = (torch.eye(4, dtype=torch.float64).repeat(2, 1) for _ in range(2))
    keys = {"y_keys": torch.arange(8) % 4}
    close(build("clip", temperature=0.01)(x, y).loss.detach(), math.log(2), 1e-9)
    close(build("clip", temperature=0.01, duplicates="mask")(x, y, **keys).loss.detach(), 0.0, 1e-9)
    options = dict(duplicates="positive", positives="merge")
    close(build("clip", temperature=0.01, **options)(x, y, **keys).loss.detach(), 0.0, 1e-9)


@pytest.mark.parametrize("tau", [1e-3, 1e-2, 1e3])
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
@pytest.mark.parametrize("length", [1.0, 100.0])  # of a vector; scores are up to its square
def test_extreme_temperatures_in_float32(tau: float, duplicates: str, length: float) -> None:
    x, y = (length * torch.nn.functional.normalize(e, dim=1).detach() for e in embeddings(64, 16))
    keys = {"x_keys": torch.arange(64) % 50, "y_keys": torch.arange(64) % 41}
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [e.to(dtype).clone().requires_grad_() for e in (x, y)]
        options: dict[str, Any] = dict(temperature=tau, learnable=False, duplicates=duplicates, similarity="dot")
        loss = build_objective("clip", **options).to(dtype)(*leaves, **keys).loss
        gradients.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    largest = float((x @ y.T).abs().max()) / tau
    for got, want in zip(*gradients, strict=True):
        assert got.dtype == torch.float32 and got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < max(1e-5, 64 * torch.finfo(torch.float32).eps * largest)

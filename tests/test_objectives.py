"""The objectives: every option against an independent reading, known answers, identities, what they allocate."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_losses import LargestTensor, reference_loss
from torch import Tensor

from data.errors import ConfigError
from train.losses import OBJECTIVES, build_objective, pairwise
from train.losses.config import Duplicates
from train.losses.objectives import SoftmaxObjective

X_KEYS = torch.tensor([1, 2, 3, 4, 4, 5, 6, 7, 8])
Y_KEYS = torch.tensor([1, 1, 2, 3, 4, 4, 5, 5, 5])  # with X_KEYS: 3~4~5 but not 3~5, and 6~7~8
KEYS = (X_KEYS, Y_KEYS)
GCL = {"candidates": "negatives", "partition": "mean", "tau_scaled": True, "directions": "sum", "learnable": False}

OPTIONS = {
    "similarity": ["cosine", "dot"],
    "candidates": ["all", "negatives"],
    "partition": ["sum", "mean"],
    "tau_scaled": [False, True],
    "directions": ["sum", "mean", "x", "y"],
    "duplicates": ["keep", "mask", "positive"],
}
COMBINATIONS = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]


def embeddings(n: int = 9, width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def build(name: str, **options: Any) -> SoftmaxObjective:
    """In float64 to the last digit; τ learns where it may."""
    learnable = options.pop("learnable", not options.get("tau_scaled", name == "symmetric_dpm"))
    objective = build_objective(name, learnable=learnable, **options).double()
    objective.logit_scale.data.fill_(-math.log(objective.options.temperature))
    return objective


def on_scores(scores: Tensor, name: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and G = ∂L/∂S for any square S: dot scores of the rows of S with unit vectors."""
    x = scores.double().clone().requires_grad_()
    loss = build(name, similarity="dot", **options)(x, torch.eye(len(scores), dtype=torch.float64)).loss
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


def close(got: Tensor, want: float | Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_combination_equals_the_reference(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "TILE", 4)
    x, y = embeddings()
    objective = build("clip", **options)
    inputs = [x, y] + [objective.logit_scale] * objective.options.learnable
    loss = objective(x, y, x_keys=X_KEYS, y_keys=Y_KEYS).loss
    want = reference_loss(x, y, objective.logit_scale, KEYS, **options)
    close(loss, want, 1e-11)
    for got, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(want, inputs), strict=True):
        close(got, expected, 1e-10)


@pytest.mark.parametrize("given", [{"x_keys": X_KEYS}, {"y_keys": Y_KEYS}], ids=str)
@pytest.mark.parametrize("duplicates", ["mask", "positive"])
def test_one_kind_of_key_is_enough(given: dict[str, Tensor], duplicates: str) -> None:
    x, y = embeddings()
    objective = build("clip", duplicates=duplicates)
    want = reference_loss(x, y, objective.logit_scale, tuple(given.values()), duplicates=duplicates)
    close(objective(x, y, **given).loss, want, 1e-11)


@pytest.mark.parametrize(
    "options",
    [{}, {"duplicates": "positive"}, {"duplicates": "mask", "directions": "y"}, {"candidates": "negatives"}],
    ids=str,
)
def test_finite_differences(options: dict[str, Any]) -> None:
    x, y = embeddings()
    objective = build("clip", **options)

    def loss(x: Tensor, y: Tensor, logit_scale: Tensor) -> Tensor:
        values = {"logit_scale": logit_scale}
        keys = {"x_keys": X_KEYS, "y_keys": Y_KEYS}
        return torch.func.functional_call(objective, values, (x, y), keys).loss

    scale = objective.logit_scale.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (x, y, scale), atol=1e-6)


def test_clip_is_cross_entropy_both_ways() -> None:
    x, y = embeddings(40, 8)
    objective = build_objective("clip").double()
    logits = objective.logit_scale.exp() * F.normalize(x, dim=1) @ F.normalize(y, dim=1).T
    truth = torch.arange(40)
    want = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
    close(objective(x, y).loss, want)


# Known answers.


def test_equal_scores() -> None:
    scores = torch.full((7, 7), 0.3)
    close(on_scores(scores, "clip")[0], math.log(7))
    close(on_scores(scores, "symmetric_dpm", temperature=0.2)[0], 2 * 0.2 * math.log(7))
    close(on_scores(scores, "clip", **GCL)[0], 0.0)
    ones = torch.ones(7, 3, dtype=torch.float64)
    metrics = build("clip")(ones, ones).metrics
    close(metrics["mi_bound"], 0.0, 1e-12)
    close(metrics["log_k"], math.log(7))


def test_two_by_two() -> None:
    a, b, tau = 0.4, 0.9, 0.25
    scores = torch.tensor([[a, b], [b, a]], dtype=torch.float64)
    close(on_scores(scores, "clip", temperature=tau)[0], math.log1p(math.exp((b - a) / tau)))
    for temperature in (tau, 10 * tau):  # τ-free: s⁻ − s⁺ exactly (2.5)
        value, gradient = on_scores(scores, "clip", temperature=temperature, **GCL)
        close(value, 2 * (b - a))
        close(gradient, torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))


def test_identity_scores() -> None:
    close(on_scores(torch.eye(6), "clip", temperature=0.5)[0], math.log(1 + 5 * math.exp(-2.0)))


def test_zero_logits_gradient() -> None:
    n = 5
    _, gradient = on_scores(torch.zeros(n, n), "clip", temperature=1.0)
    close(gradient, (1 / n - torch.eye(n, dtype=torch.float64)) / n)


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


def test_one_candidate_is_no_task() -> None:
    x, y = embeddings(1)
    loss = build("clip")(x, y).loss
    close(loss.detach(), 0.0)
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(loss, (x, y)))
    with pytest.raises(ConfigError, match="2 pairs"):
        build("clip", candidates="negatives")(x, y)


def test_limits_of_the_temperature() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = {**GCL, "directions": "x"}
    others = scores.masked_fill(torch.eye(6, dtype=torch.bool), -math.inf)
    close(on_scores(scores, "clip", temperature=1e-5, **row)[0], (others.amax(1) - scores.diag()).mean(), 1e-4)
    mean = (scores.sum(1) - scores.diag()) / 5
    close(on_scores(scores, "clip", temperature=1e5, **row)[0], (mean - scores.diag()).mean(), 1e-4)


@pytest.mark.parametrize("tau", [1e-3, 1e-2, 1e3])
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_extreme_temperatures_in_float32(tau: float, duplicates: str) -> None:
    x, y = (e.detach() for e in embeddings(64, 16))
    keys = {"x_keys": torch.arange(64) % 50, "y_keys": torch.arange(64) % 41}
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [e.to(dtype).requires_grad_() for e in (x, y)]
        objective = build_objective("clip", temperature=tau, learnable=False, duplicates=duplicates).to(dtype)
        loss = objective(*leaves, **keys).loss
        gradients.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*gradients, strict=True):
        assert got.dtype == torch.float32 and got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < max(1e-5, 64 * torch.finfo(torch.float32).eps / tau)


# Identities.


def test_identity_1_one_side_and_the_scale_of_clip() -> None:
    x, y = embeddings()
    tau = 0.3
    both = build("symmetric_dpm", temperature=tau)(x, y).loss
    sides = [build("clip", temperature=tau, directions=d)(x, y).loss * tau for d in "xy"]
    close(sides[0] + sides[1], both)
    close(build("clip", temperature=tau)(x, y).loss, both / (2 * tau))


def test_identity_2_gcl_is_log_mean_exp() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    tau = 0.5
    off = ~torch.eye(6, dtype=torch.bool)
    differences = (scores - scores.diag()[:, None])[off].view(6, 5)
    want = (tau * (differences / tau).exp().mean(1).log()).mean()
    value, gradient = on_scores(scores.detach(), "clip", temperature=tau, **{**GCL, "directions": "x"})
    close(value, want.detach())
    close(gradient, torch.autograd.grad(want, scores)[0])


def test_identity_5_shifts() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    c = torch.linspace(-1, 2, 6, dtype=torch.float64)
    value, gradient = on_scores(scores, "clip", directions="x")
    close(gradient.sum(1), torch.zeros(6))
    close(on_scores(scores + c[:, None], "clip", directions="x")[0], value, 1e-10)
    column = on_scores(scores, "clip", directions="y")[0]
    assert abs(on_scores(scores + c[:, None], "clip", directions="y")[0] - column) > 0.1
    close(on_scores(scores + 3.0, "clip")[0], on_scores(scores, "clip")[0], 1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_identity_14_order_of_pairs_and_sides(name: str) -> None:
    x, y = embeddings()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    objective = build(name, duplicates="positive")
    first = objective(x, y, x_keys=X_KEYS, y_keys=Y_KEYS)
    second = objective(x[order], y[order], x_keys=X_KEYS[order], y_keys=Y_KEYS[order])
    close(second.loss, first.loss)
    close(objective(y, x, x_keys=Y_KEYS, y_keys=X_KEYS).loss, first.loss)
    for metric, value in first.metrics.items():
        close(second.metrics[metric], value)


def test_an_exact_duplicate_costs_log_2_unless_it_is_known() -> None:
    x, y = (torch.eye(4, dtype=torch.float64).repeat(2, 1) for _ in range(2))
    keys = {"y_keys": torch.arange(8) % 4}
    close(build("clip", temperature=0.01)(x, y).loss.detach(), math.log(2), 1e-9)
    close(build("clip", temperature=0.01, duplicates="mask")(x, y, **keys).loss.detach(), 0.0, 1e-9)


# Skipped anchors, metrics, dtypes, memory.


def test_anchors_without_candidates_are_skipped() -> None:
    x, y = embeddings(4)
    options: dict[str, Any] = dict(candidates="negatives", duplicates="mask")
    objective = build("clip", **options)
    keys = torch.tensor([1, 1, 1, 1])
    loss = objective(x, y, y_keys=keys).loss
    assert loss == 0.0
    assert all(g.eq(0).all() for g in torch.autograd.grad(loss, (x, y, objective.logit_scale)))
    some = (torch.tensor([1, 2, 3, 3]), torch.tensor([5, 5, 5, 5]))
    left = objective(x, y, x_keys=some[0]).loss
    close(left, reference_loss(x, y, objective.logit_scale, some[:1], **options))
    bridge = (torch.tensor([1, 1, 2, 9]), torch.tensor([8, 3, 3, 3]))  # row 1 is the same item as 0, 2 and 3
    loss = objective(x, y, x_keys=bridge[0], y_keys=bridge[1]).loss
    want = reference_loss(x, y, objective.logit_scale, bridge, **options)
    close(loss, want)
    for got, expected in zip(torch.autograd.grad(loss, (x, y)), torch.autograd.grad(want, (x, y)), strict=True):
        assert got[1].eq(0).all()
        close(got, expected)


def test_metrics() -> None:
    x, y = embeddings()
    objective = build("clip")
    metrics = objective(x, y).metrics
    scores = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    off = ~torch.eye(9, dtype=torch.bool)
    close(metrics["positive_score"], scores.diag().mean())
    close(metrics["negative_score"], scores[off].mean())
    close(metrics["mi_bound"], math.log(9) - reference_loss(x, y, objective.logit_scale).detach())
    close(metrics["log_k"], math.log(9))
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    # scale and weights of the loss do not move the bound
    other = build("clip", tau_scaled=True, directions="sum", partition="mean")(x, y).metrics
    close(other["mi_bound"], metrics["mi_bound"])


@pytest.mark.parametrize(
    "options", [{"candidates": "negatives"}, {"duplicates": "mask"}, {"duplicates": "positive"}], ids=str
)
def test_no_mi_bound_where_it_is_none(options: dict[str, Any]) -> None:
    assert set(build("clip", **options)(*embeddings(), y_keys=Y_KEYS).metrics) == {"positive_score", "negative_score"}


def test_bfloat16_embeddings_are_scored_in_float32() -> None:
    x, y = (e.detach().bfloat16().requires_grad_() for e in embeddings(64, 16))
    objective = build_objective("clip")
    loss = objective(x, y).loss
    assert loss.dtype == torch.float32
    close(loss, objective(x.float(), y.float()).loss)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(loss, (x, y)))


@pytest.mark.parametrize("duplicates", list(Duplicates))
def test_autocast_changes_nothing(duplicates: Duplicates) -> None:
    x, y = (e.detach().float().requires_grad_() for e in embeddings())
    objective = build_objective("clip", duplicates=duplicates)
    plain = objective(x, y, x_keys=X_KEYS, y_keys=Y_KEYS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = objective(x, y, x_keys=X_KEYS, y_keys=Y_KEYS)
    assert torch.equal(plain.loss, cast.loss) and plain.metrics == cast.metrics


@pytest.mark.parametrize("duplicates", list(Duplicates))
@pytest.mark.parametrize("candidates", ["all", "negatives"])
def test_nothing_quadratic_is_allocated(
    duplicates: Duplicates, candidates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when half of all pairs are duplicates."""
    monkeypatch.setattr(pairwise, "TILE", 32)
    n, width = 512, 6
    x, y = (e.detach().float().requires_grad_() for e in embeddings(n, width))
    with LargestTensor() as seen:
        objective = build_objective("clip", duplicates=duplicates, candidates=candidates)
        objective(x, y, x_keys=torch.arange(n) % 2, y_keys=torch.arange(n)).loss.backward()
    assert seen.elements <= n * width

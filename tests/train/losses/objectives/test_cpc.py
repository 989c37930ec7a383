"""CPC against plain loops in float64: every (anchor, step, horizon) and its candidates one by one."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.messages import raises
from helpers.reference import LargestTensor
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.sums import tiles

B, T, D = 6, 5, 4
LENGTHS = torch.tensor([5, 1, 4, 2, 5, 0])


def sequences(b: int = B, steps: int = T, width: int = D, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(b, steps, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def build(**options: Any) -> Any:
    """In float64, with W away from the identity."""
    objective: Any = build_objective("cpc", **{"width": D, **options}).double()
    noise = torch.randn(objective.w_HDD.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    objective.w_HDD.data += 0.3 * noise
    return objective


def reference(objective: Any, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    options, scale = objective.options, objective.logit_scale.exp()
    values = []
    for i in range(len(x)):
        for t in range(x.shape[1]):
            for s in range(1, options.horizons + 1):
                if t + s >= lengths[i]:
                    continue
                w = objective.w_HDD[0 if options.shared_w else s - 1]
                prediction = torch.stack([w[d] @ x[i, t] for d in range(len(w))])
                candidates = {j: y[j, t + s] for j in range(len(y)) if t + s < lengths[j]}
                if options.similarity.value == "cosine":
                    prediction = prediction / prediction.norm()
                    candidates = {j: e / e.norm() for j, e in candidates.items()}
                logits = {j: scale * (prediction @ e) for j, e in candidates.items()}
                values.append(torch.logsumexp(torch.stack(list(logits.values())), 0) - logits[i])
    return torch.stack(values).mean()


def close(got: Tensor, want: float | Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("horizons", [1, 3, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"shared_w": True}, {"similarity": "cosine", "temperature": 0.2, "learnable": True}],
    ids=["own W", "shared W", "cosine"],
)
def test_every_option_equals_the_reference(
    options: dict[str, Any], horizons: int, lengths: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    x, y = sequences()
    objective = build(horizons=horizons, **options)
    loss = objective(x, y, lengths=lengths).loss
    want = reference(objective, x, y, torch.full((B,), T) if lengths is None else lengths)
    close(loss, want)
    leaves = [x, y, *(p for p in objective.parameters() if p.requires_grad)]
    for got, expected in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
        close(got, expected, 1e-9)


def test_finite_differences_of_w() -> None:
    x, y = (e.detach() for e in sequences(3, 3))
    objective = build(horizons=2, temperature=0.5, learnable=True)
    lengths = torch.tensor([3, 2, 3])

    def loss(w: Tensor, logit_scale: Tensor) -> Tensor:
        values = {"w_HDD": w, "logit_scale": logit_scale}
        return torch.func.functional_call(objective, values, (x, y), {"lengths": lengths}).loss

    inputs = [p.detach().clone().requires_grad_() for p in (objective.w_HDD, objective.logit_scale)]
    assert torch.autograd.gradcheck(loss, inputs, atol=1e-6)


def test_identity_6_one_horizon_is_info_nce() -> None:
    x, y = sequences(steps=2)
    objective = build_objective("cpc", width=D).double()
    info_nce = build_objective("info_nce", similarity="dot", temperature=1.0, learnable=False).double()
    close(objective(x, y).loss, info_nce(x[:, 0], y[:, 1]).loss)


def test_what_stands_in_padded_steps_does_not_matter() -> None:
    x, y = sequences()
    objective = build(horizons=3)
    padded = (torch.arange(T) >= LENGTHS[:, None])[:, :, None]
    results = []
    for filler in (0.0, 1e3):
        leaves = [e.detach().masked_fill(padded, filler).requires_grad_() for e in (x, y)]
        loss = objective(*leaves, lengths=LENGTHS).loss
        gradients = torch.autograd.grad(loss, leaves)
        assert all(g.masked_select(padded).eq(0).all() for g in gradients)
        results.append([loss, *gradients])
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-9)


def test_one_candidate_is_no_task() -> None:
    x, y = sequences(1)
    loss = build(horizons=2)(x, y).loss
    close(loss.detach(), 0.0)
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(loss, (x, y)))


def test_equal_scores_and_metrics() -> None:
    ones = torch.ones(B, T, D, dtype=torch.float64)
    result = build_objective("cpc", width=D, horizons=2).double()(ones, ones, lengths=LENGTHS)
    counts = {1: 4, 2: 3, 3: 3, 4: 2}  # sequences that reach each step; steps from 2 on are predicted twice
    anchors = {u: n * min(u, 2) for u, n in counts.items()}
    log_k = sum(anchors[u] * math.log(n) for u, n in counts.items()) / sum(anchors.values())
    close(result.loss.detach(), log_k)
    close(result.metrics["log_k"], log_k)
    close(result.metrics["mi_bound"], 0.0)
    close(result.metrics["positive_score"], float(D))


@pytest.mark.parametrize("tau", [1e-3, 1e3])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
def test_extreme_temperatures_in_float32(tau: float, lengths: Tensor | None) -> None:
    x, y = (e.detach() for e in sequences())
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [F.normalize(e, dim=-1).to(dtype).requires_grad_() for e in (x, y)]
        objective = build_objective("cpc", width=D, horizons=2, temperature=tau).to(dtype)
        loss = objective(*leaves, lengths=lengths).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == torch.float32 and got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < max(1e-5, 64 * torch.finfo(torch.float32).eps / tau)


def test_bfloat16_embeddings_are_scored_in_float32() -> None:
    x, y = (e.detach().bfloat16().requires_grad_() for e in sequences())
    objective = build_objective("cpc", width=D, horizons=2)
    loss = objective(x, y, lengths=LENGTHS).loss
    assert loss.dtype == torch.float32
    close(loss, objective(x.float(), y.float(), lengths=LENGTHS).loss, 1e-6)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(loss, (x, y)))


def test_nothing_quadratic_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "KEPT", 0)
    b, steps, width = 256, 3, 2
    x, y = (e.detach().float().requires_grad_() for e in sequences(b, steps, width))
    with LargestTensor() as seen:
        objective = build_objective("cpc", width=width, horizons=2)
        objective(x, y, lengths=torch.arange(b) % (steps + 1)).loss.backward()
    assert seen.elements <= b * steps * width


def test_refusals() -> None:
    x, y = sequences()
    with raises(ConfigError, "horizons=0"):
        build_objective("cpc", width=D, horizons=0)
    with raises(ConfigError, "width"):
        build_objective("cpc")
    with raises(ValueError, "(b, T, 4)", "(6, 5, 3)"):
        build()(x[:, :, :3], y[:, :, :3])
    with raises(ValueError):
        build()(x, y, lengths=torch.ones(B, dtype=torch.int64))
    with raises(ValueError, "negatives"):
        build()(x, y, negatives=x)
    for lengths in ([2, 3], [-1, 7]):  # of steps that stand one after the other
        with raises(ValueError, "lengths", "6", str(sum(lengths)), str(min(lengths))):
            build()(x[:, 0], y[:, 0], lengths=torch.tensor(lengths))

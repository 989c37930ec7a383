"""Noise-contrastive estimation: where noise comes from, its population, its limits, given log-probabilities."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.logistic import KEYS, WIDTH, N, build, close, embeddings, mean, reference, same_value_and_gradients, sp
from helpers.messages import raises
from helpers.reference import LargestTensor
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.objectives.logistic import nce_from_log_u
from dyad.train.losses.sums import tiles

P = torch.tensor([0.1, 0.25, 0.05, 0.4, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.3, 0.1, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
@pytest.mark.parametrize("k", [None, 4.0])
def test_the_density_of_the_columns(duplicates: str, k: float | None, tmp_path: Path) -> None:
    x, y = embeddings()
    table = np.log(np.linspace(0.01, 0.05, 30))
    np.save(tmp_path / "log_q.npy", table)
    keys_n, by_key = KEYS[1].unique().numpy(), str(tmp_path / "log_q.safetensors")
    write_log_weights(LogWeights(by_key, LOG_Q, keys_n, table[keys_n]))
    ids = torch.tensor([3, 29, 5, 0, 11, 12, 13, 7, 8])
    given = {"sample_ids_b": ids, "x_keys": KEYS[0], "y_keys": KEYS[1]}
    for options, log_q in (
        ({"density": "file", "noise_file": str(tmp_path / "log_q.npy")}, torch.from_numpy(table)[ids]),
        ({"density": "file", "noise_file": by_key}, torch.from_numpy(table)[KEYS[1]]),
        ({"density": "uniform", "num_samples": 30}, torch.full((N,), -math.log(30.0), dtype=torch.float64)),
    ):
        objective = build("nce", k=k, duplicates=duplicates, **options)
        want = reference("nce", objective, x, y, log_q=log_q)
        same_value_and_gradients(objective, objective(x, y, **given).loss, want, x, y)


def test_a_bad_density_is_refused(tmp_path: Path) -> None:
    x, y = embeddings()
    path = tmp_path / "log_q.npy"
    np.save(path, np.array([0.0, -np.inf]))
    with raises(ConfigError, "num_samples"):
        build("nce", density="uniform")
    with raises(ConfigError, "sample_ids"):
        build("nce", density="file", noise_file=str(path))(x, y)
    with raises(DataError, "sample id 1"):
        build("nce", density="file", noise_file=str(path))(x[:2], y[:2], torch.arange(2))
    with raises(ConfigError):
        build("nce", density="file", noise_file=str(path))(x, y, torch.arange(N), negatives=torch.zeros(N, 1, WIDTH))


def drawn(k: int = 7) -> tuple[Tensor, Columns, Tensor]:
    """Embeddings of k drawn items and the same as columns, on uneven rows; log q of the pairs' y and of these."""
    further, _ = embeddings(k, seed=1)
    log_q = -1 - torch.rand(N + k, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows = (torch.arange(k) ** 2) % N
    columns = Columns(further, rows, torch.arange(k), torch.zeros(k, dtype=torch.bool), importance_k=log_q[N:])
    return further, columns, log_q


@pytest.mark.parametrize("k", [None, 3.0])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_drawn_noise(k: float | None, similarity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row against all drawn items, and no item of the batch; metrics, and each gradient."""
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 100)
    (x, y), (further, columns, all_q) = embeddings(), drawn()
    objective = build("nce", noise="unigram", k=k, similarity=similarity, init_bias=0.25)
    result = objective(x, y, negatives=columns, importance=all_q[:N])
    unit = (lambda e: F.normalize(e, dim=1)) if similarity == "cosine" else (lambda e: e)
    log_u = unit(x) @ unit(torch.cat([y, further])).T * objective.logit_scale.exp() + objective.bias
    used = k or len(further)
    a = [[log_u[i, j] - all_q[j] - math.log(used) for j in range(len(all_q))] for i in range(N)]
    noise = [a[i][j] for i in range(N) for j in range(N, len(all_q))]
    want = mean([sp(-a[i][i]) for i in range(N)]) + used * mean([sp(v) for v in noise])
    same_value_and_gradients(objective, result.loss, want, x, y, further)
    own = nce_from_log_u(log_u.diag(), log_u[:, N:], all_q[:N], all_q[N:].expand(N, -1), k)
    close(result.loss, own)
    close(result.metrics["data_probability"], mean([a[i][i].sigmoid() for i in range(N)]).detach())
    close(result.metrics["noise_probability"], mean([v.sigmoid() for v in noise]).detach())
    z = [torch.stack([(log_u[i, j] - all_q[j]).exp() for j in range(N, len(all_q))]).mean().log() for i in range(N)]
    close(result.metrics["log_z"], mean(z).detach())


def test_drawn_noise_by_finite_differences() -> None:
    (x, y), (further, columns, log_q) = embeddings(), drawn(3)
    objective = build("nce", noise="uniform", init_bias=0.1)

    def loss(x: Tensor, y: Tensor, further: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        given = {"negatives": replace(columns, embeddings_kD=further), "importance": log_q[:N]}
        return torch.func.functional_call(objective, {"logit_scale": scale, "bias": bias}, (x, y), given).loss

    learnt = [p.detach().clone().requires_grad_() for p in (objective.logit_scale, objective.bias)]
    assert torch.autograd.gradcheck(loss, (x, y, further, *learnt), atol=1e-6)


def test_memory_of_drawn_noise_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has a number for each pair of the 512 rows and the 512 drawn items."""
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "KEPT", 0)
    n, width = 512, 6
    x, y, further = (torch.randn(n, width, requires_grad=True) for _ in range(3))
    columns = Columns(further, torch.arange(n), importance_k=torch.full((n,), -3.0))
    with LargestTensor() as seen:
        build_objective("nce", noise="unigram")(x, y, negatives=columns, importance=torch.zeros(n)).loss.backward()
    assert seen.elements <= 3 * 2 * n * width


def test_what_is_no_drawn_noise_is_refused() -> None:
    (x, y), (_, columns, log_q) = embeddings(), drawn()
    objective, log_q = build("nce", noise="unigram"), log_q[:N]
    without = replace(columns, importance_k=None)
    for error, given, named in (
        (ConfigError, {}, "noise=unigram"),
        (ConfigError, {"negatives": without, "importance": log_q}, "noise=unigram"),
        (ValueError, {"negatives": columns}, "importance"),
        (ValueError, {"negatives": columns, "importance": log_q[1:]}, "importance"),
        (ValueError, {"negatives": columns, "importance": log_q.log()}, "log q"),
        (ValueError, {"negatives": columns, "importance": log_q, "excluded": [[0, 1]]}, "excluded"),
    ):
        with raises(error, named):
            objective(x, y, **given)
    with raises(ValueError, "importance"):
        build("nce")(x, y, importance=log_q)
    for name in ("clip", "nce"):
        with raises(ValueError, name, "importance_k"):
            build_objective(name)(x, y, negatives=columns)


def test_identity_7_one_point_is_a_softmax_against_zero() -> None:
    a = torch.tensor(0.7).double()
    close(sp(-a), F.cross_entropy(torch.stack([a, torch.tensor(0.0).double()])[None], torch.tensor([0])))
    x, y = embeddings(2)
    two_way = build_objective("info_nce", temperature=0.3).double()(x, y).loss.detach()
    assert abs(float((two_way - build("nce")(x, y).loss).detach())) > 0.05


def population(log_u: Tensor, p: Tensor, q: Tensor, k: float) -> Tensor:
    """Expected NCE over an enumerable space, from counts: point v is data p_v n times and noise q_v n times."""
    n = 1000
    data, noise = ((n * w).round().long() for w in (p, q))
    take = [torch.arange(len(p)).repeat_interleave(count) for count in (data, noise)]
    log_q = q.log()
    return nce_from_log_u(log_u[take[0]], log_u[take[1]], log_q[take[0]], log_q[take[1]], k)


@pytest.mark.parametrize("k", [0.5, 1.0, 8.0, 1e4])
def test_identity_8_gradient_of_the_population(k: float) -> None:
    u = torch.tensor([0.3, 0.7, 0.05, 0.2, 1.1], dtype=torch.float64)
    log_u = u.log().requires_grad_()
    (gradient,) = torch.autograd.grad(population(log_u, P, Q, k), log_u)
    close(gradient, -k * Q / (u + k * Q) * (P - u), 1e-10)


def test_identity_8_maximum_likelihood_is_the_limit() -> None:
    for z, limit_is_mle in ((1.0, True), (1.7, False)):
        u = z * torch.tensor([0.3, 0.2, 0.1, 0.25, 0.15], dtype=torch.float64)
        errors = []
        for k in (1e3, 1e4, 1e5):
            log_u = u.log().requires_grad_()
            (gradient,) = torch.autograd.grad(population(log_u, P, Q, k), log_u)
            errors.append(float((gradient + P - u).norm()))
            if k == 1e5:
                assert bool((gradient + P - u / z).norm() < 1e-4) is limit_is_mle
        assert errors[0] / errors[1] == pytest.approx(10, rel=0.02) == errors[1] / errors[2]


def test_identity_8_normalised_at_the_optimum() -> None:
    for c, stationary in ((1.0, True), (1.3, False)):
        log_u = (c * P).log().requires_grad_()
        (gradient,) = torch.autograd.grad(population(log_u, P, Q, 2.0), log_u)
        assert bool(gradient.norm() < 1e-12) is stationary


def test_log_z_learns_the_partition() -> None:
    """u = 3p: the gradient of log Z vanishes at log 3, and only there."""
    log_u = (3 * P).log()
    for value, sign in ((math.log(3), 0), (0.0, -1), (2.0, 1)):
        log_z = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        take = torch.arange(5).repeat_interleave((1000 * P).round().long())
        noise = torch.arange(5).repeat_interleave((1000 * Q).round().long())
        loss = nce_from_log_u(log_u[take], log_u[noise], Q.log()[take], Q.log()[noise], 2.0, log_z)
        (gradient,) = torch.autograd.grad(loss, log_z)
        assert abs(float(gradient)) < 1e-12 if sign == 0 else float(gradient) * sign > 0.01


def test_given_log_probabilities() -> None:
    generator = torch.Generator().manual_seed(2)
    log_u, log_q = (-torch.rand(12, generator=generator).double() for _ in range(2))
    log_u.requires_grad_()
    for k in (None, 1.5):
        loss = nce_from_log_u(log_u[:4], log_u[4:].view(4, 2), log_q[:4], log_q[4:].view(4, 2), k, 0.3)
        used = k or 2.0
        a = [log_u[i] - 0.3 - log_q[i] - math.log(used) for i in range(12)]
        want = mean([sp(-v) for v in a[:4]]) + used * mean([sp(v) for v in a[4:]])
        close(loss, want)
        for got, expected in zip(torch.autograd.grad(loss, log_u), torch.autograd.grad(want, log_u), strict=True):
            close(got, expected)
    with raises(ValueError):
        nce_from_log_u(log_u[:2], log_u[2:], torch.tensor([0.0, -math.inf]), log_q[2:])


def test_identity_12_the_optimum_of_local_nce_carries_the_prior() -> None:
    """Anchors x, K − 1 candidates of the marginal: the best table is the log-ratio − log(K − 1), or the log-ratio."""
    joint = torch.tensor([[0.2, 0.05, 0.1], [0.05, 0.3, 0.3]], dtype=torch.float64)
    px, py = joint.sum(1), joint.sum(0)
    ratio = (joint / (px[:, None] * py)).log()
    k = 7
    h = torch.zeros_like(joint, requires_grad=True)
    for shift, want in ((0.0, ratio - math.log(k)), (-math.log(k), ratio)):
        h.data.zero_()
        for _ in range(60):  # Newton: the loss is separable
            a = h.detach() + shift
            slope = -joint * torch.sigmoid(-a) + k * px[:, None] * py * torch.sigmoid(a)
            curve = (joint + k * px[:, None] * py) * torch.sigmoid(a) * torch.sigmoid(-a)
            h.data -= slope / curve
        close(h.detach(), want, 1e-9)

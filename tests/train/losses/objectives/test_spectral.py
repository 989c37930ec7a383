"""The spectral family against plain loops in float64; what its optimum is; what it allocates."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.reference import LargestTensor
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective

N, D = 7, 4
NAMES = ["spectral", "spectral_alternating", "pca_penalty", "vicreg"]


def embeddings(n: int = N, width: int = D, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def build(name: str, **options: Any) -> Any:
    return build_objective(name, **options).double()


def close(got: Tensor, want: float | Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


def mean_outer(e: Tensor) -> Tensor:
    return torch.stack([torch.outer(row, row) for row in e]).mean(0)


def spectral(x: Tensor, y: Tensor, pairs: str) -> Tensor:
    n = len(x)
    chosen = [(i, j) for i, j in itertools.product(range(n), range(n)) if pairs == "all" or i != j]
    squares = torch.stack([(x[i] @ y[j]) ** 2 for i, j in chosen]).mean()
    return squares - 2 * torch.stack([x[i] @ y[i] for i in range(n)]).mean()


def against_frozen(phi: Tensor, nu: Tensor, second: Tensor) -> Tensor:
    return torch.stack([p @ second @ p - 2 * (p @ v) for p, v in zip(phi, nu, strict=True)]).mean()


def alternating(
    x: Tensor, y: Tensor, directions: str, x_target: Tensor | None = None, y_target: Tensor | None = None
) -> Tensor:
    nu_x, nu_y = (e.detach() if t is None else t for e, t in ((x, x_target), (y, y_target)))
    row = against_frozen(x, nu_y, mean_outer(nu_y))
    column = against_frozen(y, nu_x, mean_outer(nu_x))
    return {"x": row, "y": column, "sum": row + column, "mean": (row + column) / 2}[directions]


def pca_penalty(x: Tensor, y: Tensor, penalty: float, cov: str, center: bool) -> Tensor:
    views = [e - e.mean(0) if center else e for e in ([x] if cov == "first" else [x, y])]
    moment = torch.stack([mean_outer(e) for e in views]).mean(0)
    distance = sum((moment[i, j] - float(i == j)) ** 2 for i in range(D) for j in range(D))
    return penalty * distance - torch.stack([a @ b for a, b in zip(x, y, strict=True)]).mean()


def vicreg(x: Tensor, y: Tensor, **options: float) -> Tensor:
    """Loops over dimensions; statistics by torch.var and by hand."""
    n, width = x.shape
    weights = {"invariance": 25.0, "variance": 25.0, "covariance": 1.0, "gamma": 1.0, "eps": 1e-4, **options}
    apart = torch.stack([(a - b) @ (a - b) for a, b in zip(x, y, strict=True)]).mean() / width
    hinge, squares = [], []
    for e in (x, y):
        for d, k in itertools.product(range(width), range(width)):
            if d == k:
                hinge.append((weights["gamma"] - (e[:, d].var() + weights["eps"]) ** 0.5).clamp(min=0))
            else:
                cov = ((e[:, d] - e[:, d].mean()) * (e[:, k] - e[:, k].mean())).sum() / (n - 1)
                squares.append(cov**2 / width)
    terms = {"invariance": apart, "variance": torch.stack(hinge).mean(), "covariance": torch.stack(squares).sum()}
    return torch.stack([weights[name] * term for name, term in terms.items()]).sum()


ENTRIES: dict[str, list[dict[str, Any]]] = {
    "spectral": [{"pairs": pairs} for pairs in ("offdiag", "all")],
    "spectral_alternating": [{"directions": directions} for directions in ("x", "y", "sum", "mean")],
    "pca_penalty": [
        {"penalty": penalty, "cov": cov, "center": center}
        for penalty, cov, center in itertools.product([0.0, 0.7], ["first", "both"], [False, True])
    ],
    "vicreg": [{}, {"invariance": 0.0, "covariance": 3.0, "gamma": 2.0}, {"variance": 0.5, "gamma": 0.1, "eps": 0.3}],
}
REFERENCES = {
    "spectral": spectral,
    "spectral_alternating": alternating,
    "pca_penalty": pca_penalty,
    "vicreg": vicreg,
}
CASES = [(name, options) for name, listed in ENTRIES.items() for options in listed]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_every_option_equals_the_reference(name: str, options: dict[str, Any], similarity: str) -> None:
    x, y = embeddings()
    loss = build(name, similarity=similarity, **options)(x, y).loss
    unit = (e / e.norm(dim=1, keepdim=True) for e in (x, y))
    want = REFERENCES[name](*(unit if similarity == "cosine" else (x, y)), **options)
    close(loss, want)
    gradients = (torch.autograd.grad(value, (x, y), materialize_grads=True) for value in (loss, want))
    for got, expected in zip(*gradients, strict=True):
        close(got, expected, 1e-10)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "spectral_alternating"], ids=str)
def test_finite_differences(name: str, options: dict[str, Any]) -> None:
    objective = build(name, **options)
    assert torch.autograd.gradcheck(lambda x, y: objective(x, y).loss, embeddings(), atol=1e-6)


def test_the_frozen_side_has_no_gradient() -> None:
    x, y = embeddings()
    loss = build("spectral_alternating", directions="x")(x, y).loss
    with torch.no_grad():
        second, n = mean_outer(y), len(x)
        want = 2 / n * (x @ second - y)
    dx, dy = torch.autograd.grad(loss, (x, y), materialize_grads=True)
    close(dx, want)
    assert dy.eq(0).all()


# Known answers.


def test_known_answers_of_vicreg() -> None:
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    spread = (4 / 3) ** 0.5  # the standard deviation of a column
    result = build("vicreg", gamma=2.0, eps=1e-12)(signs, signs)
    for name, value in {"invariance": 0.0, "variance": 2 - spread, "covariance": 0.0}.items():
        close(result.metrics[name], value, 1e-10)
    close(result.loss, 25 * (2 - spread), 1e-10)
    same = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)  # every covariance is 2
    metrics = build("vicreg")(same, -same).metrics
    close(metrics["invariance"], 4.0)
    close(metrics["variance"], 0.0)
    close(metrics["covariance"], 2 * 2 * 2.0**2 / 2)
    close(build("vicreg")(same + 1e6, 1e6 - same).metrics["covariance"], 8.0, 1e-9)


def test_known_answers() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    close(build("spectral")(eye, eye).loss, -2.0)
    close(build("spectral", pairs="all")(eye, eye).loss, -2.0 + 1 / 6)
    for penalty, cov in itertools.product([0.0, 1.0, 30.0], ["first", "both"]):
        close(build("pca_penalty", penalty=penalty, cov=cov)(math.sqrt(6) * eye, math.sqrt(6) * eye).loss, -6.0, 1e-10)


def test_one_pair_drops_the_second_term() -> None:
    x, y = embeddings(1)
    close(build("spectral")(x, y).loss, -2 * (x * y).sum())
    close(build("vicreg")(x, y).loss, 25 * (x - y).square().mean() + 25 * (1 - 0.01))
    for name, options in CASES:
        loss = build(name, **options)(x, y).loss
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, y), materialize_grads=True))


# Identities.


COUNTS = torch.tensor([[3, 1, 0, 2, 1], [0, 2, 4, 0, 1], [1, 1, 1, 3, 0]])  # how often each (x, y) is drawn


def population(phi: Tensor, psi: Tensor) -> Tensor:
    """Expected loss: a batch that holds every (x, y) as often as drawn; all its pairs are then p(x) p(y)."""
    i, j = COUNTS.nonzero().repeat_interleave(COUNTS[COUNTS > 0], 0).unbind(1)
    return build("spectral", pairs="all")(phi[i], psi[j]).loss


def test_identity_9_low_rank_approximation() -> None:
    """‖A − ΦΨᵀ‖² = L + ‖A‖², A = p(x, y)/√(p(x) p(y)), least at the truncated SVD: −Σ_{k≤d} σ_k²."""
    p = COUNTS.double() / COUNTS.sum()
    px, py = p.sum(1), p.sum(0)
    a = p / torch.outer(px, py).sqrt()
    generator = torch.Generator().manual_seed(4)
    phi, psi = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in a.shape)
    weighted = (px.sqrt()[:, None] * phi) @ (py.sqrt()[:, None] * psi).T
    close(population(phi, psi) + a.square().sum(), (a - weighted).square().sum())

    u, sigma, v = torch.linalg.svd(a, full_matrices=False)
    best = [e[:, :2] * sigma[:2].sqrt() / w.sqrt()[:, None] for e, w in ((u, px), (v.T, py))]
    phi, psi = (e.requires_grad_() for e in best)
    loss = population(phi, psi)
    close(loss.detach(), -sigma[:2].square().sum())
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(loss, (phi, psi)))
    close(sigma[0], 1.0)
    chi2 = (torch.outer(px, py) * (p / torch.outer(px, py) - 1).square()).sum()
    close(sigma.square().sum() - 1, chi2)


def test_identity_10_invariance_and_decorrelation() -> None:
    x, y = embeddings()
    eye = torch.eye(D, dtype=torch.float64)
    apart = (x - y).square().sum(1).mean()
    moments = torch.trace((mean_outer(x) - eye) @ (mean_outer(y) - eye))
    close(build("spectral", pairs="all")(x, y).loss + D, apart + moments)


def test_identity_10_alternating_is_the_gradient_of_one_side() -> None:
    x, y = embeddings()
    full = build("spectral", pairs="all")(x, y).loss
    frozen = build("spectral_alternating", directions="x")(x, y).loss
    close(frozen, full)
    close(torch.autograd.grad(frozen, x)[0], torch.autograd.grad(full, x)[0])
    z, _ = embeddings()  # a symmetric joint: one encoder for both sides
    both = torch.autograd.grad(build("spectral", pairs="all")(z, z).loss, z)[0]
    half = torch.autograd.grad(build("spectral_alternating", directions="x")(z, z).loss, z)[0]
    close(2 * half, both)


def test_offdiag_is_unbiased() -> None:
    """Over all ways to draw two pairs of four, the mean of offdiag is its value on the four; that of all is not."""
    x, y = (e.detach() for e in embeddings(4))
    for pairs, equal in (("offdiag", True), ("all", False)):
        objective = build("spectral", pairs=pairs)
        drawn = [objective(x[list(c)], y[list(c)]).loss for c in itertools.combinations(range(4), 2)]
        assert bool((torch.stack(drawn).mean() - objective(x, y).loss).abs() < 1e-12) is equal


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_identity_14_order_of_pairs(name: str, options: dict[str, Any]) -> None:
    x, y = embeddings()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    objective = build(name, **options)
    first, second = objective(x, y), objective(x[order], y[order])
    close(second.loss, first.loss)
    for metric, value in first.metrics.items():
        close(second.metrics[metric], value, 1e-10)


# Running mean of Λ.


def test_running_second_moment() -> None:
    objective = build("spectral_alternating", directions="x", lambda_momentum=0.75, width=D)
    batches = [embeddings(seed=seed) for seed in range(3)]
    second = None
    for x, y in batches:
        batch = mean_outer(y.detach())
        second = batch if second is None else 0.75 * second + 0.25 * batch
        loss = objective(x, y).loss
        close(loss, against_frozen(x, y.detach(), second))
    assert second is not None
    close(objective.moments_2DD[1], second)


def test_running_means_stay_where_nothing_learns() -> None:
    """In training mode too, as the state of samples does."""
    objective = build("spectral_alternating", lambda_momentum=0.5, width=D)
    objective(*embeddings(N, D))
    before = objective.moments_2DD.clone()
    with torch.no_grad():
        objective(*embeddings(N, D, seed=5))
    assert torch.equal(objective.moments_2DD, before)


PRODUCTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NAMES],
    ("binary_nce", {"negatives_per_positive": 2}),
    ("cpc", {"width": D}),
]


@pytest.mark.parametrize(("name", "options"), PRODUCTS)
def test_backward_inside_autocast_rounds_nothing(name: str, options: dict[str, Any]) -> None:
    objective = build_objective(name, **options)
    gradients = []
    for autocast in (False, True):
        x, y = (e.detach().float().view(-1, 2, D) if name == "cpc" else e.detach().float() for e in embeddings(8, D))
        leaves = (x.requires_grad_(), y.requires_grad_(), *(p for p in objective.parameters() if p.requires_grad))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            gradients.append(torch.autograd.grad(objective(x, y).loss, leaves, materialize_grads=True))
    assert all(torch.equal(plain, cast) for plain, cast in zip(*gradients, strict=True))


def test_undo_and_resume_bring_the_running_mean_back() -> None:
    objective = build("spectral_alternating", lambda_momentum=0.5, width=D)
    x, y = embeddings()
    objective.undo()
    first = objective(x, y).loss
    objective.undo()
    close(objective(x, y).loss, first)
    resumed = build("spectral_alternating", lambda_momentum=0.5, width=D)
    resumed.load_state_dict(objective.state_dict())
    other = embeddings(seed=1)
    wanted = objective(*other).loss
    close(resumed(*other).loss, wanted)
    objective.undo()
    close(objective(*other).loss, wanted)


def test_evaluation_leaves_the_running_mean() -> None:
    objective = build("spectral_alternating", lambda_momentum=0.5, width=D)
    objective(*embeddings())
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    objective.eval()(*embeddings(seed=1))
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())


# Metrics, extremes, dtypes, memory, refusals.


def test_metrics() -> None:
    x, y = (e.detach() for e in embeddings())
    metrics = build("spectral")(x, y).metrics
    close(metrics["positive_score"], (x * y).sum(1).mean())
    scores = x @ y.T
    close(metrics["negative_square"], scores[~torch.eye(N, dtype=torch.bool)].square().mean())
    eye = torch.eye(D, dtype=torch.float64)
    close(metrics["x_moment_error"], torch.linalg.matrix_norm(mean_outer(x) - eye))
    close(metrics["y_moment_error"], torch.linalg.matrix_norm(mean_outer(y) - eye))
    sigma = torch.linalg.svdvals(x.T @ y / N)
    close(metrics["rank"], sigma.square().sum() ** 2 / (sigma**4).sum())
    assert build("spectral")(torch.zeros(3, 2), torch.zeros(3, 2)).metrics["rank"] == 0
    one, many = torch.ones(9, 3), torch.eye(3).repeat(3, 1)
    close(build_objective("spectral")(1e-12 * one, 1e-12 * one).metrics["rank"], 1.0, 1e-5)
    close(build_objective("spectral")(many, many).metrics["rank"], 3.0, 1e-5)
    moment = mean_outer(torch.cat([x, y]))
    close(build("pca_penalty")(x, y).metrics["moment_error"], torch.linalg.matrix_norm(moment - eye))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_sizes_in_float32(name: str, options: dict[str, Any], size: float) -> None:
    """Scores up to ±10⁴ and beyond."""
    x, y = (size * e.detach() for e in embeddings(64, 16))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [e.to(dtype).requires_grad_() for e in (x, y)]
        loss = build_objective(name, **options).to(dtype)(*leaves).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == torch.float32 and got.isfinite().all()
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_bfloat16_embeddings_are_summed_in_float32(name: str, options: dict[str, Any]) -> None:
    x, y = (e.detach().bfloat16().requires_grad_() for e in embeddings(64, 16))
    objective = build_objective(name, **options)
    loss = objective(x, y).loss
    assert loss.dtype == torch.float32
    close(loss, objective(x.float(), y.float()).loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective(x, y).loss, loss)
    gradients = torch.autograd.grad(loss, (x, y), materialize_grads=True)
    assert all(g.dtype == torch.bfloat16 for g in gradients)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_nothing_quadratic_is_allocated(name: str, options: dict[str, Any]) -> None:
    x, y = (e.detach().float().requires_grad_() for e in embeddings(512, 6))
    with LargestTensor() as seen:
        build_objective(name, **options)(x, y).loss.backward()
    assert seen.elements <= 2 * 512 * 6


def test_refusals() -> None:
    x, y = embeddings()
    for name in NAMES:
        with raises(ValueError, "(7, 4)", "(6, 4)"):
            build(name)(x, y[:6])
        with raises(ValueError):
            build(name)(x[:0], y[:0])
        with raises(ValueError, name):
            build(name)(x, y, negatives=torch.zeros(N, 1, D))
    with raises(ConfigError, "width=None"):
        build_objective("spectral_alternating", lambda_momentum=0.5)
    with raises(ConfigError, "lambda_momentum=1.0"):
        build_objective("spectral_alternating", lambda_momentum=1.0, width=D)
    with raises(ConfigError, "penalty=-1.0"):
        build_objective("pca_penalty", penalty=-1.0)
    with raises(ConfigError, "width=3"):
        build("spectral_alternating", lambda_momentum=0.5, width=3)(x, y)
    with raises(ValueError, "y_target"):
        build("spectral_alternating")(x, y, y_target=y[:6])
    for name in ("spectral", "vicreg", "clip"):
        with raises(ValueError, name):
            build(name)(x, y, x_target=x)
    with raises(ConfigError, "eps=0.0"):
        build_objective("vicreg", eps=0.0)

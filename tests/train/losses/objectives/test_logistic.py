"""The logistic family: every entry and option against plain loops in float64, known answers, identities, extremes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.dist import in_ways, launch
from helpers.logistic import KEYS, WIDTH, N, build, close, embeddings, reference, same_value_and_gradients, sp
from helpers.messages import raises
from helpers.reference import LargestTensor
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.objectives.logistic import nce_from_log_u
from dyad.train.losses.sums import tiles

ENTRIES = [
    ("siglip", {}),
    ("siglip", {"init_bias": None}),
    ("siglip", {"init_scale": 4.0, "learnable": False}),
    ("local_nce", {}),
    ("local_nce", {"init_bias": 0.5, "bias_learnable": False}),
    ("nce", {}),
    ("nce", {"k": 2.5, "init_bias": 0.25}),
    ("binary_nce", {}),
    ("binary_nce", {"init_bias": -1.0}),
]


@pytest.mark.parametrize(("name", "options"), ENTRIES, ids=str)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_every_option_equals_the_reference(
    name: str, options: dict[str, Any], similarity: str, duplicates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    x, y = embeddings()
    objective = build(name, similarity=similarity, duplicates=duplicates, **options)
    loss = objective(x, y, x_keys=KEYS[0], y_keys=KEYS[1]).loss
    same_value_and_gradients(objective, loss, reference(name, objective, x, y), x, y)


@pytest.mark.parametrize("name", ["siglip", "local_nce", "nce", "binary_nce"])
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_further_columns_and_lists_of_pairs(name: str, duplicates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard negatives with keys, one a further positive; own positives or listed ones; excluded pairs."""
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    x, y = embeddings()
    further, _ = embeddings(4, seed=1)
    columns = torch.cat([y, further])
    keys = (KEYS[0], torch.cat([KEYS[1], torch.tensor([5, 9, 1, 9])]))
    more = Columns(further, torch.tensor([0, 0, 3, 8]), keys[1][N:], torch.tensor([False, True, False, False]))
    excluded = {(0, 3), (3, 4), (5, 11), (2, 9)}
    own = {(i, i) for i in range(N)}
    cases: list[tuple[dict[str, Any], set[tuple[int, int]]]] = [
        ({}, own | {(0, 10)}),
        ({"positives": torch.tensor([[0, 1], [0, 0], [3, 3], [6, 7]])}, {(0, 1), (0, 0), (3, 3), (6, 7), (0, 10)}),
    ]
    for given, data in cases:
        objective = build(name, duplicates=duplicates)
        loss = objective(
            x, y, negatives=more, excluded=torch.tensor(sorted(excluded)), x_keys=KEYS[0], y_keys=KEYS[1], **given
        ).loss
        want = reference(name, objective, x, columns, keys, data, excluded)
        same_value_and_gradients(objective, loss, want, x, y, further)


@pytest.mark.parametrize("name", ["siglip", "binary_nce"])
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_wrong_x_make_noise_pairs_with_the_y_of_all_pairs(name: str, duplicates: str) -> None:
    """One of them is the x of rows 3 and 4, whose y are then neither noise nor data with it."""
    x, y = embeddings()
    wrong, keys = embeddings(3, seed=1)[0], torch.tensor([90, 4, 91])
    objective, all_x = build(name, duplicates=duplicates), torch.cat([x, wrong])
    own, alike = {(i, i) for i in range(N)}, {(N + 1, 3), (N + 1, 4)}
    excluded = set() if duplicates == "keep" else alike
    want = reference(name, objective, all_x, y, (torch.cat([KEYS[0], keys]),), own, excluded)
    want = want * len(all_x) / N if name == "siglip" else want  # its mean is one over pairs
    rows = XNegatives(wrong, torch.tensor([0, 0, 7]), keys)
    loss = objective(x, y, x_negatives=rows, x_keys=KEYS[0]).loss
    same_value_and_gradients(objective, loss, want, x, y, wrong)


def test_rows_of_y_that_are_no_pairs() -> None:
    x, y = embeddings()
    listed = torch.tensor([[0, 1], [3, 2]])
    objective = build("nce", k=3.0)
    want = reference("nce", objective, x, y[:4], (), {(0, 1), (3, 2)})
    same_value_and_gradients(objective, objective(x, y[:4], positives=listed).loss, want, x, y)


@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
@pytest.mark.parametrize("r", [1, 3, N - 1])
def test_noise_of_the_next_rows(duplicates: str, r: int) -> None:
    x, y = embeddings()
    objective = build("binary_nce", duplicates=duplicates, negatives_per_positive=r)
    result = objective(x, y, x_keys=KEYS[0], y_keys=KEYS[1])
    others = [(i, (i + step) % N) for i in range(N) for step in range(1, r + 1)]
    left_out = set(itertools.product(range(N), range(N))) - set(others)
    want = reference("binary_nce", objective, x, y, excluded=left_out)
    same_value_and_gradients(objective, result.loss, want, x, y)
    if r == N - 1:
        dense = build("binary_nce", duplicates=duplicates)(x, y, x_keys=KEYS[0], y_keys=KEYS[1])
        close(result.loss, dense.loss)


@pytest.mark.parametrize("options", [{}, {"negatives_per_positive": 1}], ids=str)
def test_metrics_are_those_of_the_step(options: dict[str, Any]) -> None:
    objective: Any = build_objective("binary_nce", **options)
    metrics = objective(*embeddings()).metrics
    objective.bias.data.add_(1.0)
    assert metrics["bias"] == 0.0


def test_noise_of_the_next_rows_is_refused_where_there_is_none() -> None:
    x, y = embeddings()
    for r, given in ((N, {}), (2, {"excluded": torch.tensor([[0, 1]])}), (2, {"negatives": torch.zeros(N, 1, WIDTH)})):
        with raises(ConfigError, f"negatives_per_positive={r}") as caught:
            build("binary_nce", negatives_per_positive=r)(x, y, **given)
        assert len(str(caught.value).splitlines()) == 1


REFUSED = {
    "noise_file": ("nce", {"noise": "file"}),
    "density=file": ("nce", {"density": "file"}),
    "k=2.5": ("nce", {"noise": "uniform", "k": 2.5}),
    "duplicates=mask": ("nce", {"noise": "unigram", "duplicates": "mask"}),
    "noise_file=q.npy": ("nce", {"noise_file": "q.npy"}),
    "objective.k=0.0": ("nce", {"k": 0.0}),
    "num_samples=0": ("nce", {"density": "uniform", "num_samples": 0}),
    "init_scale=0.0": ("siglip", {"init_scale": 0.0}),
    "init_scale=-1.0": ("siglip", {"init_scale": -1.0}),
    "temperature=0.002": ("siglip", {"init_scale": 500.0}),
    "negatives_per_positive=0": ("binary_nce", {"negatives_per_positive": 0}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refused_by_name(named: str) -> None:
    name, options = REFUSED[named]
    with raises(ConfigError, named):
        build_objective(name, **options)


@pytest.mark.parametrize("duplicates", ["mask", "positive"])
def test_keys_are_needed(duplicates: str) -> None:
    for name in ("siglip", "nce", "binary_nce"):
        with raises(ConfigError, f"duplicates={duplicates}"):
            build(name, duplicates=duplicates)(*embeddings())


@pytest.mark.parametrize(("name", "options"), ENTRIES, ids=str)
def test_finite_differences(name: str, options: dict[str, Any]) -> None:
    """Of t and b beside x and y; of log Z for nce."""
    x, y = (e.detach()[:4].requires_grad_() for e in embeddings())
    objective = build(name, duplicates="positive", **options)
    learnt = {key: p.detach().clone().requires_grad_() for key, p in objective.named_parameters()}

    def loss(x: Tensor, y: Tensor, *values: Tensor) -> Tensor:
        given = {"y_keys": KEYS[1][:4]}
        return torch.func.functional_call(objective, dict(zip(learnt, values, strict=True)), (x, y), given).loss

    inputs = [v.requires_grad_(p.requires_grad) for v, p in zip(learnt.values(), objective.parameters(), strict=True)]
    assert torch.autograd.gradcheck(loss, (x, y, *inputs), atol=1e-6)


# Known answers.


def on_scores(scores: Tensor, name: str, **options: Any) -> Tensor:
    objective = build(name, similarity="dot", temperature=1.0, **options)
    return objective(scores.double(), torch.eye(len(scores), dtype=torch.float64)).loss.detach()


def test_known_answers() -> None:
    zeros = torch.zeros(7, 7)
    close(on_scores(zeros, "local_nce", init_bias=0.0), 7 * math.log(2))
    close(on_scores(zeros, "siglip", init_bias=-2.5), math.log1p(math.exp(2.5)) + 6 * math.log1p(math.exp(-2.5)))
    close(on_scores(zeros, "binary_nce"), math.log(2))
    close(on_scores(zeros, "binary_nce", negatives_per_positive=2), math.log(2))
    k = 4.0  # u = k q where s = log k
    close(on_scores(torch.full((7, 7), math.log(k), dtype=torch.float64), "nce", k=k), (1 + k) * math.log(2))
    log_q = torch.linspace(-3, -1, 6).double()
    close(nce_from_log_u(log_q + math.log(k), log_q + math.log(k), log_q, log_q, k), (1 + k) * math.log(2))


def test_metrics() -> None:
    x, y = embeddings()
    objective = build("siglip", init_bias=-1.0)
    metrics = objective(x, y).metrics
    s = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    a = s / 0.3 - 1.0
    close(metrics["data_probability"], torch.sigmoid(a).diag().mean())
    close(metrics["positive_score"], s.diag().mean())
    close(metrics["negative_score"], (s.sum() - s.trace()) / (N * (N - 1)))
    close(metrics["bias"], -1.0)
    sampled = build("binary_nce", negatives_per_positive=1)(x, y).metrics
    shifted = torch.sigmoid(s / 0.3)
    close(sampled["noise_probability"], torch.stack([shifted[i, (i + 1) % N] for i in range(N)]).mean())
    assert not any(v.requires_grad or v.ndim for v in [*metrics.values(), *sampled.values()])


# Identities.


@pytest.mark.parametrize("duplicates", ["keep", "mask"])
def test_identity_7_one_decision_under_three_names(duplicates: str) -> None:
    x, y = embeddings()
    keys = {"y_keys": KEYS[1]}
    prior = math.log(N - 1)
    siglip = build("siglip", init_bias=-prior, duplicates=duplicates)(x, y, **keys).loss
    close(build("local_nce", duplicates=duplicates)(x, y, **keys).loss, siglip)
    if duplicates == "keep":
        close(build("nce")(x, y).loss, siglip)
        close(build("nce", k=1.0)(x, y).loss, 2 * build("binary_nce")(x, y).loss)


@pytest.mark.parametrize(("name", "options"), ENTRIES, ids=str)
def test_identity_14_order_of_pairs(name: str, options: dict[str, Any]) -> None:
    x, y = embeddings()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    objective = build(name, duplicates="positive", **options)
    first = objective(x, y, x_keys=KEYS[0], y_keys=KEYS[1])
    second = objective(x[order], y[order], x_keys=KEYS[0][order], y_keys=KEYS[1][order])
    close(second.loss, first.loss)
    for metric, value in first.metrics.items():
        close(second.metrics[metric], value)


# Extremes, dtypes, memory.


@pytest.mark.parametrize("name", ["siglip", "local_nce", "nce", "binary_nce"])
@pytest.mark.parametrize("tau", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("duplicates", ["keep", "positive"])
def test_extreme_temperatures_in_float32(name: str, tau: float, duplicates: str) -> None:
    x, y = (e.detach() for e in embeddings(64, 16))
    results = []
    objective = build_objective(name, temperature=tau, learnable=False, duplicates=duplicates)
    for dtype in (torch.float32, torch.float64):
        leaves = [e.to(dtype).requires_grad_() for e in (x, y)]
        loss = objective.to(dtype)(*leaves, y_keys=torch.arange(64) % 50).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == torch.float32 and got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < max(1e-5, 64 * torch.finfo(torch.float32).eps / tau)


@pytest.mark.parametrize("name", ["siglip", "local_nce", "nce", "binary_nce"])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand(name: str, sign: int) -> None:
    scores = sign * 1e4 * (2 * torch.eye(4) - 1)
    x = scores.clone().requires_grad_()
    loss = build_objective(name, similarity="dot", temperature=1.0, learnable=False)(x, torch.eye(4)).loss
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.isfinite().all()
    if sign == 1:
        assert float(loss.detach()) == 0.0 and gradient.eq(0).all()
    else:  # every pair is told wrongly, at 10⁴ a piece; the bias of siglip is 10 beside it
        assert float(loss.detach()) == pytest.approx({"binary_nce": 1e4}.get(name, 4e4), rel=1e-3)


def test_softplus_is_exact_in_float64() -> None:
    """Also where torch's own, by default, takes a for sp(a)."""
    scores = torch.full((2, 2), 20.5, dtype=torch.float64)
    close(on_scores(scores, "local_nce", init_bias=0.0), math.log1p(math.exp(-20.5)) * 2 + 20.5, 1e-14)


@pytest.mark.parametrize("name", ["siglip", "local_nce", "nce", "binary_nce"])
def test_one_pair_has_data_and_no_noise(name: str) -> None:
    x, y = embeddings(1)
    objective = build(name, init_bias=0.5)
    loss = objective(x, y).loss
    a = objective.logit_scale.exp() * F.cosine_similarity(x, y)[0] + 0.5
    close(loss, {"binary_nce": 0.5}.get(name, 1.0) * sp(-a))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, y)))


def test_what_is_sure_keeps_its_gradient_in_float32() -> None:
    """The positives' own terms are not the difference of two sums: e^−30 is not lost."""
    x = torch.full((3, 3), -80.0).fill_diagonal_(30.0).requires_grad_()
    objective = build_objective("siglip", similarity="dot", temperature=1.0, init_bias=0.0)
    loss = objective(x, torch.eye(3)).loss
    (gradient,) = torch.autograd.grad(loss, x)
    assert float(loss.detach()) == pytest.approx(math.exp(-30), rel=1e-5)
    assert gradient.diag().tolist() == pytest.approx([-math.exp(-30) / 3] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["siglip", "local_nce", "nce", "binary_nce"])
def test_bfloat16_embeddings_are_scored_in_float32(name: str) -> None:
    x, y = (e.detach().bfloat16().requires_grad_() for e in embeddings(64, 16))
    objective = build_objective(name)
    loss = objective(x, y).loss
    assert loss.dtype == torch.float32
    close(loss, objective(x.float(), y.float()).loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective(x, y).loss, loss)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(loss, (x, y)))


MEMORY: list[tuple[str, dict[str, Any], Callable[[int, int], int]]] = [
    *((name, {}, lambda n, width: n * width) for name in ("siglip", "local_nce", "nce", "binary_nce")),
    ("binary_nce", {"negatives_per_positive": 2}, lambda n, width: 2 * n * width),
]


@pytest.mark.parametrize(("name", "options", "limit"), MEMORY, ids=lambda v: str(v) if not callable(v) else "")
@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_nothing_quadratic_is_allocated(
    name: str,
    options: dict[str, Any],
    limit: Callable[[int, int], int],
    duplicates: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even when half of all pairs are duplicates."""
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "KEPT", 0)
    n, width = 192, 6
    x, y = (e.detach().float().requires_grad_() for e in embeddings(n, width))
    with LargestTensor() as seen:
        objective = build_objective(name, duplicates=duplicates, **options)
        objective(x, y, x_keys=torch.arange(n) % 2, y_keys=torch.arange(n)).loss.backward()
    assert seen.elements <= limit(n, width)


def test_the_bias_of_null_needs_no_first_batch() -> None:
    """What it starts at is the same whatever batch comes first, and state_dict carries it."""
    x, y = embeddings()
    objective = build("local_nce")
    assert float(objective.bias.detach()) == 0.0
    objective(x[:3], y[:3])
    restored = build("local_nce")
    restored.load_state_dict(objective.state_dict())
    close(restored(x, y).loss, objective(x, y).loss)


@in_ways
def test_on_several_ranks(ways: str) -> None:
    """tests/jobs/dist_families.py says what is checked."""
    launch("dist_families.py", 3, ways)

"""The relevance of positive pairs: objectives that take it against plain float64 loops, and weights of 1.

The estimators are in test_estimators.py, ranks in jobs/dist_losses.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import logistic, reference
from helpers.messages import check, raises
from helpers.robust import reference_coce
from jobs.dist_losses import needed_options
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.options.common import ExpectedBatch
from dyad.train.losses.options.registry import configure
from dyad.train.losses.sums import tiles

B, D = 9, 5
OWN = torch.tensor([1.0, 0.25, 0.7, 0.5, 0.01, 0.9, 0.3, 1.0, 0.6], dtype=torch.float64)
WEIGHTS = {(i, i): float(w) for i, w in enumerate(OWN)}
# positives out of order, one of them twice with two weights, of which the larger counts; rows 3 and 8 have none
LISTED = [(5, 2), (0, 8), (0, 0), (7, 9), (1, 1), (2, 4), (2, 2), (0, 8), (4, 4), (6, 1)]
GIVEN = torch.tensor([0.2, 0.9, 0.5, 1.0, 0.3, 0.8, 0.7, 0.4, 0.6, 0.05], dtype=torch.float64)
FURTHER_ROW = torch.tensor([0, 0, 3, 5])
POSITIVE, FURTHER_WEIGHT = torch.tensor([True, False, True, False]), torch.tensor([0.35, 7.0, 0.45, float("nan")])
OF_FURTHER = {(0, B): float(FURTHER_WEIGHT[0]), (3, B + 2): float(FURTHER_WEIGHT[2])}
EXCLUDED = torch.tensor([(0, 1), (2, 0), (6, 10)])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)


def further(width: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, width, generator=generator, dtype=torch.float64).requires_grad_()


def listed() -> dict[str, Any]:
    return {"positives": torch.tensor(LISTED), "relevance": GIVEN, "excluded": EXCLUDED}


def of_lists() -> dict[tuple[int, int], float]:
    pairs: dict[tuple[int, int], float] = {}
    for pair, weight in zip(LISTED, GIVEN.tolist(), strict=True):
        pairs[pair] = max(weight, pairs.get(pair, 0.0))
    return pairs | OF_FURTHER


def equal(loss: Tensor, want: Tensor, *leaves: Tensor) -> None:
    """Values and gradients, 1e-10."""
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad(want, leaves, retain_graph=True)
    for got, expected in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


SOFTMAX: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("clip", {"positives": "exclude", "duplicates": "keep"}),
    ("clip", {"tau_scaled": True, "partition": "mean", "rho": 0.3}),
    ("symmetric_dpm", {"candidates": "negatives"}),
    ("gcl", {"rho": 0.2}),
    ("info_nce", {}),
    ("info_nce", {"partition": "mean", "candidates": "negatives"}),
    ("one_sided_dpm", {}),
    ("dpr", {}),
]


@pytest.mark.parametrize(("name", "options"), SOFTMAX, ids=str)
def test_softmax_family(name: str, options: dict[str, Any]) -> None:
    """Own pairs (rows alone take sums of their own); own and further positives; lists with further positives."""
    (x, y), more = reference.embeddings(), further()
    objective = reference.build(name, **options)
    kind = {**vars(objective.options), "rho": objective.options.rho or 0.0}
    scale = objective.logit_scale
    leaves = [x, y, *([scale] if scale.requires_grad else [])]
    want = reference.reference_loss(x, y, scale, relevance=WEIGHTS, **kind)
    result = objective(x, y, relevance=OWN)
    equal(result.loss, want, *leaves)
    assert "mi_bound" not in result.metrics
    columns, leaves = Columns(more, FURTHER_ROW, None, POSITIVE, relevance_k=FURTHER_WEIGHT), [*leaves, more]
    for weights, given in (
        (WEIGHTS | OF_FURTHER, {"relevance": OWN}),
        (OF_FURTHER, {}),
        (of_lists(), listed()),
    ):
        own = weights if "positives" in given else WEIGHTS | OF_FURTHER
        how = {**kind, "further": more, "listed": own, "relevance": weights}
        how["excluded"] = [tuple(pair) for pair in EXCLUDED.tolist()] if "excluded" in given else []
        equal(objective(x, y, negatives=columns, **given).loss, reference.reference_loss(x, y, scale, **how), *leaves)


@pytest.mark.parametrize(
    ("name", "options"),
    [("siglip", {}), ("local_nce", {}), ("nce", {}), ("nce", {"k": 3.0}), ("binary_nce", {})],
    ids=str,
)
def test_logistic_family(name: str, options: dict[str, Any]) -> None:
    (x, y), more = logistic.embeddings(), further()
    objective = logistic.build(name, **options)
    want = logistic.reference(name, objective, x, y, relevance=WEIGHTS)
    logistic.same_value_and_gradients(objective, objective(x, y, relevance=OWN).loss, want, x, y)
    columns, weights = Columns(more, FURTHER_ROW, None, POSITIVE, relevance_k=FURTHER_WEIGHT), of_lists()
    data, excluded = {*weights}, {tuple(pair) for pair in EXCLUDED.tolist()}
    how: dict[str, Any] = {"data": data, "excluded": excluded, "relevance": weights}
    want = logistic.reference(name, objective, x, torch.cat([y, more]), **how)
    loss = objective(x, y, negatives=columns, **listed()).loss
    logistic.same_value_and_gradients(objective, loss, want, x, y, more)


def test_binary_nce_with_some_columns_as_noise() -> None:
    x, y = logistic.embeddings()
    objective = logistic.build("binary_nce", negatives_per_positive=2)
    a = objective.logit_scale.exp() * F.normalize(x, dim=1) @ F.normalize(y, dim=1).T + objective.bias
    data = logistic.mean([OWN[i] * logistic.sp(-a[i, i]) for i in range(B)])
    noise = logistic.mean([logistic.sp(a[i, (i + r) % B]) for i in range(B) for r in (1, 2)])
    logistic.same_value_and_gradients(objective, objective(x, y, relevance=OWN).loss, (data + noise) / 2, x, y)


@pytest.mark.parametrize("directions", ["x", "mean"])
@pytest.mark.parametrize("pair_loss", ["identity", "logistic"])
@pytest.mark.parametrize("divergence", ["kl", "chi2", "cvar"])
def test_robust_family(divergence: str, pair_loss: str, directions: str) -> None:
    """A radius is a part of each pair's term; ν is a mean of the rows, whatever their relevance."""
    x, y = reference.embeddings()
    kind: dict[str, Any] = {"divergence": divergence, "pair_loss": pair_loss}
    rho = 0.0 if divergence == "cvar" else 0.3
    chosen = {"temperature": 0.25, "margin": 0.4, "alpha": 0.3, "directions": directions, "rho": rho or None}
    objective: Any = build_objective("coce", setting="semi", **chosen, **kind).double()
    tau = torch.exp(-objective.logit_scale.detach())

    def want(weights: dict[tuple[int, int], float]) -> Tensor:
        everyone, turned = [[*range(B)]] * B, {(j, i): w for (i, j), w in weights.items()}
        sides = []
        for a, b, of_pairs in ((x, y, weights), (y, x, turned)):
            own = [[j for j in range(B) if (i, j) in of_pairs] for i in range(B)]
            sides.append(reference_coce(a, b, tau, everyone, own, relevance=of_pairs, rho=rho, **kind))
        return sides[0] if directions == "x" else (sides[0] + sides[1]) / 2

    result = objective(x, y, relevance=OWN)
    equal(result.loss, want(WEIGHTS), x, y)
    torch.testing.assert_close(result.metrics["nu"], objective(x, y).metrics["nu"])
    several = {pair: weight for pair, weight in of_lists().items() if max(pair) < B}
    pairs, weights = torch.tensor([*several]), torch.tensor([*several.values()], dtype=torch.float64)
    equal(objective(x, y, positives=pairs, relevance=weights).loss, want(several), x, y)


@pytest.mark.parametrize("nu", ["sgd", "state"])
def test_a_learned_nu(nu: str) -> None:
    """Its step does not depend on the relevance if it is one of the sample."""
    x, y = reference.embeddings()
    found = []
    for weights in (None, OWN):
        objective: Any = build_objective("coce", nu=nu, divergence="chi2", temperature=0.25, num_samples=B).double()
        losses = [objective(x, y, torch.arange(B), relevance=weights).loss for _ in range(2)]
        own = objective.sample_state.gathered(torch.device("cpu"))["nu_x"] if nu == "state" else objective.nu.detach()
        found.append((own, losses[-1]))
    torch.testing.assert_close(found[0][0], found[1][0])
    tau, s = 0.25, F.normalize(x, dim=1) @ F.normalize(y, dim=1).T
    if nu == "sgd":  # the largest of the rows' minimisers, in both calls
        values = []
        for i in range(B):
            d = torch.stack([s[i, j] - s[i, i] for j in range(B) if j != i])
            u = ((d - found[0][0]) / tau).clamp(min=-1)
            values.append(OWN[i] * (tau * (u + u**2 / 2).mean() + found[0][0]))
        torch.testing.assert_close(found[1][1].squeeze(), torch.stack(values).mean().squeeze(), rtol=1e-6, atol=1e-7)


def test_spectral_family_and_simclr() -> None:
    x, y = reference.embeddings()
    attraction, total = logistic.mean([OWN[i] * (x[i] @ y[i]) for i in range(B)]), range(B)
    off = sum((x[i] @ y[j]) ** 2 for i in total for j in total if i != j) / (B * (B - 1))
    equal(build_objective("spectral")(x, y, relevance=OWN).loss, off - 2 * attraction, x, y)
    moments = [(e.T @ e / B).detach() for e in (x, y)]
    alternating = sum(
        (p[i] @ m @ p[i] - 2 * OWN[i] * p[i] @ n[i].detach()) / B
        for p, n, m in ((x, y, moments[1]), (y, x, moments[0]))
        for i in total
    )
    equal(build_objective("spectral_alternating")(x, y, relevance=OWN).loss, torch.as_tensor(alternating), x, y)
    distance = (((x.T @ x + y.T @ y) / (2 * B) - torch.eye(D, dtype=torch.float64)) ** 2).sum()
    equal(build_objective("pca_penalty", penalty=0.7)(x, y, relevance=OWN).loss, 0.7 * distance - attraction, x, y)
    plain = build_objective("vicreg", invariance=0.0)(x, y).loss
    invariance = sum(OWN[i] * ((x[i] - y[i]) ** 2).sum() for i in total) / (B * D)
    equal(build_objective("vicreg")(x, y, relevance=OWN).loss, plain + 25.0 * invariance, x, y)
    objective = reference.build("simclr", temperature=0.25)
    z, scale = torch.cat([F.normalize(e, dim=1) for e in (x, y)]), objective.logit_scale.exp()
    terms = []
    for i in range(2 * B):
        partner, others = (i + B) % (2 * B), [j for j in range(2 * B) if j != i]
        logits = scale * torch.stack([z[i] @ z[j] for j in others])
        terms.append(OWN[i % B] * (logits.logsumexp(0) - scale * z[i] @ z[partner]))
    equal(objective(x, y, relevance=OWN).loss, torch.stack(terms).mean(), x, y, objective.logit_scale)
    equal(objective(torch.cat([x, y]), None, relevance=OWN).loss, torch.stack(terms).mean(), x, y)


TAKERS = [name for name, options in OBJECTIVES.items() if "relevance" in options.takes]


@pytest.mark.parametrize("name", TAKERS)
def test_weights_of_1_change_no_bit_and_the_gradient_is_that_of_the_loss(name: str) -> None:
    """The gradient by central differences, in w too: the loss is linear in it. Estimators: the bits alone."""
    x, y = reference.embeddings(32, 8)
    ids, ones = torch.arange(32), torch.ones(32)
    given = {"x_keys": ids, "y_keys": ids, "sample_ids_b": ids}
    options = {**needed_options(name), **({"num_samples": 32} if "num_samples" in needed_options(name) else {})}
    pairs = torch.stack([ids, ids], 1)
    lists = [None, pairs] if "positives" in OBJECTIVES[name].takes else [None]
    for positives in lists:
        outs = []
        for weights in (None, ones):
            objective = build_objective(name, **options)
            leaves = [e.detach().float().requires_grad_() for e in (x, y)]
            result = objective(*leaves, **given, relevance=weights, positives=positives)
            learning = [p for p in objective.parameters() if p.requires_grad]
            outs.append([result.loss.detach(), *torch.autograd.grad(result.loss, [*leaves, *learning])])
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    if OBJECTIVES[name].formula.startswith("estimators") or name == "spectral_alternating":
        return
    objective, step = build_objective(name, **options).double(), 1e-5
    weights, move = torch.linspace(0.1, 1.0, 32, dtype=torch.float64), reference.embeddings(32, 8, seed=5)[0].detach()

    def loss(shift: float) -> Tensor:
        return objective(x + shift * move, y, **given, relevance=weights).loss

    (gradient,) = torch.autograd.grad(loss(0.0), x)
    slope = (loss(step) - loss(-step)) / (2 * step)
    torch.testing.assert_close((gradient * move).sum(), slope.detach(), rtol=1e-6, atol=1e-8)
    half, mixed = loss(0.0), objective(x, y, **given, relevance=(weights + 1) / 2).loss
    torch.testing.assert_close(mixed, (half + objective(x, y, **given).loss) / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("clip", {"positives": "merge"}, ("objective.positives=merge", "each", "exclude")),
        ("dpr", {"duplicates": "positive"}, ("objective.duplicates=positive", "mask")),
        ("siglip", {"duplicates": "positive"}, ("objective.duplicates=positive", "mask")),
        ("coce", {"duplicates": "positive"}, ("objective.duplicates=positive", "mask")),
    ],
    ids=str,
)
def test_options_without_a_term_for_each_pair_are_refused(
    name: str, options: dict[str, Any], named: tuple[str, ...]
) -> None:
    """Of a run by the same words, before it begins."""
    (x, y), objective = reference.embeddings(), build_objective(name, **options)
    keys = {"x_keys": torch.arange(B), "y_keys": torch.arange(B)}
    with raises(ConfigError, *named) as caught:
        objective(x, y, **keys, relevance=OWN)
    expected = ExpectedBatch(B, relevance=True)
    assert [*objective.options.broken_by(expected)] == [str(caught.value)]
    assert not [*objective.options.broken_by(replace(expected, relevance=False))]


def test_an_objective_without_a_term_for_each_pair_is_refused_before_the_run() -> None:
    (told,) = configure("partial_auc").broken_by(ExpectedBatch(B, inputs="scores", relevance=True))
    check(told, "objective=partial_auc", "data.relevance")
    assert not [*configure("nce").broken_by(ExpectedBatch(B, relevance=True))]
    (told,) = configure("nce", noise="unigram").broken_by(ExpectedBatch(B, relevance=True))
    check(told, "objective.noise=unigram", "data.relevance")


@pytest.mark.parametrize("name", ["clip", "dpr", "siglip", "coce", "sogclr"])
def test_nothing_quadratic_is_allocated(name: str) -> None:
    x, y = (e.detach().float().requires_grad_() for e in reference.embeddings(128, 8))
    objective = build_objective(name, **({"num_samples": 128, "gamma": 0.8} if name == "sogclr" else {}))
    with reference.LargestTensor() as seen:
        objective(x, y, torch.arange(128), relevance=torch.rand(128).clamp(min=0.1)).loss.backward()
    assert seen.elements < 128 * 128 / 4


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5, float("nan")])
def test_a_weight_out_of_range_is_refused(wrong: float) -> None:
    x, y = reference.embeddings()
    with raises(ValueError, "relevance", f"{wrong:g}"):
        build_objective("clip")(x, y, relevance=torch.full((B,), wrong))
    columns = Columns(further(), FURTHER_ROW, None, POSITIVE, relevance_k=torch.full((4,), wrong))
    with raises(ValueError, "negatives.relevance_k", f"{wrong:g}"):
        build_objective("clip")(x, y, negatives=columns)


@pytest.mark.parametrize("shape", [(3,), (1,), (), (4, 1)])
def test_the_relevance_of_further_columns_is_one_for_each(shape: tuple[int, ...]) -> None:
    columns = Columns(further(), FURTHER_ROW, None, POSITIVE, relevance_k=torch.full(shape, 0.5))
    with raises(ValueError, "negatives.relevance_k", "(4,)", str(shape)):
        build_objective("clip")(*reference.embeddings(), negatives=columns)


def test_one_weight_for_each_pair() -> None:
    x, y = reference.embeddings()
    for given, count in (({}, B), ({"positives": torch.tensor(LISTED)}, len(LISTED))):
        with raises(ValueError, "relevance", f"({count},)", "(4,)"):
            build_objective("clip")(x, y, relevance=torch.ones(4), **given)
    for name in ("partial_auc", "cpc"):
        with raises(ValueError, name, "relevance"):
            build_objective(name, **needed_options(name))(x[:, :1], y[:, :1], relevance=OWN)

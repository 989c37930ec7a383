"""The robust family against plain loops over sorted losses (tests/helpers/robust.py), known answers and identities."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.dist import in_ways, launch
from helpers.messages import raises
from helpers.reference import LargestTensor
from helpers.robust import reference_coce
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.objectives import oce
from dyad.train.losses.sums import tiles

DIVERGENCES = ["kl", "chi2", "cvar"]
PAIR_LOSSES = ["identity", "hinge", "squared_hinge", "logistic"]
KINDS = [
    pytest.param(*kind, similarity, marks=pytest.mark.soak if (i + k) % 2 else ())
    for i, kind in enumerate(itertools.product(DIVERGENCES, PAIR_LOSSES, ["self", "supervised", "semi"]))
    for k, similarity in enumerate(("cosine", "dot"))
]
TEMPERATURE, WIDTH = 0.35, 5
TAU = torch.tensor(-math.log(TEMPERATURE)).double().neg().exp().item()  # kept as a logarithm in float32


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)


def embeddings(b: int = 9, width: int = WIDTH, seed: int = 0, m: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (b, m or b))
    return x.requires_grad_(), y.requires_grad_()


def build(name: str = "coce", **options: Any) -> Any:
    return build_objective(name, **{"temperature": TEMPERATURE, "margin": 0.4, "alpha": 0.3, **options}).double()


def close(got: Tensor, want: Tensor | float | list[float], tolerance: float = 1e-9) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), want.detach(), rtol=tolerance, atol=tolerance)


def cvar_of(values: list[float], alpha: float, **options: Any) -> tuple[Tensor, Tensor]:
    """CVaR of a list, and its gradient: the weights of the worst case."""
    x, y = torch.zeros(1, 1, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()
    loss = build("partial_auc", **{"alpha": alpha, **options})(x, y).loss
    return loss.detach(), torch.autograd.grad(loss, y)[0][:, 0]


# Against plain loops.


@pytest.mark.parametrize(("divergence", "pair_loss", "setting", "similarity"), KINDS)
def test_value_and_all_gradients(divergence: str, pair_loss: str, setting: str, similarity: str) -> None:
    (x, y), b = embeddings(6), 6
    chosen = [[j for j in range(b) if setting == "semi" or j != i] for i in range(b)]
    learning = {"learnable": True, "rho": 0.2} if divergence != "cvar" else {}
    kind: dict[str, Any] = dict(divergence=divergence, pair_loss=pair_loss, similarity=similarity)
    scale = torch.tensor(1 / TAU, dtype=torch.float64).log().requires_grad_()
    tau = torch.exp(-scale)
    want = reference_coce(x, y, tau, chosen, [[i] for i in range(b)], **kind)
    want = want + learning.get("rho", 0.0) * tau
    wanted = torch.autograd.grad(want, [x, y, *([scale] if learning else [])])
    objective = build(setting=setting, **kind, **learning)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        leaves = [e.detach().to(dtype).requires_grad_() for e in (x, y)]
        loss = objective.to(dtype)(*leaves).loss
        close(loss, want, tolerance)
        got = torch.autograd.grad(loss, [*leaves, *([objective.logit_scale] if learning else [])])
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == dtype
            assert float((g - w).norm() / w.norm()) < 5 * tolerance


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_directions(divergence: str) -> None:
    x, y = embeddings()
    kind: dict[str, Any] = dict(divergence=divergence, pair_loss="hinge")
    rows, columns = build(**kind)(x, y).loss, build(**kind)(y, x).loss
    close(build(**kind, directions="y")(x, y).loss, columns)
    close(build(**kind, directions="sum")(x, y).loss, rows + columns)
    both = build(**kind, directions="mean")(x, y)
    close(both.loss, (rows + columns) / 2)
    for got, want in zip(
        torch.autograd.grad(both.loss, (x, y)), torch.autograd.grad((rows + columns) / 2, (x, y)), strict=True
    ):
        close(got, want)
    close(build(**kind, directions="sum")(x, y).metrics["nu"], both.metrics["nu"])
    if divergence != "cvar":
        close(build(**kind, rho=0.7, directions="sum")(x, y).loss, rows + columns + 2 * 0.7 * TAU)


@pytest.mark.parametrize("setting", ["supervised", "semi"])
@pytest.mark.parametrize(("divergence", "pair_loss"), [*itertools.product(DIVERGENCES, ["identity", "logistic"])])
def test_listed_pairs_and_further_columns(divergence: str, pair_loss: str, setting: str) -> None:
    """Several positives, none, excluded pairs, and columns and rows of no pair, in both directions."""
    leaves = x, y, further, wrong = *embeddings(7, m=9), *embeddings(3, m=2, seed=3)
    positives = [(0, 1), (0, 8), (0, 4), (1, 0), (2, 2), (2, 4), (3, 3), (5, 7), (5, 5), (6, 1)]  # row 4 has none
    excluded = [(0, 2), (2, 0), (1, 9), (6, 11), (4, 4), *((3, j) for j in range(12) if j != 3)]
    left_out = set(excluded) | (set(positives) if setting == "supervised" else set())
    sides = []
    for a, rows, columns in ((0, 7, 12), (1, 9, 9)):
        pairs = {(p[a], p[1 - a]) for p in positives}
        gone = {(p[a], p[1 - a]) for p in left_out}
        chosen = [[j for j in range(columns) if (i, j) not in gone] for i in range(rows)]
        own = [sorted(p for i2, p in pairs if i2 == i) for i in range(rows)]
        anchors, others = (x, torch.cat([y, further])) if a == 0 else (y, torch.cat([x, wrong]))
        tau = torch.tensor(TAU, dtype=torch.float64)
        sides.append(reference_coce(anchors, others, tau, chosen, own, divergence=divergence, pair_loss=pair_loss))
    wanted = torch.autograd.grad(sides[0] + sides[1], leaves)
    objective = build(divergence=divergence, pair_loss=pair_loss, setting=setting, directions="sum")
    columns = Columns(further, torch.tensor([0, 2, 2]))
    given = None, columns, torch.tensor(positives), torch.tensor(excluded)
    loss = objective(x, y, *given, x_negatives=XNegatives(wrong, torch.tensor([1, 6]))).loss
    close(loss, sides[0] + sides[1])
    for got, want in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        close(got, want)


@pytest.mark.parametrize("duplicates", ["mask", "positive"])
@pytest.mark.parametrize("pair_loss", ["identity", "squared_hinge"])
@pytest.mark.parametrize("setting", ["self", "semi"])
def test_duplicates(duplicates: str, pair_loss: str, setting: str) -> None:
    x, y = embeddings(8)
    x_keys, y_keys = torch.tensor([1, 2, 3, 4, 4, 5, 6, 7]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5])
    same = [[j for j in range(8) if x_keys[i] == x_keys[j] or y_keys[i] == y_keys[j]] for i in range(8)]
    own = same if duplicates == "positive" else [[i] for i in range(8)]
    gone = {
        ("mask", "self"): same,
        ("positive", "self"): same,
        ("mask", "semi"): [[j for j in same[i] if j != i] for i in range(8)],
        ("positive", "semi"): [[] for _ in range(8)],
    }[duplicates, setting]
    chosen = [[j for j in range(8) if j not in gone[i]] for i in range(8)]
    tau = torch.tensor(TAU, dtype=torch.float64)
    kind: dict[str, Any] = dict(divergence="chi2", pair_loss=pair_loss)
    want = reference_coce(x, y, tau, chosen, own, **kind) + reference_coce(y, x, tau, chosen, own, **kind)
    objective = build(**kind, setting=setting, duplicates=duplicates, directions="sum")
    result = objective(x, y, x_keys=x_keys, y_keys=y_keys)
    close(result.loss, want)
    for got, wanted in zip(torch.autograd.grad(result.loss, (x, y)), torch.autograd.grad(want, (x, y)), strict=True):
        close(got, wanted)
    assert {"positive_score", "negative_score"} <= result.metrics.keys()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_finite_differences(divergence: str) -> None:
    options = {} if divergence == "cvar" else {"learnable": True, "rho": 0.1}
    objective = build(divergence=divergence, pair_loss="logistic", directions="mean", **options)

    def loss(x: Tensor, y: Tensor, logit_scale: Tensor) -> Tensor:
        return torch.func.functional_call(objective, {"logit_scale": logit_scale}, (x, y)).loss

    scale = objective.logit_scale.detach().clone().requires_grad_(bool(options))
    assert torch.autograd.gradcheck(loss, (*embeddings(6, 3), scale), atol=1e-6)


def test_anchors_without_candidates_are_skipped() -> None:
    x, y = embeddings(5)
    excluded = torch.tensor([(2, j) for j in range(5)])
    for divergence in DIVERGENCES:
        result = build(divergence=divergence)(x, y, excluded=excluded)
        chosen = [[j for j in range(5) if j != i and i != 2] for i in range(5)]
        own = [[i] for i in range(5)]
        tau = torch.tensor(TAU, dtype=torch.float64)
        close(result.loss, reference_coce(x, y, tau, chosen, own, divergence=divergence, pair_loss="identity"))
        assert all(value.isfinite() for value in result.metrics.values())
        everything = torch.cartesian_prod(torch.arange(5), torch.arange(5))
        nothing = build(divergence=divergence)(x, y, excluded=everything).loss
        close(nothing, 0.0)
        assert all(not g.any() for g in torch.autograd.grad(nothing, (x, y)))


# Known answers.


def test_cvar_of_lists() -> None:
    values = [3.0, -1.0, 7.0, 0.5, 2.0, -4.0, 6.0, 1.0, 0.0, 5.0]
    ordered = sorted(values, reverse=True)
    for r in range(1, 11):
        value, weights = cvar_of(values, r / 10)
        close(value, sum(ordered[:r]) / r)
        close(weights, [1 / r if v in ordered[:r] else 0.0 for v in values])
    close(cvar_of(values, 0.02)[0], 7.0)
    value, weights = cvar_of(values, 0.25)  # 2.5 of 10: the third counts by half
    close(value, (7 + 6 + 0.5 * 5) / 2.5)
    close(weights[[2, 6, 9]], [0.4, 0.4, 0.2])


def test_cvar_of_ties() -> None:
    value, weights = cvar_of([2.0, 1.0, 1.0, 1.0, 0.0], 0.6)  # of three that tie two are left, in equal parts
    close(value, (2 + 1 + 1) / 3)
    close(weights, [1 / 3, 2 / 9, 2 / 9, 2 / 9, 0.0])
    close(cvar_of([0.0, -0.0, 0.0], 0.5)[1], [1 / 3] * 3)


@pytest.mark.parametrize("pair_loss", PAIR_LOSSES)
def test_one_candidate_is_its_loss(pair_loss: str) -> None:
    d = torch.tensor(0.7, dtype=torch.float64)
    want = {"identity": d, "hinge": 0.4 + d, "squared_hinge": (0.4 + d) ** 2, "logistic": d.exp().log1p()}[pair_loss]
    for divergence, tau in itertools.product(DIVERGENCES, (1e-3, 1.0, 1e3)):
        close(cvar_of([0.7], 0.3, divergence=divergence, pair_loss=pair_loss, temperature=tau)[0], want)


def test_chi_square_is_mean_and_variance_while_all_weights_are_positive() -> None:
    values = [0.1, 0.5, -0.2, 0.3]
    v = torch.tensor(values, dtype=torch.float64)
    value, weights = cvar_of(values, 0.3, divergence="chi2", temperature=2.0)
    close(value, v.mean() + v.var(correction=0) / 4)
    close(weights, (1 + (v - v.mean()) / 2) / 4)


# Identities.


def test_identity_2_one_side_of_gcl() -> None:
    x, y = embeddings()
    same = {"temperature": TEMPERATURE, "learnable": True, "rho": 0.3, "directions": "x"}
    gcl, coce = (build_objective(name, **same).double() for name in ("gcl", "coce"))
    a, b = gcl(x, y).loss, coce(x, y).loss
    close(b, a)
    of_gcl = torch.autograd.grad(a, [x, y, *gcl.parameters()])
    for got, want in zip(torch.autograd.grad(b, [x, y, *coce.parameters()]), of_gcl, strict=True):
        close(got, want)


@pytest.mark.parametrize("name", ["cross_entropy", "listwise_ce"])
def test_identity_4_cross_entropy_and_lists(name: str) -> None:
    """CE − log K: the log-mean of a list that has the positives too; several of them: the mean over each."""
    x, y = embeddings(6, m=9)
    labels = [(i, (2 * i) % 9) for i in range(6)] + ([(0, 3), (4, 1), (4, 2)] if name == "listwise_ce" else [])
    want = build_objective(name)(x, y, positives=torch.tensor(labels)).loss
    same = {"setting": "semi", "similarity": "dot", "temperature": 1.0}
    got = build(**same)(x, y, positives=torch.tensor(labels)).loss
    close(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, y)), torch.autograd.grad(want, (x, y)), strict=True):
        close(a, b)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("pair_loss", PAIR_LOSSES)
def test_identity_4_partial_auc_is_coce_on_the_tiled_matrix(divergence: str, pair_loss: str) -> None:
    h, g = embeddings(6, 1, m=11)
    options = {"divergence": divergence, "pair_loss": pair_loss}
    result = build("partial_auc", **options)(h, g)
    columns = torch.cat([h, g])
    own = torch.tensor([(i, i) for i in range(6)])
    others = torch.tensor([(i, j) for i in range(6) for j in range(6) if i != j])
    tiled = build(similarity="dot", setting="supervised", **options)
    want = tiled(torch.ones(6, 1).double(), columns, positives=own, excluded=others).loss
    close(result.loss, want)
    for a, b in zip(torch.autograd.grad(result.loss, (h, g)), torch.autograd.grad(want, (h, g)), strict=True):
        close(a, b)


def test_identity_4_partial_auc_as_means() -> None:
    h, g = embeddings(6, 1, m=20)
    loss = build("partial_auc", alpha=0.25)(h, g).loss
    close(loss, g[:, 0].sort(descending=True).values[:5].mean() - h.mean())


class Multiplications(TorchDispatchMode):
    count = 0  # of scores of embeddings (b, WIDTH)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.out, torch.ops.aten.mm.default) and args[0].shape[1] == WIDTH:
            self.count += result.numel()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("divergence", "solver"), [("kl", (0, 0)), ("chi2", (3, 6)), ("cvar", (3, 6))])
def test_passes_over_the_scores_are_few(divergence: str, solver: tuple[int, int], dtype: torch.dtype) -> None:
    """One if all scores fit into what is kept."""
    x, y = (e.to(dtype) for e in embeddings(16))
    for kept, passes in ((0, solver[dtype == torch.float64] + 1), (16 * 16 * dtype.itemsize, 1)):
        tiles.KEPT = kept
        with Multiplications() as seen:
            build(divergence=divergence).to(dtype)(x, y).loss.backward()
        assert seen.count == passes * 16 * 16


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", ["coce", "partial_auc"])
def test_nothing_quadratic_is_allocated(name: str, divergence: str) -> None:
    b, small = 1024, [torch.randn(1024, 8 if name == "coce" else 1).requires_grad_() for _ in range(2)]
    tiles.TILE, tiles.KEPT = 64, 0
    with LargestTensor() as largest:
        build_objective(name, divergence=divergence, pair_loss="hinge")(*small).loss.backward()
    assert largest.elements <= 64 * 2100 < b * b / 4


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("pair_loss", PAIR_LOSSES)
@pytest.mark.parametrize(("tau", "size"), [(1e-4, 1.0), (1e4, 1.0), (1.0, 1e4), (1e-2, 1e4)])
def test_extremes_in_float32(divergence: str, pair_loss: str, tau: float, size: float) -> None:
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0))[:, None] * size
    got, options = [], {"temperature": tau, "divergence": divergence, "pair_loss": pair_loss, "alpha": 0.3}
    objective = build_objective("partial_auc", **options)
    for dtype in (torch.float32, torch.float64):
        x, y = (e.to(dtype).requires_grad_() for e in (scores[:3], scores[3:]))
        loss = objective.to(dtype)(x, y).loss
        got.append([loss.detach(), *torch.autograd.grad(loss, (x, y))])
    for single, double in zip(*got, strict=True):
        assert single.isfinite().all()
        assert float((single - double).norm()) <= 1e-4 * float(double.norm()) + 1e-30


def test_the_limits_of_the_temperature() -> None:
    values = [0.3, -0.5, 0.9, 0.9, 0.1]
    for divergence in ("kl", "chi2"):
        close(cvar_of(values, 0.3, divergence=divergence, temperature=1e-7)[0], 0.9, 1e-5)
        close(cvar_of(values, 0.3, divergence=divergence, temperature=1e-7)[1], [0, 0, 0.5, 0.5, 0])
        close(cvar_of(values, 0.3, divergence=divergence, temperature=1e7)[0], sum(values) / 5, 1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_that_are_there_twice(divergence: str) -> None:
    x, y = (torch.cat([e, e]).detach() for e in embeddings(4))
    chosen, own = [[j for j in range(8) if j != i] for i in range(8)], [[i] for i in range(8)]
    tau = torch.tensor(TAU, dtype=torch.float64)
    want = reference_coce(x, y, tau, chosen, own, divergence=divergence, pair_loss="identity")
    close(build(divergence=divergence)(x, y).loss, want)


# What is refused.


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("coce", {"alpha": 0.0}, "alpha"),
        ("coce", {"divergence": "cvar", "learnable": True, "rho": 0.1}, "learnable=true"),
        ("coce", {"learnable": True}, "rho"),
        ("coce", {"divergence": "cvar", "rho": 0.1}, "rho"),
        ("coce", {"nu": "state", "num_samples": 5, "nu_lr": 0.0}, "nu_lr"),
        ("coce", {"nu": "state"}, "num_samples"),
        ("partial_auc", {"similarity": "cosine"}, "similarity"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], named: str) -> None:
    with raises(ConfigError, named):
        build_objective(name, **options)


def test_inputs_that_are_refused() -> None:
    x, y = embeddings(1)
    with raises(ConfigError, "objective=coce"):
        build()(x, y)
    with raises(ValueError):
        build("partial_auc")(x, y)
    close(build("partial_auc")(x[:, :1], y[:0, :1]).loss, 0.0)
    close(build("partial_auc")(x[:0, :1], y[:, :1]).loss, 0.0)


@in_ways
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks(world_size: int, ways: str) -> None:
    launch("dist_robust.py", world_size, ways)


@pytest.mark.parametrize("off", [-0.5, 0.5])
def test_nu_of_a_sample_that_is_far_off_comes_back(off: float) -> None:
    """Below its minimum the slope of KL is exponential: a step of that size would leave the sample without gradient."""
    x, y = (torch.randn(6, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    tau, ids = 0.05, torch.arange(6)
    objective = build_objective("coce", nu="state", num_samples=6, temperature=tau, nu_lr=0.5)
    objective(x, y, ids)
    state = objective.sample_state
    assert state is not None
    solved = state.gathered(torch.device("cpu"))
    state.load({**solved, "nu_x": solved["nu_x"] + off})
    for _ in range(60):
        before = state.gathered(torch.device("cpu"))["nu_x"]
        objective(x, y, ids)
        after = state.gathered(torch.device("cpu"))["nu_x"]
        assert (after - before).abs().max() <= tau * (1 + 1e-5)
    torch.testing.assert_close(state.gathered(torch.device("cpu"))["nu_x"], solved["nu_x"], rtol=0, atol=1e-3)


def test_larger_tiles_find_the_same_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a GPU, of several blocks: the search and the sum must see the same bits of a score."""
    objective, (x, y) = build(divergence="cvar").float(), embeddings()
    want = objective(x.float(), y.float()).loss
    for module in (tiles, oce):
        monkeypatch.setattr(module, "tile_size", lambda device: 8)
    close(objective(x.float(), y.float()).loss, want.double(), 1e-6)

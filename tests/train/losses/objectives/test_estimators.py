"""Global estimators: values, gradients and state against plain loops; where they are exact; what they promise."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.dist import in_ways, launch
from helpers.estimators import Reference
from helpers.messages import raises
from helpers.reference import LargestTensor
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.sums import tiles

N, B, D = 9, 6, 5
RHO = 0.4
OPTIONS: dict[str, dict[str, Any]] = {
    "sogclr": {},
    "fastclip_v0": {},
    "fastclip_v3": {"rho": RHO},
    "isogclr": dict(rho=RHO, tau_lr=0.02, tau_momentum=0.3, tau_clip=0.9, min_temperature=0.05, max_temperature=0.2),
    "nuclr": dict(zeta_lr=0.2, zeta_momentum=0.6, zeta_warmup=1),
}
NAMES = list(OPTIONS)
# A sample that is there twice; an item that two samples are; all samples the same item
STEPS = [[0, 1, 2, 3, 4, 5], [3, 8, 6, 1, 3, 7], [2, 4, 8, 0, 5, 7], [1, 0, 6, 3, 2, 8]]
KEYS = [[1, 2, 3, 4, 5, 6], [4, 3, 3, 2, 4, 9], [1, 1, 1, 1, 1, 1], [7, 7, 7, 2, 2, 3]]

TURNS: list[Any] = [("sum", "keep"), ("mean", "mask"), ("x", "mask"), ("y", "keep")]
TURNS += [pytest.param(d, "keep" if m == "mask" else "mask", marks=pytest.mark.soak) for d, m in TURNS]


def embeddings(seed: int, rows: int = B, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype).requires_grad_(), (x.detach() + y).to(dtype).requires_grad_()


def build(name: str, **options: Any) -> Objective:
    return precise(build_objective(name, **{"num_samples": N, "gamma": 0.8, **OPTIONS[name], **options}))


def precise(objective: Objective) -> Objective:
    """In float64, τ too."""
    for parameter in objective.double().parameters():
        parameter.data.fill_(-math.log(objective.options.temperature))  # logit_scale is all there is
    return objective


def refer(objective: Objective, **options: Any) -> Reference:
    """With γ = 0.7."""
    name = objective.options.name
    return Reference(name, N, gamma=0.7, options=OPTIONS[name], **options)


def call(objective: Objective, x: Tensor, y: Tensor, ids: list[int], **keys: Tensor) -> dict[str, Tensor]:
    result = objective(x, y, torch.tensor(ids), **keys)
    learning = [p for p in objective.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(result.loss, [x, y, *learning])
    found = dict(zip(["x", "y", "logit_scale"], [*gradients, torch.zeros(()).double()], strict=False))
    return {"loss": result.loss.detach(), **found, **result.metrics}


def state(objective: Objective) -> dict[str, Tensor]:
    assert objective.sample_state is not None
    return objective.sample_state.gathered(torch.device("cpu"))


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def close_states(objective: Objective, reference: Reference) -> None:
    found = state(objective)
    assert found["samples_seen"] == reference.seen
    for name, values in found.items():
        if name not in ("samples_seen", "never_visited"):
            number, side = name.rsplit("_", 1)
            number = number.removeprefix("log_")
            want = [reference.get(number, side, i) for i in range(N)]
            want = torch.tensor([math.nan if v is None else v for v in want], dtype=torch.float64)
            got = values.exp() if number == "u" else values
            torch.testing.assert_close(
                got, want, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("directions", "duplicates"), TURNS)
@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_equals_plain_loops(
    name: str, directions: str, duplicates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    objective = build(name, gamma=0.7, directions=directions, duplicates=duplicates)
    reference = refer(objective, directions=directions)
    for step, (ids, keys) in enumerate(zip(STEPS, KEYS, strict=True)):
        x, y = embeddings(step)
        want = reference(x, y, ids, keys if duplicates == "mask" else None)
        close(call(objective, x, y, ids, x_keys=torch.tensor(keys)), want)
        close_states(objective, reference)


@in_ways
@pytest.mark.parametrize("name", NAMES)
def test_further_items_are_candidates_of_the_other_side(name: str, ways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of every x, rows of every y. They are no anchors and have no state."""
    monkeypatch.setattr(tiles, "TILE", 4)
    every = itertools.product(("sum", "x", "y"), (1, 5))
    for directions, count in every if ways == "all" else (("sum", 5), ("x", 1), ("y", 5)):
        objective = build(name, gamma=0.7, directions=directions, duplicates="mask")
        reference = refer(objective, directions=directions)
        for step, (ids, keys) in enumerate(zip(STEPS[:3], KEYS[:3], strict=True)):
            x, y = embeddings(step)
            further = embeddings(step + 9, rows=count)[0]
            wrong = None if directions == "x" else embeddings(step + 19, rows=2 * count)[0]
            want = reference(x, y, ids, keys, further=further, wrong=wrong)
            del want["logit_scale"]
            columns = Columns(further, torch.arange(count) % B, torch.arange(count) + 100)
            keyed = {"x_keys": torch.tensor(keys), "y_keys": torch.tensor(keys), "negatives": columns}
            leaves = {"x": x, "y": y, "further": further}
            if wrong is not None:
                keyed["x_negatives"] = XNegatives(wrong, columns.row_k.repeat(2), torch.arange(2 * count) + 200)
                leaves["wrong"] = wrong
            result = objective(x, y, torch.tensor(ids), **keyed)
            gradients = torch.autograd.grad(result.loss, [*leaves.values()])
            close({"loss": result.loss.detach(), **dict(zip(leaves, gradients, strict=True))}, want)
            close_states(objective, reference)


@pytest.mark.parametrize("name", NAMES)
def test_relevance_weighs_each_pair(name: str) -> None:
    """u has no weights; the τ or ζ of a sample has the gradient of the weighted loss."""
    for directions in ("mean", "y"):
        objective = build(name, gamma=0.7, directions=directions, duplicates="mask")
        reference = refer(objective, directions=directions)
        for step, (ids, keys) in enumerate(zip(STEPS[:3], KEYS[:3], strict=True)):
            x, y = embeddings(step)
            weights = torch.linspace(0.1, 1.0, 8, dtype=torch.float64).roll(step)[:6]
            want = reference(x, y, ids, keys, weights.tolist())
            close(call(objective, x, y, ids, x_keys=torch.tensor(keys), relevance=weights), want)
            close_states(objective, reference)


@pytest.mark.parametrize("name", ["fastclip_v0", "fastclip_v3"])
def test_the_gradient_of_the_authors_code_has_the_part_through_the_batch_twice(name: str) -> None:
    objective = build(name, gamma=0.7, temperature_gradient="fastclip")
    reference = refer(objective, twice=True)
    for step, ids in enumerate(STEPS):
        x, y = embeddings(step)
        close(call(objective, x, y, ids), reference(x, y, ids))


def exact(name: str) -> Objective:
    """What an estimator is when the batch is the whole data and γ = 1."""
    scaled = {"sogclr": {}, "isogclr": {"rho": RHO}, "fastclip_v3": {"rho": RHO, "learnable": True}}
    options: dict[str, Any] = {
        **{key: {"candidates": "negatives", "partition": "mean", **more} for key, more in scaled.items()},
        "fastclip_v0": {"candidates": "negatives", "partition": "mean", "tau_scaled": False, "learnable": True},
        "nuclr": {"candidates": "all", "partition": "sum"},  # ζ = 0
    }
    return precise(build_objective("symmetric_dpm", **options[name]))


@pytest.mark.parametrize("directions", ["sum", "mean", "x", "y"])
@pytest.mark.parametrize("name", NAMES)
def test_identity_13_exact_with_gamma_1_and_all_samples(name: str, directions: str) -> None:
    objective, whole = build(name, gamma=1.0, directions=directions), exact(name)
    whole.options.directions = objective.options.directions
    learning = [p for p in whole.parameters() if p.requires_grad]
    lr = {"isogclr": "tau_lr", "nuclr": "zeta_lr"}.get(name)
    if lr:
        objective = build(name, gamma=1.0, directions=directions, **{lr: 0.0})
    for seed in (1, 2):
        x, y = embeddings(seed, N)
        loss = whole(x, y).loss
        want = dict(zip(["x", "y", "logit_scale"], torch.autograd.grad(loss, [x, y, *learning]), strict=False))
        close(call(objective, x, y, list(range(N))), {"loss": loss.detach(), **want})


def log_g(x: Tensor, y: Tensor, tau: float = 0.07) -> Tensor:
    """log g_i of all samples as batch, (N,)."""
    s = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    d = (s - s.diagonal()[:, None]) / tau
    return d.masked_fill(torch.eye(len(s), dtype=torch.bool), -math.inf).logsumexp(1) - math.log(len(s) - 1)


def test_identity_13_the_error_of_u_shrinks_by_one_minus_gamma() -> None:
    objective = build("sogclr", gamma=0.3)
    call(objective, *embeddings(0, N), list(range(N)))
    x, y = embeddings(1, N)
    errors = []
    for _ in range(4):
        errors.append(state(objective)["log_u_x"].exp() - log_g(x, y).exp())
        call(objective, x, y, list(range(N)))
    for before, after in itertools.pairwise(errors):
        torch.testing.assert_close(after, 0.7 * before, rtol=1e-9, atol=1e-12)
    assert (errors[0].abs() > 1e-4).all()


def test_identity_13_the_batch_is_unbiased_and_its_log_is_not() -> None:
    n, size = 6, 3
    x, y = embeddings(0, n)
    found: list[list[float]] = [[] for _ in range(n)]
    for ids in itertools.combinations(range(n), size):
        objective = build("sogclr", gamma=1.0)
        call(objective, x[list(ids)], y[list(ids)], list(ids))
        for i in ids:
            found[i].append(state(objective)["log_u_x"][i].item())
    for i, log_u in enumerate(found):
        g = log_g(x, y)[i].exp().item()
        assert sum(map(math.exp, log_u)) / len(log_u) == pytest.approx(g, rel=1e-9)
        assert sum(log_u) / len(log_u) < math.log(g) - 1e-3


def test_isogclr_leaves_a_temperature_alone_where_the_divergence_is_rho() -> None:
    x, y = embeddings(3, N)
    s = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()

    def divergence(d: Tensor, tau: float) -> float:
        p = (d / tau).softmax(0)
        return (p * (p * len(p)).log()).sum().item()

    taus = {"x": [], "y": []}
    for side, scores in (("x", s), ("y", s.T)):
        for i in range(N):
            d = torch.cat([scores[i, :i], scores[i, i + 1 :]])
            low, high = 1e-3, 10.0  # the divergence falls as τ grows
            for _ in range(100):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if divergence(d, middle) > RHO else (low, middle)
            taus[side].append(low)
    objective = build("isogclr", gamma=1.0, min_temperature=1e-3, max_temperature=10.0)
    assert objective.sample_state is not None
    given = {f"tau_{side}": torch.tensor(values, dtype=torch.float64) for side, values in taus.items()}
    objective.sample_state.load({name: v.double() for name, v in state(objective).items()} | given)
    call(objective, x, y, list(range(N)))
    for side in "xy":
        torch.testing.assert_close(state(objective)[f"tau_velocity_{side}"], torch.zeros(N).double(), rtol=0, atol=1e-9)
        torch.testing.assert_close(state(objective)[f"tau_{side}"], given[f"tau_{side}"])


def test_nuclr_ends_where_every_candidate_gets_as_much_as_an_anchor_gives() -> None:
    objective = build("nuclr", gamma=1.0, temperature=0.5, zeta_lr=0.4, zeta_momentum=0.0, zeta_warmup=0)
    x, y = embeddings(4, N)
    for _ in range(300):
        call(objective, x, y, list(range(N)))
    s = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    sums = {}
    for side, scores in (("x", s), ("y", s.T)):
        zeta = state(objective)[f"zeta_{side}"]
        sums[side] = ((scores + zeta) / 0.5).softmax(1).sum(0)
        assert ((scores / 0.5).softmax(1).sum(0) - 1).abs().max() > 0.1
        torch.testing.assert_close(sums[side], torch.ones(N).double(), rtol=0, atol=1e-6)
        popular = (scores / 0.5).softmax(1).sum(0).argmax()
        assert zeta[popular] < zeta.mean()


def test_nuclr_does_not_move_in_its_warm_up() -> None:
    objective = build("nuclr", zeta_warmup=2)
    for epoch in range(3):
        call(objective, *embeddings(epoch, N), list(range(N)))
        assert bool((state(objective)["zeta_x"] == 0).all()) == (epoch < 2)


@pytest.mark.parametrize("name", NAMES)
def test_undo_restores_every_bit(name: str) -> None:
    objective = build(name, zeta_warmup=0) if name == "nuclr" else build(name)
    call(objective, *embeddings(0), STEPS[0])
    before = state(objective)
    first = call(objective, *embeddings(1), STEPS[1])
    assert any(not torch.equal(v, before[k]) for k, v in state(objective).items())
    objective.undo()
    assert {k: v.numpy().tobytes() for k, v in state(objective).items()} == {
        k: v.numpy().tobytes() for k, v in before.items()
    }
    again = call(objective, *embeddings(1), STEPS[1])
    assert all(torch.equal(first[k], again[k]) for k in first)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_changes_nothing(name: str) -> None:
    objective = build(name)
    x, y = embeddings(0)
    call(objective, x, y, STEPS[0])
    before = state(objective)
    objective.eval()
    with torch.no_grad():
        shown = objective(x, y, torch.tensor(STEPS[1])).loss
    assert all(torch.equal(v, before[k]) or v.isnan().any() for k, v in state(objective).items())
    assert torch.equal(before["samples_seen"], state(objective)["samples_seen"])
    objective.train()
    assert torch.equal(objective(x, y, torch.tensor(STEPS[1])).loss, shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_negatives_keeps_its_state(name: str) -> None:
    objective = build(name, duplicates="mask")
    x, y = embeddings(0)
    found = call(objective, x, y, STEPS[0], x_keys=torch.zeros(B, dtype=torch.int64))
    assert found["loss"] == 0 and not found["x"].any() and not found["y"].any()
    assert state(objective)["log_u_x"].isnan().all()
    assert (found["share_never_visited"], found["staleness"]) == (1, 0)


def test_what_is_logged() -> None:
    objective = build("isogclr", gamma=0.5)
    x, y = embeddings(0)
    first = call(objective, x, y, STEPS[0])
    assert (first["share_never_visited"], first["staleness"], first["gamma"]) == (pytest.approx(3 / 9), 0, 0.5)
    second = call(objective, *embeddings(1), STEPS[2])
    assert second["share_never_visited"] == pytest.approx(1 / 9)
    assert second["staleness"] > 0.01
    after = torch.cat([state(objective)[f"tau_{side}"][STEPS[2]] for side in "xy"])
    for label, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        torch.testing.assert_close(second[f"tau_{label}"], after.quantile(q))
    scores = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    torch.testing.assert_close(first["positive_score"], scores.diagonal().mean())
    assert {"zeta_p10", "zeta_p90"} <= call(build("nuclr"), x, y, STEPS[0]).keys()


@pytest.mark.parametrize("tau", [1e-3, 0.01, 50.0])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_temperatures_in_float32(name: str, tau: float) -> None:
    extreme = {"min_temperature": 1e-3, "max_temperature": 50.0} if name == "isogclr" else {"learnable": False}
    extreme = {"num_samples": N, "gamma": 0.8, **OPTIONS[name], "temperature": tau, **extreme}
    objective = build_objective(name, **extreme)
    for sign in (-1.0, 1.0, -1.0):
        x, _ = embeddings(0, dtype=torch.float32)
        y = (sign * x).detach().requires_grad_()
        found = call(objective, x, y, STEPS[0])
        assert all(v.isfinite().all() for v in found.values())
    assert all(v[STEPS[0]].isfinite().all() for k, v in state(objective).items() if v.ndim)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_quadratic_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "KEPT", 0)
    count = 256
    objective = build_objective(name, num_samples=count, gamma=0.8)
    x, y = (torch.randn(count, 8, requires_grad=True) for _ in range(2))
    for _ in range(2):
        with LargestTensor() as largest:
            objective(x, y, torch.arange(count)).loss.backward()
        assert largest.elements <= 16 * count


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no number of samples": (lambda: build_objective("sogclr"), "objective.num_samples"),
    "no ids": (lambda: build("nuclr")(*embeddings(0)), "sample_ids"),
    "a temperature without optimum": (lambda: build("sogclr", learnable=True), "fastclip_v3"),
    "two ways to learn a temperature": (lambda: build("isogclr", learnable=True), "tau_lr"),
    "a schedule without its run": (lambda: build("sogclr", gamma="auto"), "objective.gamma_epochs"),
    "half of it": (lambda: build("sogclr", gamma="auto", gamma_min=0.1), "objective.gamma_epochs"),
    "half a schedule": (lambda: build("sogclr", gamma_min=0.1), "gamma_epochs=None"),
    "upwards from auto": (lambda: build("sogclr", gamma="auto", gamma_min=1.1, gamma_epochs=3), "gamma_min=1.1"),
    "a word": (lambda: build("sogclr", gamma="cosine"), "gamma=cosine"),
    "a bool": (lambda: build("sogclr", gamma=True), "gamma=True"),
    "a schedule upwards": (lambda: build("sogclr", gamma=0.1, gamma_min=0.2, gamma_epochs=3), "gamma_min=0.2"),
    "no epochs": (lambda: build("sogclr", gamma_min=0.2, gamma_epochs=0), "gamma_epochs=0"),
    "gamma": (lambda: build("sogclr", gamma=0.0), "gamma=0.0"),
    "rho": (lambda: build("fastclip_v3", rho=-1), "rho=-1.0"),
    "radius": (lambda: build("isogclr", rho=-1), "rho=-1.0"),
    "temperature": (lambda: build("isogclr", temperature=0.5), "max_temperature=0.2"),
    "step": (lambda: build("isogclr", tau_lr=-1), "tau_lr=-1.0"),
    "momentum": (lambda: build("isogclr", tau_momentum=1), "tau_momentum=1.0"),
    "clip": (lambda: build("isogclr", tau_clip=0), "tau_clip=0.0"),
    "zeta": (lambda: build("nuclr", zeta_lr=-1), "zeta_lr=-1.0"),
    "momentum of zeta": (lambda: build("nuclr", zeta_momentum=1), "zeta_momentum=1.0"),
    "warm-up": (lambda: build("nuclr", zeta_warmup=-1), "zeta_warmup=-1"),
    "positives": (lambda: build("sogclr", duplicates="positive"), "duplicates=positive"),
    "one sample": (lambda: build("sogclr", num_samples=1), "num_samples=1"),
    "memory": (lambda: build("sogclr", memory_budget_mb=-1), "memory_budget_mb=-1"),
    "one pair": (lambda: call(build("sogclr"), *embeddings(0, 1), [0]), "objective=sogclr"),
    "no keys": (lambda: call(build("sogclr", duplicates="mask"), *embeddings(0), STEPS[0]), "duplicates=mask"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_told(case: str) -> None:
    mistake, named = WRONG[case]
    with raises(ConfigError, named):
        mistake()


@in_ways
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_with_one_process(world_size: int, ways: str) -> None:
    launch("dist_estimators.py", world_size, ways)

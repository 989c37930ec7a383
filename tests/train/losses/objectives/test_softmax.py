"""The softmax family against an independent reading: every entry, option and kind of input; value and gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.dist import in_ways
from helpers.messages import raises
from helpers.reference import build, close, embeddings, reference_loss, relative_error, same_item
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import LOG_Q, ZETA, LogWeights, write_log_weights
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.sums import tiles

B, D = 7, 4
X_KEYS = torch.tensor([1, 2, 3, 4, 4, 5, 6])
Y_KEYS = torch.tensor([1, 1, 2, 3, 5, 5, 5])  # with X_KEYS: 3~4~5 but not 3~5, and 4~5~6
FURTHER_KEYS = torch.tensor([1, 9, 5, 3, 8])
FURTHER_ROWS = torch.tensor([0, 0, 1, 4, 6])
WRONG_KEYS = torch.tensor([9, 4, 8, 2])  # of x: the second is x of rows 3 and 4, the last that of row 1
LISTED = [(0, 0), (0, 3), (1, 1), (2, 5), (2, 2), (4, 4), (5, 5), (6, 0), (6, 6), (6, 4)]  # row, column 3: none own
EXCLUDED = [(0, 1), (1, 0), (2, 3), (2, 4), (5, 6), (6, 5), (3, 2)]
WIDE = [(0, 9), (0, 2), (1, 4), (2, 9), (3, 0), (4, 7), (5, 5), (5, 6), (6, 8)]


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


class Case:
    """Inputs of an objective (`given`), the same for the reference (`told`), and what has a gradient."""

    def __init__(
        self, given: dict[str, Any], m: int = B, further: Tensor | None = None, wrong: Tensor | None = None
    ) -> None:
        self.x, self.y = numbers(B, D, seed=1), numbers(m, D, seed=2)
        self.given, self.further = given, further
        self.inputs = [self.x, self.y, *(e for e in (further, wrong) if e is not None)]
        pairs = {name: [*map(tuple, given[name].tolist())] for name in ("positives", "excluded") if name in given}
        self.told: dict[str, Any] = {"excluded": pairs.get("excluded", ()), "listed": pairs.get("positives")}
        self.told |= {"further": None if further is None else further.flatten(0, -2), "wrong": wrong}
        extra = given.get("negatives")
        column_keys = [Y_KEYS] if not isinstance(extra, Columns) or extra.keys_k is None else [Y_KEYS, extra.keys_k]
        x_keys = X_KEYS if wrong is None else torch.cat([X_KEYS, WRONG_KEYS])
        kinds = {"x_keys": (x_keys, X_KEYS), "y_keys": (Y_KEYS, torch.cat(column_keys))}
        self.same = same_item([keys for name, keys in kinds.items() if name in given])
        if isinstance(extra, Columns) and extra.positive_k is not None:
            places = [(int(r), m + k) for k, r in enumerate(extra.row_k) if extra.positive_k[k]]
            self.told["listed"] = [*(self.told["listed"] or [(i, i) for i in range(B)]), *places]

    @property
    def lists_positives(self) -> bool:
        return self.told["listed"] is not None


def columns(further: Tensor, **more: Tensor) -> Columns:
    return Columns(further, FURTHER_ROWS, FURTHER_KEYS, **more)


KEYS = {"x_keys": X_KEYS, "y_keys": Y_KEYS}
POSITIVE = torch.tensor([True, False, True, True, False])


def case(name: str) -> Case:
    flat, hard, wrong = numbers(5, D), numbers(B, 2, D), numbers(4, D, seed=4)
    rows = XNegatives(wrong, torch.tensor([0, 2, 2, 6]), WRONG_KEYS)
    listed, excluded = torch.tensor(LISTED), torch.tensor(EXCLUDED)
    some = columns(flat, positive_k=POSITIVE)
    made: dict[str, Callable[[], Case]] = {
        "pairs": lambda: Case(KEYS),
        "one kind of key": lambda: Case({"y_keys": Y_KEYS}),
        "hard negatives": lambda: Case({"negatives": hard, "x_keys": X_KEYS}, further=hard),
        "ragged columns": lambda: Case({"negatives": columns(flat), **KEYS}, further=flat),
        "further positives": lambda: Case({"negatives": some, **KEYS}, further=flat),
        "listed": lambda: Case({"positives": listed, **KEYS}),
        "excluded": lambda: Case({"excluded": excluded, **KEYS}),
        "rectangular": lambda: Case({"positives": torch.tensor(WIDE)}, m=10),
        "wrong x": lambda: Case({"x_negatives": rows, **KEYS}, wrong=wrong),
        "wrong x and y": lambda: Case(
            {"negatives": some, "x_negatives": rows, "excluded": excluded, **KEYS}, further=flat, wrong=wrong
        ),
        "everything": lambda: Case(
            {"negatives": some, "positives": listed, "excluded": excluded, **KEYS}, further=flat
        ),
    }
    return made[name]()


CASES = ["pairs", "one kind of key", "hard negatives", "ragged columns", "further positives", "listed", "excluded"]
CASES += ["rectangular", "everything", "wrong x", "wrong x and y"]
SIMPLE = {
    "similarity": ["cosine", "dot"],
    "partition": ["sum", "mean"],
    "tau_scaled": [False, True],
    "directions": ["sum", "mean", "x", "y"],
}
SIMPLE_COMBINATIONS = [dict(zip(SIMPLE, values, strict=True)) for values in itertools.product(*SIMPLE.values())]


def has_sense(made: Case, positives: str, duplicates: str) -> bool:
    if positives == "single" and (made.lists_positives or duplicates == "positive"):
        return False
    return duplicates == "keep" or "x_keys" in made.given or "y_keys" in made.given


RELATIONS = [
    (name, positives, duplicates)
    for name in CASES
    for positives in ("single", "each", "exclude", "merge")
    for duplicates in ("keep", "mask", "positive")
    if has_sense(case(name), positives, duplicates)
]


@in_ways
@pytest.mark.parametrize(("name", "positives", "duplicates"), RELATIONS)
def test_every_relation_equals_the_reference(name: str, positives: str, duplicates: str, ways: str) -> None:
    """With both kinds of candidates; of the other options, some: they come in after the sums."""
    chosen = random.Random(f"{name} {positives} {duplicates}").sample(SIMPLE_COMBINATIONS, 4)
    for candidates, options in zip(("all", "negatives") * (1 if ways == "some" else 2), chosen, strict=False):
        made = case(name)
        options = {**options, "candidates": candidates, "positives": positives, "duplicates": duplicates}
        if options["directions"] == "x" and "x_negatives" in made.given:
            options["directions"] = "y"
        objective = build("clip", temperature=0.3, **options)
        inputs = [*made.inputs, objective.logit_scale.requires_grad_()]
        loss = objective(made.x, made.y, **made.given).loss
        want = reference_loss(made.x, made.y, objective.logit_scale, made.same, **made.told, **options)
        close(loss, want, 1e-9, options)
        gradients = torch.autograd.grad(want, inputs)
        for got, expected in zip(torch.autograd.grad(loss, inputs), gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11, msg=lambda m, o=options: f"{o} {m}")
        single = [v.detach().float().requires_grad_() for v in made.inputs]
        given = {k: replaced(v, single[2:]) for k, v in made.given.items()}
        objective.float().logit_scale.requires_grad_(False)
        loss = objective(*single[:2], **given).loss
        assert abs(float(loss.detach() - want.detach())) < 1e-5 * (1 + abs(float(want.detach())))
        for got, expected in zip(torch.autograd.grad(loss, single), gradients, strict=False):
            assert relative_error(got, expected) < 1e-5, options


def replaced(given: Tensor | Columns | XNegatives, further: list[Tensor]) -> Tensor | Columns | XNegatives:
    """What is given with `further` embeddings, those of wrong x last; ids, keys and pairs as they are."""
    if isinstance(given, XNegatives | Columns):
        return replace(given, embeddings_kD=further[-1 if isinstance(given, XNegatives) else 0])
    return further[0] if given.is_floating_point() else given


PAPERS: dict[str, dict[str, Any]] = {  # the entries as the papers have them
    "symmetric_dpm": {"tau_scaled": True, "directions": "sum"},
    "clip": {"directions": "mean"},
    "gcl": {"tau_scaled": True, "directions": "sum", "candidates": "negatives", "partition": "mean"},
    "dcl": {"directions": "mean", "candidates": "negatives"},
    "one_sided_dpm": {"tau_scaled": True, "directions": "x"},
    "info_nce": {"directions": "x"},
    "dpr": {"similarity": "dot", "directions": "x"},
    "epr": {"similarity": "dot", "directions": "x"},
    "cross_entropy": {"similarity": "dot", "directions": "x", "partition": "mean"},
    "listwise_ce": {"similarity": "dot", "directions": "x", "partition": "mean"},
}
TAU = {"dpr": 1.0, "epr": 1.0, "cross_entropy": 1.0, "listwise_ce": 1.0}


@pytest.mark.parametrize("name", ["pairs", "hard negatives", "everything", "rectangular"])
@pytest.mark.parametrize("entry", PAPERS)
def test_entries_are_what_the_papers_say(entry: str, name: str) -> None:
    made = case(name)
    objective = build_objective(entry).double()
    log_scale = -torch.tensor(TAU.get(entry, 0.07)).log().double()
    want = reference_loss(made.x, made.y, log_scale, **made.told, **PAPERS[entry])
    loss = objective(made.x, made.y, **made.given).loss
    close(loss, want, 1e-6)  # the temperature is a float32 number
    for got, expected in zip(*(torch.autograd.grad(v, made.inputs) for v in (loss, want)), strict=True):
        close(got, expected, 1e-6)
    assert all(p.requires_grad == (entry in ("clip", "info_nce")) for p in objective.parameters())


@pytest.mark.parametrize("rho", [0.1, 2.0])
@pytest.mark.parametrize("directions", ["sum", "mean", "x"])
def test_radius_of_a_ball(rho: float, directions: str) -> None:
    made = case("pairs")
    options: dict[str, Any] = dict(tau_scaled=True, partition="mean", rho=rho, directions=directions)
    objective = build("clip", temperature=0.3, learnable=True, **options)
    loss = objective(made.x, made.y).loss
    want = reference_loss(made.x, made.y, objective.logit_scale, **options)
    close(loss, want)
    inputs = [made.x, objective.logit_scale]
    for got, expected in zip(*(torch.autograd.grad(v, inputs) for v in (loss, want)), strict=True):
        close(got, expected, 1e-10)


@pytest.mark.parametrize("name", ["pairs", "listed", "excluded", "rectangular"])
@pytest.mark.parametrize("source", ["log_q", "zeta"])
@pytest.mark.parametrize("positives", ["each", "exclude", "merge"])
def test_importance_equals_the_reference(name: str, source: str, positives: str) -> None:
    for duplicates, partition, tau_scaled in (("keep", "sum", True), ("positive", "mean", False)):
        made = case(name)
        if not has_sense(made, positives, duplicates):
            continue
        values = numbers(len(made.y), seed=9)
        options: dict[str, Any] = dict(duplicates=duplicates, partition=partition, positives=positives, directions="x")
        options["tau_scaled"] = tau_scaled
        objective = build("one_sided_dpm", temperature=0.3, importance=source, **options)
        scale = objective.logit_scale.requires_grad_()
        omega = -values if source == "log_q" else values * scale.exp()
        loss = objective(made.x, made.y, importance=values, **made.given).loss
        want = reference_loss(made.x, made.y, scale, made.same, omega=omega, **made.told, **options)
        close(loss, want, 1e-9)
        inputs = [*made.inputs, scale, values]
        for got, expected in zip(*(torch.autograd.grad(v, inputs) for v in (loss, want)), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["pairs", "further positives", "everything"])
@pytest.mark.parametrize("source", [LOG_Q, ZETA])
def test_importance_by_key_is_that_of_every_column(name: str, source: str, tmp_path: Path) -> None:
    """Further columns have weights too, and equal items equal ones."""
    made, keys = case(name), torch.cat([Y_KEYS, FURTHER_KEYS])[: B if name == "pairs" else None]
    keys_n = np.append(np.unique(keys.numpy()), 99)
    values_n = np.random.default_rng(0).normal(size=len(keys_n))
    write_log_weights(LogWeights(path := str(tmp_path / "w.safetensors"), source, keys_n, values_n))
    values = torch.tensor([dict(zip(keys_n.tolist(), values_n, strict=True))[key] for key in keys.tolist()])
    for duplicates, tau_scaled in (("keep", True), ("positive", False)):
        options: dict[str, Any] = {"duplicates": duplicates, "tau_scaled": tau_scaled, "directions": "x"}
        objective = build("one_sided_dpm", temperature=0.3, importance=source, importance_file=path, **options)
        scale = objective.logit_scale.requires_grad_()
        omega = -values if source == LOG_Q else values * scale.exp()
        loss = objective(made.x, made.y, **made.given).loss
        want = reference_loss(made.x, made.y, scale, made.same, omega=omega, **made.told, **options)
        close(loss, want, 1e-9)
        inputs = [*made.inputs, scale]
        for got, expected in zip(*(torch.autograd.grad(v, inputs) for v in (loss, want)), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    absent = made.given | {"y_keys": Y_KEYS + 100 * (torch.arange(B) == 3)}
    with raises(DataError, path, "103", "add="):
        objective(made.x, made.y, **absent)
    with raises(ConfigError, path, "y_keys"):
        objective(made.x, made.y, x_keys=X_KEYS)


def test_importance_from_a_file_is_that_of_the_samples(tmp_path: Path) -> None:
    (x, y), values = embeddings(), np.random.default_rng(0).normal(size=50)
    np.save(tmp_path / "q.npy", values)
    ids = torch.tensor([3, 49, 0, 7, 7, 12, 1, 2, 30])
    options = {"importance": "log_q", "tau_scaled": True}
    given = build("one_sided_dpm", **options)(x, y, importance=torch.from_numpy(values)[ids]).loss
    objective = build("one_sided_dpm", importance_file=str(tmp_path / "q.npy"), **options)
    close(objective(x, y, sample_ids_b=ids).loss, given)
    assert objective(x, y, importance=torch.zeros(9), sample_ids_b=ids).loss != given  # the caller's own come first


def test_a_file_of_numbers_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "q.npy", np.zeros(2))
    write_log_weights(LogWeights(str(tmp_path / "q.safetensors"), LOG_Q, np.arange(2), np.zeros(2)))
    for name in ("q.npy", "q.safetensors"):
        build("one_sided_dpm", importance="log_q", importance_file=f"~/{name}")


def test_constant_weights_shift_the_value_alone() -> None:
    x, y = embeddings()
    plain = build("one_sided_dpm", temperature=0.3)(x, y).loss
    weighted = build("one_sided_dpm", temperature=0.3, importance="log_q")(x, y, importance=torch.full((9,), -2.0)).loss
    close(weighted, plain + 0.3 * 2.0)
    for got, expected in zip(*(torch.autograd.grad(v, (x, y)) for v in (weighted, plain)), strict=True):
        close(got, expected)


def test_a_weight_is_as_many_duplicates() -> None:
    """e^(ζ/τ) = r stands for r equal candidates."""
    x, y = (e.detach() for e in embeddings(5))
    own, times = torch.stack([torch.arange(5)] * 2, 1), torch.tensor([1, 3, 2, 1, 4])
    repeated = torch.cat([y, y.repeat_interleave(times - 1, 0)])
    many = build("one_sided_dpm", temperature=0.3)(x, repeated, positives=own).loss
    few = build("one_sided_dpm", temperature=0.3, importance="zeta")(x, y, importance=0.3 * times.log()).loss
    close(few, many, 1e-6)


def reference_simclr(z: Tensor, partner: list[int], tau: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    a = z @ z.T / tau
    terms = [torch.logsumexp(a[i, [j for j in range(len(z)) if j != i]], 0) - a[i, partner[i]] for i in range(len(z))]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("tau_scaled", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_simclr(n: int, tau_scaled: bool) -> None:
    first, second = embeddings(n)
    partner = [*range(n, 2 * n), *range(n)]
    objective = build("simclr", temperature=0.3, tau_scaled=tau_scaled)
    scale = objective.logit_scale.requires_grad_()
    tau = torch.exp(-scale)
    want = reference_simclr(torch.cat([first, second]), partner, tau) * (tau if tau_scaled else 1.0)
    inputs = (first, second, scale)
    gradients = torch.autograd.grad(want, inputs)
    stacked = torch.cat([first, second])
    interleaved = torch.stack([first, second], 1).flatten(0, 1)
    woven = build("simclr", temperature=0.3, tau_scaled=tau_scaled, views="interleaved")
    woven.logit_scale = scale
    for loss in (objective(first, second).loss, objective(stacked, None).loss, woven(interleaved, None).loss):
        close(loss, want, 1e-9)
        for got, expected in zip(torch.autograd.grad(loss, inputs), gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


FINITE: list[tuple[str, dict[str, Any]]] = [
    ("pairs", {}),
    ("pairs", {"duplicates": "positive"}),
    ("pairs", {"duplicates": "mask", "directions": "y"}),
    ("pairs", {"candidates": "negatives"}),
    ("wrong x and y", {"duplicates": "mask"}),
    ("everything", {"positives": "merge", "directions": "sum"}),
    ("everything", {"positives": "exclude", "duplicates": "positive"}),
]


@pytest.mark.parametrize(("name", "options"), FINITE, ids=str)
def test_finite_differences(name: str, options: dict[str, Any]) -> None:
    made = case(name)
    objective = build("clip", temperature=0.3, **options)

    def loss(x: Tensor, y: Tensor, logit_scale: Tensor, *further: Tensor) -> Tensor:
        given = {k: replaced(v, list(further)) for k, v in made.given.items()}
        return torch.func.functional_call(objective, {"logit_scale": logit_scale}, (x, y), given).loss

    scale = objective.logit_scale.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (*made.inputs[:2], scale, *made.inputs[2:]), atol=1e-6)


def test_an_own_positive_that_is_excluded_is_no_candidate() -> None:
    """Whether equal keys are masked or kept, here where none is equal to another."""
    x, y, own = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), numbers(3, 4), torch.tensor([[0, 0]])
    options: dict[str, Any] = dict(partition="mean", temperature=1.0)
    kept, masked, positive = (
        build("info_nce", **options, duplicates=duplicates)(x.double(), y, x_keys=torch.arange(3), excluded=own).loss
        for duplicates in ("keep", "mask", "positive")
    )
    torch.testing.assert_close(masked, kept)
    torch.testing.assert_close(positive, kept)


@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
@pytest.mark.parametrize("positives", ["each", "merge"])
def test_excluded_positives_equal_the_reference(positives: str, duplicates: str) -> None:
    """Row 0 and column 0 are left with nothing: they are skipped."""
    excluded = [(0, j) for j in range(B)] + [(i, 0) for i in range(B)] + [(2, 2), (4, 4)]
    made = Case({**KEYS, "excluded": torch.tensor(excluded)})
    for candidates, partition in itertools.product(("all", "negatives"), ("sum", "mean")):
        options: dict[str, Any] = {"candidates": candidates, "partition": partition}
        options |= {"positives": positives, "duplicates": duplicates}
        objective = build("clip", temperature=0.3, **options)
        loss = objective(made.x, made.y, **made.given).loss
        want = reference_loss(made.x, made.y, objective.logit_scale, made.same, **made.told, **options)
        close(loss, want, 1e-9, options)
        for got, expected in zip(*(torch.autograd.grad(v, made.inputs) for v in (loss, want)), strict=True):
            close(got, expected, 1e-9, options)


def test_further_columns_of_which_none_is_positive_leave_own_pairs_single() -> None:
    x, y, more = (torch.randn(4, 3, generator=torch.Generator().manual_seed(s)) for s in range(3))
    columns = Columns(more, torch.arange(4), positive_k=torch.zeros(4, dtype=torch.bool))
    single = build_objective("dpr", positives="single")(x, y, negatives=columns)
    torch.testing.assert_close(single.loss, build_objective("dpr")(x, y, negatives=more[:, None]).loss)


REFUSED: list[tuple[str, XNegatives, dict[str, Any], tuple[object, ...]]] = [
    ("simclr", XNegatives(torch.ones(1, D), torch.tensor([0])), {}, ("simclr", "clip")),
    ("dpr", XNegatives(torch.ones(1, D), torch.tensor([0])), {}, ("directions=x", "clip")),
    ("clip", XNegatives(torch.ones(1, 5), torch.tensor([0])), {}, ("x_negatives", D, "(1, 5)")),
    ("clip", XNegatives(torch.ones(1, D), torch.tensor([B])), {}, ("x_negatives.row_k", B)),
    ("clip", XNegatives(torch.ones(1, D), torch.arange(2)), {}, ("x_negatives.row_k", "(1,)", "(2,)")),
    ("clip", XNegatives(torch.ones(1, D), torch.tensor([0])), {"x_keys": X_KEYS}, ("keys_k",)),
]


@pytest.mark.parametrize(("name", "rows", "keys", "named"), REFUSED, ids=str)
def test_wrong_x_that_cannot_be_are_refused(name: str, rows: XNegatives, keys: Any, named: tuple[object, ...]) -> None:
    x, y, options = torch.ones(B, D), torch.ones(B, D), {"duplicates": "mask"} if keys else {}
    with raises((ConfigError, ValueError), *named):
        build_objective(name, **options)(x, y, x_negatives=rows, **keys)

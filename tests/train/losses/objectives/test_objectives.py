"""What the objectives have in common: skipped anchors, metrics, types, what they allocate, what they refuse."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.messages import raises
from helpers.reference import LargestTensor, build, close, embeddings, reference_loss, same_item
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.batch import KnownPositives
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered import candidates
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.options.choices import PairLoss
from dyad.train.losses.options.common import SCORED, ExpectedBatch
from dyad.train.losses.options.registry import configure
from dyad.train.losses.sums import tiles

X_KEYS, Y_KEYS = torch.tensor([[1, 2, 3, 4, 4, 5, 6, 7, 8], [1, 1, 2, 3, 4, 4, 5, 5, 5]])
KEYS = {"x_keys": X_KEYS, "y_keys": Y_KEYS}
ALONE = [name for name, options in OBJECTIVES.items() if options.inputs not in SCORED]  # without more arguments
SOFTMAX = ["symmetric_dpm", "clip", "gcl", "one_sided_dpm", "info_nce", "dpr", "epr", "cross_entropy", "listwise_ce"]


def alike(*keys: Tensor) -> Any:
    return same_item([(k, k) for k in keys])


def test_anchors_without_candidates_are_skipped() -> None:
    x, y = embeddings(4)
    options: dict[str, Any] = dict(candidates="negatives", duplicates="mask")
    objective = build("clip", **options)
    loss = objective(x, y, y_keys=torch.tensor([1, 1, 1, 1])).loss
    assert loss == 0.0
    assert all(g.eq(0).all() for g in torch.autograd.grad(loss, (x, y, objective.logit_scale)))
    some = torch.tensor([1, 2, 3, 3])
    close(objective(x, y, x_keys=some).loss, reference_loss(x, y, objective.logit_scale, alike(some), **options))
    bridge = (torch.tensor([1, 1, 2, 9]), torch.tensor([8, 3, 3, 3]))  # row 1 is the same item as 0, 2 and 3
    loss = objective(x, y, x_keys=bridge[0], y_keys=bridge[1]).loss
    want = reference_loss(x, y, objective.logit_scale, alike(*bridge), **options)
    close(loss, want)
    for got, expected in zip(torch.autograd.grad(loss, (x, y)), torch.autograd.grad(want, (x, y)), strict=True):
        assert got[1].eq(0).all()
        close(got, expected)


def test_no_anchor_is_left_at_all() -> None:
    """No positive is listed: no task, and no number that is none."""
    x, y = embeddings(4)
    nobody = torch.zeros(0, 2, dtype=torch.int64)
    for positives in ("each", "exclude", "merge"):
        loss = build("clip", positives=positives)(x, y, positives=nobody).loss
        assert loss == 0.0 and all(g.eq(0).all() for g in torch.autograd.grad(loss, (x, y)))


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


NO_BOUND: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("clip", {"candidates": "negatives"}, {}),
    ("clip", {"duplicates": "mask"}, {"y_keys": Y_KEYS}),
    ("clip", {"duplicates": "positive"}, {"y_keys": Y_KEYS}),
    *((name, {}, {}) for name in ("gcl", "dcl")),
    ("clip", {}, {"excluded": torch.tensor([[0, 1]])}),
    ("dpr", {}, {"negatives": torch.ones(9, 1, 5, dtype=torch.float64)}),
    ("listwise_ce", {}, {"positives": torch.tensor([[i, i] for i in range(9)])}),
    ("one_sided_dpm", {"importance": "log_q"}, {"importance": torch.zeros(9)}),
]


@pytest.mark.parametrize(("name", "options", "given"), NO_BOUND, ids=lambda v: str(v)[:40])
def test_no_mi_bound_where_it_is_none(name: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    assert "mi_bound" not in build(name, **options)(*embeddings(), **given).metrics


def test_bfloat16_embeddings_are_scored_in_float32() -> None:
    x, y = (e.detach().bfloat16().requires_grad_() for e in embeddings(64, 16))
    objective = build_objective("clip")
    loss = objective(x, y).loss
    assert loss.dtype == torch.float32
    close(loss, objective(x.float(), y.float()).loss)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(loss, (x, y)))


@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
def test_autocast_changes_nothing(duplicates: str) -> None:
    x, y = (e.detach().float().requires_grad_() for e in embeddings())
    objective = build_objective("clip", duplicates=duplicates)
    plain = objective(x, y, **KEYS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = objective(x, y, **KEYS)
    assert torch.equal(plain.loss, cast.loss) and plain.metrics == cast.metrics


@pytest.mark.parametrize("duplicates", ["keep", "mask", "positive"])
@pytest.mark.parametrize("options", [{}, {"candidates": "negatives"}, {"positives": "merge"}], ids=str)
def test_nothing_quadratic_is_allocated(
    duplicates: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when half of all pairs are duplicates; if positives are wanted one by one, where they are a few each."""
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "KEPT", 0)
    n, width = 192, 6
    x, y = (e.detach().float().requires_grad_() for e in embeddings(n, width))
    further, every = embeddings(38, width, seed=1)[0].detach().float().requires_grad_(), torch.arange(38)
    classes = n // 4 if "positives" in options else 2
    columns = Columns(further, every * 5, every + n, every % 2 == 0)
    excluded = torch.stack([torch.arange(n), torch.arange(n).roll(3)], 1)
    for negatives in (None, columns) if classes > 2 or duplicates != "positive" else (None,):
        with LargestTensor() as seen:
            objective = build_objective("clip", duplicates=duplicates, **options)
            keys: dict[str, Any] = {"x_keys": torch.arange(n) % classes, "y_keys": torch.arange(n)}
            if negatives and duplicates != "positive":
                keys["x_negatives"] = XNegatives(further[:19], every[:19], every[:19])
            objective(x, y, negatives=negatives, excluded=excluded, **keys).loss.backward()
        assert seen.elements <= (2 if duplicates != "positive" else 8) * n * width  # n² is 32 · n · width


def test_too_many_positives_to_list_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MOST_PAIRS", 4)
    x, y = embeddings()
    with raises(ConfigError, "positives=each"):
        build("clip", duplicates="positive", positives="merge")(x, y, x_keys=torch.zeros(9, dtype=torch.int64))


REFUSED_INPUTS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[object, ...]]] = [
    ("clip", {}, {"importance": torch.zeros(9)}, ("clip", "importance")),
    ("clip", {}, {"lengths": torch.zeros(9)}, ("clip", "lengths")),
    ("simclr", {}, {"negatives": torch.zeros(9, 1, 5)}, ("simclr", "negatives")),
    ("simclr", {}, {"positives": torch.zeros(9, 2)}, ("simclr", "positives")),
    ("clip", {"duplicates": "mask"}, {}, ("duplicates=mask", "x_keys", "y_keys")),
    ("clip", {"positives": "single"}, {"positives": torch.tensor([[0, 0], [0, 1]])}, ("positives=single", "each")),
    ("one_sided_dpm", {"importance": "log_q"}, {}, ("importance=log_q", "importance=(m,)", "importance_file")),
    ("one_sided_dpm", {"importance": "zeta"}, {"importance": torch.zeros(8)}, ("(8,)", 9)),
    ("one_sided_dpm", {}, {"importance": torch.zeros(9)}, ("importance=none", "log_q", "zeta")),
    (
        "one_sided_dpm",
        {"importance": "zeta"},
        {"importance": torch.zeros(9), "negatives": torch.zeros(9, 1, 5)},
        ("importance=zeta",),
    ),
    ("clip", {"duplicates": "mask"}, {"x_keys": X_KEYS[:8]}, (8, 9)),
    (
        "clip",
        {"duplicates": "mask"},
        {"y_keys": Y_KEYS, "negatives": torch.ones(9, 1, 5)},
        ("keys_k",),
    ),
    (
        "siglip",
        {"duplicates": "mask"},
        {"y_keys": Y_KEYS, "negatives": Columns(torch.ones(2, 5), torch.arange(2), torch.arange(1))},
        ("negatives.keys_k", "(2,)", "(1,)"),
    ),
    (
        "clip",
        {},
        {"negatives": Columns(torch.ones(1, 5), torch.tensor([9]), positive_k=torch.tensor([True]))},
        ("negatives.row_k", 9),
    ),
    ("clip", {}, {"negatives": torch.ones(9, 5)}, ("negatives", "(9, 5)")),
    ("clip", {}, {"negatives": torch.ones(9, 1, 4)}, (5, "(9, 4)")),
    (
        "clip",
        {},
        {"known_positives": KnownPositives(torch.tensor([9]), torch.tensor([1])), "y_keys": Y_KEYS},
        ("known_positives", 9),
    ),
    (
        "sogclr",
        {"num_samples": 9, "gamma": 1.0},
        {"sample_ids_b": torch.ones(9)},
        ("sample_ids", "float32"),
    ),
    (
        "one_sided_dpm",
        {"importance": "log_q"},
        {"importance": torch.full((9,), -math.inf)},
        ("importance", "-inf"),
    ),
]


WRONG_PAIRS: dict[str, tuple[Any, str]] = {
    "a column before the first": ([[0, -1], [1, 1]], "column -1"),
    "a column after the last": ([[0, 9]], "column 9"),
    "a row before the first": ([[-1, 0]], "row -1"),
    "a row after the last": ([[9, 0]], "row 9"),
    "a mask": (torch.eye(9, dtype=torch.bool), "bool (9, 9)"),
    "no whole numbers": (torch.ones(3, 2), "float32 (3, 2)"),
    "three numbers": (torch.ones(4, 3, dtype=torch.int64), "int64 (4, 3)"),
}


@pytest.mark.parametrize("kind", ["positives", "excluded"])
@pytest.mark.parametrize("name", ["clip", "coce", "nce", "binary_nce", "local_nce", "siglip"])
def test_pairs_that_are_none_are_refused(name: str, kind: str) -> None:
    objective = build_objective(name)
    for pairs, named in WRONG_PAIRS.values():
        with raises(ValueError, kind, named):
            objective(*embeddings(), **{kind: torch.as_tensor(pairs)})


@pytest.mark.parametrize("name", ["clip", "coce", "siglip", "sogclr"])
def test_whole_numbers_of_any_kind_are_taken(name: str) -> None:
    options = {"num_samples": 20, "gamma": 0.8} if name == "sogclr" else {}
    given: dict[str, Any] = {"sample_ids_b": np.arange(9), "x_keys": X_KEYS.int(), "y_keys": Y_KEYS.tolist()}
    if name != "sogclr":
        given |= {"positives": [[i, i] for i in range(9)], "excluded": np.array([[0, 3], [4, 2]], dtype=np.int32)}
    usual = {k: torch.as_tensor(v).long() for k, v in given.items()}
    build_mask = partial(build_objective, name, duplicates="mask", **options)
    assert build_mask()(*embeddings(), **given).loss == build_mask()(*embeddings(), **usual).loss


def test_a_list_of_one_positive_for_each_row_is_single() -> None:
    x, y = embeddings()
    listed = torch.stack([torch.arange(9), torch.arange(9).roll(4)], 1)
    close(build("clip", positives="single")(x, y, positives=listed).loss, build("clip")(x, y.roll(4, 0)).loss, 1e-9)


@pytest.mark.parametrize("name", ALONE)
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    """The spectral family and sampled binary NCE are plain products, which autograd differentiates again."""
    for options in ({}, {"negatives_per_positive": 2}) if name == "binary_nce" else ({},):
        objective, x, y = some_call(name, pairs=4, **options)
        if name in ("spectral", "pca_penalty", "vicreg", "nll") or options:
            assert torch.autograd.gradgradcheck(lambda x, y, o=objective: o(x, y).loss, (x, y))
        elif name != "spectral_alternating":
            with raises(RuntimeError, "create_graph=True"):
                torch.autograd.grad(objective(x, y, torch.arange(4)).loss, x, create_graph=True)


@pytest.mark.parametrize("name", ALONE)
def test_inference_mode_gives_the_value_and_leaves_nothing(name: str) -> None:
    """As a validation before the training does it."""
    for options in ({}, {"nu": "sgd"}, {"nu": "state", "num_samples": 8}) if name == "coce" else ({},):
        objective, x, y = some_call(name, 8, **options)
        with torch.inference_mode():
            before = objective(x.clone(), y.clone(), torch.arange(8))
        assert not before.loss.requires_grad
        after = objective(x, y, torch.arange(8))
        close(after.loss.detach(), before.loss)
        after.loss.backward()
        assert x.grad is not None and x.grad.isfinite().all()
        again = objective(x, y, torch.arange(8))
        again.loss.backward()


@pytest.mark.parametrize("name", ALONE)
def test_pickling_keeps_an_objective(name: str) -> None:
    for options in ({}, {"importance": "zeta"}) if name == "one_sided_dpm" else ({},):
        objective, x, y = some_call(name, 8, **options)
        given = {"importance": torch.zeros(8)} if options else {}
        objective(x, y, torch.arange(8), **given)
        copied = pickle.loads(pickle.dumps(objective))
        close(copied(x, y, torch.arange(8), **given).loss, objective(x, y, torch.arange(8), **given).loss)


def some_call(name: str, pairs: int = 8, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """An objective in float64 and embeddings for it."""
    known = {f.name for f in fields(OBJECTIVES[name])}
    needed = {key: value for key, value in {"num_samples": 8, "gamma_epochs": 8, "width": 5}.items() if key in known}
    shape = (pairs, *{"cpc": (4, 5), "partial_auc": (1,)}.get(name, (5,)))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    return build_objective(name, **{**needed, **options}).double(), x, y


@pytest.mark.parametrize(("name", "options", "given", "named"), REFUSED_INPUTS, ids=lambda v: str(v)[:40])
def test_refused_inputs(name: str, options: dict[str, Any], given: dict[str, Any], named: tuple[object, ...]) -> None:
    with raises((ValueError, ConfigError), *named) as caught:
        build_objective(name, **options).double()(*embeddings(), **given)
    assert len(str(caught.value).splitlines()) == 1


def test_embeddings_of_two_types_are_refused() -> None:
    x, y = embeddings()
    with raises(ValueError, "float32", "float64"):
        build_objective("clip")(x.float(), y)


NOT_FINITE = [("siglip", "init_bias"), ("coce", "margin"), ("isogclr", "tau_lr"), ("coce", "rho")]


@pytest.mark.parametrize(("name", "option"), NOT_FINITE)
def test_options_that_are_no_numbers_are_refused(name: str, option: str) -> None:
    for value in (math.nan, math.inf):
        with raises(ConfigError, f"objective.{option}={value}"):
            build_objective(name, **{option: value, "learnable": False})


def test_keys_are_of_pairs() -> None:
    x, y = embeddings(5)[0], embeddings(9)[1]
    listed = torch.tensor([[i, 2 * i % 9] for i in range(5)])
    with raises(ValueError):
        build("clip", duplicates="mask")(x, y, positives=listed, x_keys=X_KEYS[:5])


BAD_FILES: dict[str, tuple[np.ndarray, str]] = {
    "two numbers each": (np.zeros((50, 2)), "(50, 2)"),
    "whole numbers": (np.zeros(50, dtype=np.int64), "int64"),
    "too few": (np.zeros(5), "sample id 5"),
    "not finite": (np.full(50, np.nan), "sample id 0"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_damaged_importance_file_is_told(what: str, tmp_path: Path) -> None:
    values, named = BAD_FILES[what]
    np.save(tmp_path / "q.npy", values)
    with raises(DataError, "q.npy", named):
        objective = build("one_sided_dpm", importance="log_q", importance_file=str(tmp_path / "q.npy"))
        objective(*embeddings(), sample_ids_b=torch.arange(9))


def test_an_importance_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "q.npy").write_bytes(b"no array")
    for name in ("q.npy", "absent.npy"):
        with raises(DataError, name):
            build("one_sided_dpm", importance="log_q", importance_file=str(tmp_path / name))
    np.save(tmp_path / "q.npy", np.zeros(50))
    with raises(ConfigError, "sample_ids"):
        build("one_sided_dpm", importance="log_q", importance_file=str(tmp_path / "q.npy"))(*embeddings())


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Each choice of each option, and some numbers."""
    yield from [{}, *({"negatives_per_positive": r} for r in (1, 3, 4) if name == "binary_nce")]
    for option in fields(OBJECTIVES[name]):
        if isinstance(option.default, Enum):
            yield from ({option.name: choice.value} for choice in type(option.default))
    yield from (
        {"nu": "state", "duplicates": "positive", "pair_loss": loss.value} for loss in PairLoss if name == "coce"
    )


@pytest.mark.parametrize("name", [name for name, options in OBJECTIVES.items() if options.inputs == "pairs"])
def test_what_a_step_of_a_run_would_refuse_is_refused_before_the_run(name: str) -> None:
    batches = [ExpectedBatch(4), ExpectedBatch(1)]
    if "negatives" in OBJECTIVES[name].takes:
        batches += [ExpectedBatch(4, further=True), ExpectedBatch(4, further=True, several=True)]
        batches += [ExpectedBatch(1, further=True), ExpectedBatch(4, further_x=True)]
    for options in variants(name):
        with suppress(ConfigError):
            configured, objective = configure(name, **options), counted(name, options)
            for batch in batches:
                told, alone = any(configured.broken_by(batch)), batch == ExpectedBatch(1) and not configured.draws
                assert told == (objective is None or alone or refuses(objective, batch)), (options, batch)


def counted(name: str, options: dict[str, Any]) -> Any:
    """The objective of a run of 8 samples; None if it is refused."""
    counts = {key: 8 for key in ("num_samples", "samples_per_epoch", "gamma_epochs") if hasattr(OBJECTIVES[name], key)}
    with suppress(ConfigError):
        return build_objective(name, **counts, **options)


def refuses(objective: Any, batch: ExpectedBatch) -> bool:
    """Whether the objective refuses the batch, or learns nothing from it: has no gradient."""
    x, y = (torch.randn(batch.pairs, 4).mul(0.1).requires_grad_() for _ in "xy")
    keys = torch.arange(batch.pairs)
    right = torch.tensor([batch.several, False])
    columns = Columns(torch.randn(2, 4), torch.zeros(2, dtype=torch.long), torch.tensor([90, 91]), right)
    try:
        given: dict[str, Any] = {"negatives": columns} if batch.further else {}
        if objective.options.draws and not batch.further:  # as a run does
            given = {"negatives": replace(columns, importance_k=torch.zeros(2)), "importance": torch.zeros(batch.pairs)}
        wrong = XNegatives(torch.randn(2, 4), torch.zeros(2).long(), keys[:2]) if batch.further_x else None
        loss = objective(x, y, keys, x_keys=keys, y_keys=keys, x_negatives=wrong, **given).loss
    except ConfigError:
        return True
    return not any(d.any() for d in torch.autograd.grad(loss, [x, y], allow_unused=True) if d is not None)

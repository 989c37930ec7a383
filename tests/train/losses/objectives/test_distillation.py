"""Distillation of a teacher's scores of a row's own list, against a loop over rows in float64."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.reference import close_with_gradients
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.options.common import ExpectedBatch
from dyad.train.losses.options.registry import configure

NAMES = ("distill_kl", "margin_mse")
ROWS = torch.tensor([0, 0, 0, 1, 4, 4])  # rows 2 and 3 have no further columns
B, D, K = 5, 4, len(ROWS)
LISTS = ExpectedBatch(B, further=True, inputs="scored lists")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(numbers(n, D, seed=n + i).requires_grad_() for i, n in enumerate((B, B, K)))  # pyright: ignore[reportReturnType]


TEACHER, OF_FURTHER = 3 * numbers(B, seed=7), 3 * numbers(K, seed=8)


def loss_of(name: str, x: Tensor, y: Tensor, further: Tensor, **options: Any) -> Tensor:
    columns = Columns(further, ROWS, teacher_k=OF_FURTHER)
    return build_objective(name, **options).double()(x, y, negatives=columns, teacher=TEACHER).loss


def by_rows(name: str, x: Tensor, y: Tensor, further: Tensor, tau: float, teacher_tau: float) -> Tensor:
    terms = []
    for i in range(B):
        own = [k for k in range(K) if ROWS[k] == i]
        s = torch.stack([x[i] @ y[i], *(x[i] @ further[k] for k in own)]) / tau
        t = torch.stack([TEACHER[i], *(OF_FURTHER[k] for k in own)]) / teacher_tau
        if name == "distill_kl":
            terms.append(torch.nn.functional.kl_div(s.log_softmax(0), t.softmax(0), reduction="sum"))
        else:
            terms.append(((s[0] - s[1:]) - (t[0] - t[1:])).square().sum() / max(len(own), 1))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tau", "teacher_tau"), [(1.0, 1.0), (0.25, 4.0)])
def test_loss_and_gradients_are_those_of_each_row_alone(name: str, tau: float, teacher_tau: float) -> None:
    inputs = leaves()
    found = loss_of(name, *inputs, temperature=tau, teacher_temperature=teacher_tau)
    wanted = by_rows(name, *inputs, tau, teacher_tau)
    close_with_gradients(found, wanted, inputs, rtol=1e-7, atol=1e-9)  # the temperature itself is a float32


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    assert torch.autograd.gradcheck(lambda *e: loss_of(name, *e), leaves())


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_agrees_leaves_nothing_to_learn(name: str) -> None:
    """Teacher and student may differ by a number for each row."""
    x, y, further = leaves()
    shift = numbers(B, seed=9)
    own, others = (x * y).sum(1) + shift, (x[ROWS] * further).sum(1) + shift[ROWS]
    result = build_objective(name).double()(
        x, y, negatives=Columns(further, ROWS, teacher_k=others.detach()), teacher=own.detach()
    )
    assert abs(float(result.loss.detach())) < 1e-12 and float(result.metrics["teacher_top1"]) == 1
    assert all(float(g.abs().max()) < 1e-6 for g in torch.autograd.grad(result.loss, (x, y, further)))


@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_kl_is_stable_for_equal_and_for_extreme_scores(size: float) -> None:
    x, y, further = (e.detach().float().mul(size).requires_grad_() for e in leaves())
    columns = Columns(further, ROWS, teacher_k=size * OF_FURTHER)
    loss = build_objective("distill_kl")(x, y, negatives=columns, teacher=size * TEACHER).loss
    assert loss.isfinite() and float(loss.detach()) > -1e-6
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, y, further)))


def test_the_best_of_a_list_is_compared() -> None:
    x, y = torch.ones(4, 1), torch.tensor([[2.0], [2.0], [1.0], [1.0]])
    further = torch.tensor([[1.0], [3.0], [0.0], [5.0]])  # of the rows 0, 1, 2, 2
    teacher, of_further = torch.tensor([2.0, 2.0, 0.0, 9.0]), torch.tensor([1.0, 1.0, 1.0, 3.0])
    columns = Columns(further, torch.tensor([0, 1, 2, 2]), teacher_k=of_further)
    metrics = build_objective("distill_kl")(x, y, negatives=columns, teacher=teacher).metrics
    assert float(metrics["teacher_top1"]) == 0.75  # all but row 1, of which the score likes the negative best


@pytest.mark.parametrize("name", NAMES)
def test_the_softmax_loss_of_the_same_batch_is_added_with_its_weight(name: str) -> None:
    x, y, further = leaves()
    softmax = build_objective("dpr").double()(x, y, negatives=Columns(further, ROWS)).loss
    both = loss_of(name, x, y, further, contrastive=0.5)
    torch.testing.assert_close(both, loss_of(name, x, y, further) + 0.5 * softmax)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name: str) -> None:
    x, y, further = leaves()
    columns, objective = Columns(further, ROWS, teacher_k=OF_FURTHER), build_objective(name).double()
    untaught = replace(columns, teacher_k=None)
    for given in ({}, {"negatives": columns}, {"negatives": untaught, "teacher": TEACHER}, {"teacher": TEACHER}):
        with raises(ConfigError, name, "teacher=(b,)", "data.teacher"):
            objective(x, y, **given)
    with raises(ValueError, "(5,)", "(4,)"):
        objective(x, y, negatives=columns, teacher=TEACHER[:4])
    with raises(ValueError, "teacher_k", "(6,)", "(5,)"):
        objective(x, y, negatives=replace(columns, teacher_k=OF_FURTHER[:5]), teacher=TEACHER)
    with raises(ValueError, "dpr", "teacher"):
        build_objective("dpr").double()(x, y, negatives=columns, teacher=TEACHER)


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_are_not_finite_are_refused(name: str) -> None:
    x, y, further = leaves()
    wrong = torch.full_like(OF_FURTHER, torch.nan)
    with raises(ValueError, "negatives.teacher_k", "nan"):
        build_objective(name)(x, y, negatives=Columns(further, ROWS, teacher_k=wrong), teacher=TEACHER)
    with raises(ValueError, "teacher must", "inf"):
        build_objective(name)(x, y, negatives=Columns(further, ROWS, teacher_k=OF_FURTHER), teacher=TEACHER / 0)


def test_a_run_is_refused_before_it_begins() -> None:
    options = configure("distill_kl")
    assert not [*options.broken_by(LISTS)]
    with raises(ConfigError, "distill_kl", "data.negatives.per_row"):
        for message in options.broken_by(replace(LISTS, further=False, inputs="scored pairs")):
            raise ConfigError(message)
    with raises(ConfigError, "distill_kl", "data.teacher=FIELD"):
        for message in options.broken_by(replace(LISTS, inputs="pairs")):
            raise ConfigError(message)
    with raises(ConfigError, "dpr", "distill_kl", "data.teacher=null"):
        for message in configure("dpr").broken_by(LISTS):
            raise ConfigError(message)
    with raises(ConfigError, "objective.learnable=true", "margin"):
        configure("margin_mse", learnable=True)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_inference_and_pickling(name: str) -> None:
    x, y, further = leaves()
    assert torch.autograd.gradgradcheck(lambda *e: loss_of(name, *e), (x, y, further))
    columns, objective = Columns(further, ROWS, teacher_k=OF_FURTHER), build_objective(name, temperature=0.5)
    copied = pickle.loads(pickle.dumps(objective))
    with torch.inference_mode():
        found = copied(x, y, negatives=columns, teacher=TEACHER).loss
    torch.testing.assert_close(found, objective(x, y, negatives=columns, teacher=TEACHER).loss.detach())

"""COCE over a row's own labelled negatives, candidates=list, against plain loops (tests/helpers/robust.py)."""

from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.reference import LargestTensor, reference_loss
from helpers.robust import reference_coce
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.sums import tiles

B, D, TEMPERATURE = 6, 5, 0.25  # a power of two: its logarithm is kept in float32


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)


def numbers(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=generator, dtype=torch.float64).requires_grad_()


def build(**options: Any) -> Any:
    return build_objective("coce", **{"temperature": TEMPERATURE, "margin": 0.4, "alpha": 0.3, **options}).double()


@pytest.mark.parametrize("setting", ["supervised", "semi"])
@pytest.mark.parametrize("pair_loss", ["identity", "hinge", "squared_hinge", "logistic"])
@pytest.mark.parametrize("divergence", ["kl", "chi2", "cvar"])
def test_the_sum_runs_over_the_rows_own_labelled_negatives(divergence: str, pair_loss: str, setting: str) -> None:
    """Row 1 has no negatives, row 4 two positives."""
    x, y, further = numbers(B, 0), numbers(B, 1), numbers(7, 2)
    row, relevant = torch.tensor([0, 0, 2, 3, 4, 4, 5]), torch.tensor([False, False, False, False, True, False, False])
    lists = [[i, *(B + j for j in range(7) if row[j] == i)] for i in range(B)]
    own = [[i, *(B + j for j in range(7) if row[j] == i and relevant[j])] for i in range(B)]
    chosen = [[j for j in lists[i] if setting == "semi" or j not in own[i]] for i in range(B)]
    kind: dict[str, Any] = dict(divergence=divergence, pair_loss=pair_loss)
    objective = build(setting=setting, candidates="list", **kind)
    tau = torch.exp(-objective.logit_scale.detach())
    want = reference_coce(x, torch.cat([y, further]), tau, chosen, own, **kind)
    columns = Columns(further, row, positive_k=relevant)
    loss = objective(x, y, negatives=columns).loss
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(each, (x, y, further)) for each in (loss, want))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert abs(loss - build(setting="self", **kind)(x, y, negatives=columns).loss) > 1e-3


def test_finite_differences() -> None:
    objective, further = build(setting="supervised", candidates="list", divergence="chi2"), numbers(B, 2)

    def loss(x: Tensor, y: Tensor, further: Tensor) -> Tensor:
        return objective(x, y, negatives=further[:, None]).loss

    assert torch.autograd.gradcheck(loss, (numbers(B, 0), numbers(B, 1), further), atol=1e-6)


def test_lists_take_memory_linear_in_the_batch() -> None:
    """No list of pairs of a row and the columns of others is made: it would have b · M pairs."""
    x, y, further = numbers(64, 0), numbers(64, 1), numbers(64, 2)
    with LargestTensor() as largest:
        objective = build(setting="supervised", candidates="list", pair_loss="logistic")
        objective(x, y, negatives=further[:, None]).loss.backward()
    assert largest.elements < 64 * 64


@pytest.mark.parametrize(
    ("name", "options"),
    [("clip", {}), ("siglip", {}), ("coce", {"directions": "mean"}), ("sogclr", {"num_samples": 64, "gamma": 0.8})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_x_take_memory_linear_in_the_batch(name: str, options: dict[str, Any]) -> None:
    x, y, further, wrong = numbers(64, 0), numbers(64, 1), numbers(64, 2), numbers(128, 3)
    given: dict[str, Any] = {"negatives": Columns(further, torch.arange(64))}
    given["x_negatives"] = XNegatives(wrong, torch.arange(128) % 64)
    with LargestTensor() as largest:
        build_objective(name, **options).double()(x, y, torch.arange(64), **given).loss.backward()
    assert largest.elements < 64 * 64 and wrong.grad is not None and wrong.grad.abs().sum() > 0


def test_a_columns_list_is_its_own_x_and_the_wrong_x_of_its_row() -> None:
    x, y, further, wrong = numbers(B, 0), numbers(B, 1), numbers(3, 2), numbers(4, 3)
    of_rows, of_columns = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 3])
    objective: Any = build_objective("clip", temperature=TEMPERATURE, candidates="list", partition="mean").double()
    rows, columns = [*range(B), *of_rows.tolist()], [*range(B), *of_columns.tolist()]
    others = [(i, j) for i, a in enumerate(rows) for j, c in enumerate(columns) if a != c]
    scale = objective.logit_scale.detach()
    want = reference_loss(x, y, scale, further=further, wrong=wrong, excluded=others, partition="mean")
    loss = objective(x, y, negatives=Columns(further, of_columns), x_negatives=XNegatives(wrong, of_rows)).loss
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(each, (x, y, further, wrong)) for each in (loss, want))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"directions": "sum"}, {"candidates": "negatives"}], ids=str)
def test_what_has_no_lists_is_refused(options: dict[str, Any]) -> None:
    (key, value) = next(iter(options.items()))
    with raises(ConfigError, f"objective.{key}={value}"):
        build(**{"setting": "supervised", "candidates": "list", **options})


@pytest.mark.parametrize("wrong", [-1, B])
@pytest.mark.parametrize("name", ["info_nce", "coce", "distill_kl"])
def test_a_negative_of_no_row_is_refused(name: str, wrong: int) -> None:
    options = {"distill_kl": {}, "info_nce": {"candidates": "list"}}.get(
        name, {"candidates": "list", "setting": "supervised"}
    )
    objective = build_objective(name, **options).double()
    teacher_k = torch.zeros(3) if name == "distill_kl" else None
    negatives = Columns(numbers(3, 2), torch.tensor([0, 1, wrong]), teacher_k=teacher_k)
    scores = {} if teacher_k is None else {"teacher": torch.ones(B)}
    with raises(ValueError, "negatives.row_k", wrong, B):
        objective(numbers(B, 0), numbers(B, 1), negatives=negatives, **scores)

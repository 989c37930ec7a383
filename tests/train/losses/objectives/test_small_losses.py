"""Where pairs are found already, float32 has all its digits: losses from 0.1 down to 2.5e-5 against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.reference import build, reference_loss, relative_error
from torch import Tensor

from dyad.train.losses.gathered.batch import Columns

B, D, TAU = 256, 64, 0.05
ITEMS = torch.arange(B)
EVEN = ITEMS % 2 == 0
OWN = torch.stack([ITEMS, ITEMS], 1)
NEXT = torch.stack([ITEMS, ITEMS.roll(1)], 1)
KEYS = {"x_keys": ITEMS, "y_keys": ITEMS}
TWINS = torch.cat([ITEMS[: B - 2], ITEMS[:2]])
DIRECTIONS = [{"directions": side} for side in "xy"]
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    *[(name, {}, {}) for name in ("clip", "symmetric_dpm", "one_sided_dpm", "info_nce", "dpr", "simclr", "cpc")],
    *[("symmetric_dpm", side, {}) for side in DIRECTIONS],
    ("cross_entropy", {"partition": "sum"}, {}),
    ("listwise_ce", {"partition": "sum"}, {"positives": NEXT}),
    ("one_sided_dpm", {"importance": "zeta"}, {"importance": torch.zeros(B)}),
    ("clip", {"duplicates": "mask"}, {**KEYS, "y_keys": TWINS}),
    *[("clip", {"duplicates": "positive", "positives": several}, KEYS) for several in ("each", "exclude", "merge")],
    *[("clip", {"positives": several}, {"positives": OWN}) for several in ("single", "each", "exclude", "merge")],
    *[("clip", {"positives": several}, {"excluded": NEXT}) for several in ("each", "merge")],
    ("epr", {}, {"negatives": "hard"}),
    ("clip", {"positives": "merge"}, {"negatives": "near"}),
    ("clip", {"positives": "exclude"}, {"negatives": "near"}),
]


def embeddings(noise: float, count: int = B, roll: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, y near to it, and other columns at no particular place."""
    generator = torch.Generator().manual_seed(0)
    x, off, other = (F.normalize(torch.randn(count, D, generator=generator), dim=1) for _ in range(3))
    return x, F.normalize(x + noise * off, dim=1).roll(-roll, 0), other


def found(case: Case, noise: float, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    name, options, given = case
    x, y, other = (e.to(dtype) for e in embeddings(noise, roll=1 if name == "listwise_ce" else 0))
    hard = Columns(other, ITEMS)
    near = Columns(torch.where(EVEN[:, None], y, other), ITEMS, positive_k=EVEN)
    given = {k: {"hard": hard, "near": near}[v] if k == "negatives" else v for k, v in given.items()}
    if name == "cpc":
        x, y, options = torch.stack([x, other], 1), torch.stack([other, y], 1), {"width": D}
    objective = build(name, **{"temperature": TAU, **options}).to(dtype)
    inputs = (x.requires_grad_(), y.requires_grad_())
    loss = objective(*inputs, **given).loss
    return loss.detach(), torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {[*case[2]]}")
def test_a_small_loss_has_its_digits(case: Case) -> None:
    """Value to 1e-5 and gradient to 5e-6; float64 itself is held against other readings in test_softmax.py."""
    seen = []
    for noise in (0.27, 0.5, 0.9, 1.7):
        (loss, gradients), (want, expected) = (found(case, noise, dtype) for dtype in (torch.float32, torch.float64))
        seen.append(float(want) / (TAU if "dpm" in case[0] else 1.0))
        assert abs(float(loss) - float(want)) <= 1e-5 * float(want), (noise, float(want))
        assert max(relative_error(g, w) for g, w in zip(gradients, expected, strict=True)) < 5e-6, (noise, float(want))
    assert seen[0] < 1e-4 and seen[-1] > 0.05, seen


@pytest.mark.parametrize("tau", [0.02, 0.05])
def test_a_small_loss_against_an_independent_reading(tau: float) -> None:
    for noise in (0.3, 0.7):
        x, y, _ = embeddings(noise, 40)
        loss = build("clip", temperature=tau).float()(x, y).loss
        want = reference_loss(x.double(), y.double(), torch.tensor(tau).log().neg().double())
        if want > 1e-12:
            assert relative_error(loss, want) < 1e-5


def test_a_batch_of_several_tiles_has_its_digits_too() -> None:
    x, y, _ = embeddings(0.3, 1100)
    loss = build("clip", temperature=TAU).float()(x, y).loss
    a = x.double() @ y.double().T / torch.tensor(TAU).double()
    want = (F.cross_entropy(a, torch.arange(1100)) + F.cross_entropy(a.T, torch.arange(1100))) / 2
    assert relative_error(loss, want) < 1e-5


def test_no_negatives_is_no_loss() -> None:
    x, y, _ = embeddings(0.3, 1)
    for name in ("clip", "dpr", "info_nce", "simclr"):
        loss = build(name, temperature=0.01).float()(x.requires_grad_(), y).loss
        assert loss == 0.0 and torch.autograd.grad(loss, x)[0].eq(0).all()

"""Diagnostics against known answers and plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from dyad.train.losses import diagnostics
from dyad.train.losses.diagnostics import diagnose, duplicates, saturation


def embeddings(n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def test_a_collapsed_side_and_two_opposite_points() -> None:
    x, _ = embeddings()
    assert diagnose(torch.ones(5, 3), torch.ones(5, 3), None, True)["uniformity_x"] == pytest.approx(0.0, abs=1e-6)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = diagnose(opposite, opposite, None, True)
    assert found["uniformity_x"] == pytest.approx(-8.0)
    assert found["alignment"] == 0.0 and found["accuracy_x"] == 1.0
    assert diagnose(x, -x, None, True)["alignment"] == pytest.approx(4.0)


def test_rows_that_no_loss_compares_have_no_accuracy() -> None:
    """As those of objective=cosent, where no other text of the batch is wrong."""
    found = diagnose(*embeddings(), torch.tensor(20.0), True, compared=False)
    assert found.keys() == {"alignment", "uniformity_x", "uniformity_y"}


@pytest.mark.parametrize("cosine", [True, False])
def test_equals_plain_loops(cosine: bool) -> None:
    x, y = embeddings()
    n, scale = len(x), torch.tensor(3.0, dtype=torch.float64)
    found = diagnose(x, y, scale, cosine)
    u, v = F.normalize(x, dim=1), F.normalize(y, dim=1)
    s = 3.0 * ((u @ v.T) if cosine else (x @ y.T))
    pairs = [math.exp(-2 * float((u[i] - u[j]).square().sum())) for i in range(n) for j in range(n) if i != j]
    assert found["uniformity_x"] == pytest.approx(math.log(sum(pairs) / len(pairs)))
    assert found["alignment"] == pytest.approx(sum(float((u[i] - v[i]).square().sum()) for i in range(n)) / n)
    effective, participation, log_z = [], [], []
    for j in range(n):
        weights = [math.exp(float(s[i, j])) for i in range(n) if i != j]
        shares = [w / sum(weights) for w in weights]
        effective.append(math.exp(-sum(p * math.log(p) for p in shares)))
        participation.append(1 / sum(p * p for p in shares))
        log_z.append(math.log(sum(math.exp(float(s[i, j])) for i in range(n)) / n))
    assert found["effective_negatives_y"] == pytest.approx(sum(effective) / n)
    assert (found["effective_negatives_min_y"], found["effective_negatives_max_y"]) == pytest.approx(
        (min(effective), max(effective))
    )
    assert found["participation_y"] == pytest.approx(sum(participation) / n)
    assert found["log_z_y"] == pytest.approx(sum(log_z) / n)
    assert found["accuracy_y"] == sum(float(s[:, j].argmax() == j) for j in range(n)) / n


def test_effective_negatives_lie_between_one_and_all() -> None:
    x, y = embeddings(9)
    flat = diagnose(x, y, torch.tensor(1e-9), True)
    assert flat["effective_negatives_x"] == pytest.approx(8.0)
    sharp = diagnose(x, y, torch.tensor(1e6), True)
    assert sharp["effective_negatives_x"] == pytest.approx(1.0)


def test_only_the_first_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "ROWS", 5)
    x, y = embeddings(12)
    assert diagnose(x, y, torch.tensor(2.0), True) == diagnose(x[:5], y[:5], torch.tensor(2.0), True)


def test_one_pair_has_no_negatives() -> None:
    x, y = embeddings(1)
    found = diagnose(x, y, torch.tensor(2.0), True)
    assert "log_z_x" not in found and all(map(math.isfinite, found.values()))


def test_a_bound_near_its_ceiling_is_flagged() -> None:
    assert saturation({"mi_bound": 5.5, "log_k": 5.55}) == {"mi_saturated": 1.0}
    assert saturation({"mi_bound": 3.0, "log_k": 5.55}) == {"mi_saturated": 0.0}
    assert saturation({"loss": 1.0}) == {}


def test_twins_in_a_batch_are_counted() -> None:
    keys = torch.tensor([7, 8, 7, -9, 7, 8, 1, 2])
    assert duplicates(keys, torch.arange(8)) == {"duplicates_x": 5 / 8, "duplicates_y": 0.0}

"""The schedules of γ of the estimators, against the published ones."""

import math

import pytest
import torch

from dyad.train.losses.options.registry import configure
from tests.train.losses.objectives.test_estimators import NAMES, STEPS, build, call, embeddings


@pytest.mark.parametrize("gamma", ["auto", None])  # null: what run folders from before gamma=auto have
def test_the_schedule_of_gamma(gamma: str | None) -> None:
    schedule = build("fastclip_v3", gamma=gamma, gamma_min=0.2, gamma_epochs=4).options.gamma_at
    assert [schedule(e) for e in (0, 1, 2, 4, 9)] == pytest.approx([1, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2, 0.2])
    assert build("sogclr", gamma=0.9, gamma_min=0.1, gamma_epochs=1).options.gamma_at(0) == pytest.approx(0.9)
    assert {build("sogclr", gamma=constant).options.gamma_at(7) for constant in (0.8, None)} == {0.8}
    objective = build("sogclr", gamma=gamma, gamma_min=0.2, gamma_epochs=2)
    gammas = [call(objective, *embeddings(s), STEPS[0])["gamma"].item() for s in range(5)]  # 6 of 9 samples each
    assert gammas == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    # an epoch of the run
    longer = build("sogclr", gamma=gamma, gamma_min=0.2, gamma_epochs=2, samples_per_epoch=18)
    gammas = [call(longer, *embeddings(s), STEPS[0])["gamma"].item() for s in range(7)]
    assert gammas == pytest.approx([1, 1, 1, 0.6, 0.6, 0.6, 0.2])


@pytest.mark.parametrize("epochs", [1, 3, 7, 8, 10, 30, 37, 200])
@pytest.mark.parametrize("name", NAMES)
def test_gamma_auto_is_the_published_schedule(name: str, epochs: int) -> None:
    options = build(name, gamma="auto", gamma_epochs=epochs).options
    assert configure(name).gamma == "auto"  # pyright: ignore[reportAttributeAccessIssue]
    least = min(1.0, 10 ** (math.log10(4.177) - 0.7265 * math.log10(epochs)))
    # the same as a learning rate of torch, one step an epoch
    stepped = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    published = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, T_max=epochs, eta_min=least)
    for epoch in range(epochs + 1):
        assert options.gamma_at(epoch) == pytest.approx(stepped.param_groups[0]["lr"], abs=1e-9)
        stepped.step()
        published.step()
    assert (options.gamma_at(0), options.gamma_at(1000)) == (1.0, pytest.approx(least, abs=1e-12))


def test_known_values_of_gamma_auto() -> None:
    # by hand, from min(1, 4.177 E^-0.7265)
    ends = {0.5: 1, 3: 1, 7: 1, 7.5: 0.966, 8: 0.922, 10: 0.784, 30: 0.353, 37: 0.303}
    found = {e: build("sogclr", gamma="auto", gamma_epochs=e).options for e in ends}
    assert {e: options.gamma_at(math.ceil(e)) for e, options in found.items()} == pytest.approx(ends, abs=5e-4)
    assert found[30].gamma_at(15) == pytest.approx((1 + ends[30]) / 2, abs=5e-4)
    assert found[7.5].gamma_at(3) == pytest.approx(0.966 + 0.034 * (1 + math.cos(0.4 * math.pi)) / 2, abs=5e-4)


def test_the_line_on_gamma() -> None:
    def line(**options: object) -> str:
        return build("sogclr", **options).options.describe_gamma()

    assert (
        line(gamma="auto", gamma_epochs=30)
        == "objective.gamma=auto: γ = 1 → 0.353 over 30 epochs (DRRho-CLIP's cosine)"
    )
    assert line(gamma="auto", gamma_epochs=4.25) == (
        "objective.gamma=auto: γ = 1 (DRRho-CLIP's cosine). In 4.2 epochs no gain over an objective of the batch is "
        "expected: it takes about 8"
    )
    assert "takes about 8" in line(gamma="auto", gamma_epochs=7.9)
    libauc = {"gamma_min": 0.2, "gamma_epochs": 15}
    assert line(gamma="auto", **libauc) == "objective.gamma=auto: γ = 1 → 0.2 over 15 epochs"
    assert line(gamma=0.9, **libauc) == "objective.gamma=0.9: γ = 0.9 → 0.2 over 15 epochs"
    assert line(gamma=0.7) == "objective.gamma=0.7: γ = 0.7"

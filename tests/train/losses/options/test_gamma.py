"""The schedules of γ of the estimators, against the published ones."""

import math

import pytest
import torch

from dyad.train.losses import OBJECTIVES
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


@pytest.mark.parametrize("epochs", [0.5, 3, 7, 7.5, 10, 30, 37, 200])
@pytest.mark.parametrize("name", NAMES)
def test_gamma_auto_is_the_published_schedule(name: str, epochs: float) -> None:
    options = build(name, gamma="auto", gamma_epochs=epochs).options
    assert OBJECTIVES[name](name=name).gamma == "auto"  # the default
    least = min(1.0, 10 ** (math.log10(4.177) - 0.7265 * math.log10(epochs)))
    # of the same schedule by torch: a cosine from 1 to `least`, with the epoch as step
    stepped = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    published = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, T_max=math.ceil(epochs), eta_min=least)
    for epoch in range(math.ceil(epochs)):
        if epochs == int(epochs):
            assert options.gamma_at(epoch) == pytest.approx(stepped.param_groups[0]["lr"], abs=1e-9)
        stepped.step()
        published.step()
    assert options.gamma_at(0) == 1.0
    assert [options.gamma_at(e) for e in (math.ceil(epochs), 1000)] == pytest.approx([least, least], abs=1e-12)
    assert ("below about 8" in options.describe_gamma()) == (epochs < 8)


def test_known_ends_of_gamma_auto() -> None:
    ends = {3: 1, 7: 1, 8: 0.922, 10: 0.784, 30: 0.353, 37: 0.303}  # by hand, from min(1, 4.177 E^-0.7265)
    found = {e: build("sogclr", gamma="auto", gamma_epochs=e).options.schedule[1] for e in ends}
    assert found == pytest.approx(ends, abs=5e-4)
    halfway = build("sogclr", gamma="auto", gamma_epochs=30).options.gamma_at(15)
    assert halfway == pytest.approx((1 + ends[30]) / 2, abs=5e-4)
    lines = {e: build("sogclr", gamma="auto", gamma_epochs=e).options.describe_gamma() for e in (4.25, 30)}
    assert lines[30] == (
        "objective.gamma=auto: γ = 1 → 0.353 along a cosine over 30 epochs, DRRho-CLIP's schedule for 30 epochs"
    )
    assert lines[4.25] == (
        "objective.gamma=auto: γ = 1, DRRho-CLIP's schedule for 4.25 epochs: no gain over an objective of the batch is "
        "expected below about 8"
    )
    assert build("sogclr", gamma=0.7).options.describe_gamma() == "objective.gamma=0.7: γ = 0.7"

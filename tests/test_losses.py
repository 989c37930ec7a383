"""train.losses as a stranger uses it: building, refusals, the temperature, a plain loop, any number of ranks."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train.losses
from data.errors import ConfigError
from train.losses import OBJECTIVES, build_objective
from train.losses.config import CONFIGS, configure

ROOT = Path(__file__).parent.parent


def test_temperature_is_clamped_after_the_step() -> None:
    objective = build_objective("clip", temperature=0.02, min_temperature=0.015)
    for pushed, expected in ((9.0, -math.log(0.015)), (-3.0, 0.0), (2.0, 2.0)):
        objective.logit_scale.data.fill_(pushed)
        objective.clamp_()
        assert float(objective.logit_scale.detach()) == pytest.approx(expected)
    fixed = build_objective("clip", temperature=5.0, learnable=False)
    fixed.clamp_()
    assert float(fixed.logit_scale.detach()) == pytest.approx(-math.log(5.0))
    assert not fixed.logit_scale.requires_grad
    objective.undo()


REFUSED = {
    "learnable=true.*no optimum": {"tau_scaled": True},
    "above 0": {"temperature": 0.0},
    "between objective.min_temperature=0.01 and 1": {"temperature": 3.0},
    "at most 1": {"min_temperature": 0.0},
    "'temperature'": {"temprature": 0.1},
    "no such option": {"gamma": 0.1},
    "objective.duplicates.*keep, mask, positive": {"duplicates": "msk"},
    "objective.temperature.*warm": {"temperature": "warm"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_objective("clip", **REFUSED[message])
    assert len(str(caught.value).splitlines()) == 1


def test_symmetric_dpm_does_not_learn_its_temperature() -> None:
    with pytest.raises(ConfigError, match="tau_scaled"):
        build_objective("symmetric_dpm", learnable=True)
    assert build_objective("symmetric_dpm", learnable=True, tau_scaled=False).logit_scale.requires_grad


def test_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'symmetric_dpm'"):
        build_objective("symetric_dpm")


def test_every_objective_has_a_configuration_and_the_reverse() -> None:
    assert set(OBJECTIVES) == set(CONFIGS)
    for name in OBJECTIVES:
        assert configure(name).name == name
    with pytest.raises(AttributeError, match="build_objectiv"):
        train.losses.build_objectiv  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_wrong_inputs_say_what_is_wrong() -> None:
    x, y = torch.randn(2, 9, 5)
    with pytest.raises(ValueError, match=r"\(9, 5\) and \(8, 5\)"):
        build_objective("clip")(x, y[:8])
    with pytest.raises(ConfigError, match=r"duplicates=mask.*x_keys or y_keys"):
        build_objective("clip", duplicates="mask")(x, y)
    with pytest.raises(ValueError, match="no pair"):
        build_objective("clip")(x[:0], y[:0])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_plain_loop_learns(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 12), torch.randn(32, 7)
    towers = torch.nn.ModuleList([torch.nn.Linear(12, 16), torch.nn.Linear(7, 16)])
    objective = build_objective(name)
    optimizer = torch.optim.AdamW([*towers.parameters(), *objective.parameters()], lr=0.03)
    losses = []
    for _ in range(30):
        loss = objective(towers[0](x), towers[1](y)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        objective.clamp_()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks(world_size: int) -> None:
    """tests/dist_losses.py says what is checked; each rank prints a line when all of it holds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    run = subprocess.run(
        [*command, str(ROOT / "tests/dist_losses.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("all checks hold") == world_size

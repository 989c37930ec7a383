"""timm's optimisers by name: their own steps, and exactly on from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.step import batch, towers, train_step
from timm.optim import list_optimizers  # pyright: ignore[reportPrivateImportUsage]
from timm.optim.lion import Lion
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.batch import Batch
from dyad.train.config import OptimConfig
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import capture, restore
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.step.optim import build_optimizer

OTHER_MACHINES = ("bnb", "fused")  # need CUDA and packages
REFUSED = ("adahessian", "kron", "kronc", "kronw")
NAMES = [name for name in map(str, list_optimizers()) if not name.startswith(OTHER_MACHINES) and name not in REFUSED]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_to_the_bit_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    optim = OptimConfig(name=name, lr=1e-3)

    def rows(seed: int) -> Batch:
        return batch(8, seed, torch.float32)

    straight = train_step(towers().float(), 8, optim=optim)
    for index in range(3):
        straight(rows(index), index)
    parts = {"towers": straight.towers, "objective": straight.objective}
    saved = write_checkpoint(tmp_path, capture(parts, straight.optimizer, 3, {}), keep=1)
    losses = [straight(rows(index), index)["loss"] for index in range(3, 6)]
    second = train_step(towers(seed=9).float(), 8, optim=optim)
    parts = {"towers": second.towers, "objective": second.objective}
    restore(Checkpoint(saved).read(), parts, second.optimizer)
    assert [second(rows(index), index)["loss"] for index in range(3, 6)] == losses
    for a, b in zip(second.towers.parameters(), straight.towers.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_is_that_of_timms_own_class() -> None:
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    options: dict[str, Any] = {"betas": [0.8, 0.9]}
    config = OptimConfig(name="lion", lr=0.01, weight_decay=0.3, options=options)
    groups = [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}]
    pair = build_optimizer(ours.named_parameters(), config), Lion(groups, lr=0.01, betas=(0.8, 0.9))
    for seed in range(3):
        for module, optimizer in zip((ours, theirs), pair, strict=True):
            torch.manual_seed(seed)
            for parameter in (module.weight, module.bias):
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


@pytest.mark.filterwarnings("ignore:It is highly recommended")  # Kron's, of a package that it likes
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (OptimConfig(name="lyon"), "'lion'"),
        (OptimConfig(name="kron"), "optim.name=kron"),
        (OptimConfig(name="lion", options={"momentun": 1}), "momentun"),
        (OptimConfig(name="adahessian"), "optim.name=adahessian"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(config: OptimConfig, named: str) -> None:
    trained = nn.Linear(3, 3)
    generator = torch.get_rng_state()
    with raises(ConfigError, named):
        build_optimizer(trained.named_parameters(), config)
    assert torch.equal(torch.get_rng_state(), generator)

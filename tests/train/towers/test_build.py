"""Width and unused parameters of a tower are learnt from a copy without memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dyad.train.towers.build import _probe
from dyad.train.towers.tower import Tower


class Spy(nn.Linear):
    """A linear trunk with an unused weight, which notes on which devices it ran; with `reads` it reads a value."""

    def __init__(self, reads: bool) -> None:
        super().__init__(3 * 4 * 4, 5)
        self.reads, self.unused, self.seen = reads, nn.Parameter(torch.zeros(2)), []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(input.device.type)
        return super().forward(input.flatten(1).float() + (input.sum().item() if self.reads else 0))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spy":
        made = Spy(self.reads)
        made.seen = self.seen
        for name, parameter in self.named_parameters():
            setattr(made, name, memo[id(parameter)])
        return made


@pytest.mark.parametrize(("reads", "devices"), [(False, ["meta"]), (True, ["meta", "cpu"])])
def test_shapes_are_settled_without_the_real_weights(reads: bool, devices: list[str]) -> None:
    trunk = Spy(reads)
    tower = Tower(trunk, nn.Linear(5, 7))
    assert _probe(tower, torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "problem") == 7
    assert trunk.seen == devices
    assert {name for name, p in tower.named_parameters() if not p.requires_grad} == {"trunk.unused"}

"""Width and unused parameters of a tower are learnt from a copy without memory."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from dyad.train.towers.build import _probe
from dyad.train.towers.tower import Tower


class Spy(nn.Module):
    """A trunk with an unused weight, which notes on which devices it runs; with `reads` it reads a value."""

    seen: ClassVar[list[str]] = []

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.linear, self.unused = reads, nn.Linear(3 * 4 * 4, 5), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.device.type)
        return self.linear(x.flatten(1).float() + (x.sum().item() if self.reads else 0))


@pytest.mark.parametrize(("reads", "devices"), [(False, ["meta"]), (True, ["meta", "cpu"])])
def test_shapes_are_settled_without_the_real_weights(reads: bool, devices: list[str]) -> None:
    Spy.seen.clear()
    tower = Tower(Spy(reads), nn.Linear(5, 7))
    assert _probe(tower, torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "problem") == 7
    assert Spy.seen == devices
    assert {name for name, p in tower.named_parameters() if not p.requires_grad} == {"trunk.unused"}

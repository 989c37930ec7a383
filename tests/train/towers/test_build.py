"""Width and unused parameters of a tower are learnt from a copy without memory."""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from helpers.messages import raises
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.towers.tower import Tower
from dyad.train.towers.trial import probe


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
    assert probe(tower, torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "problem") == 7
    assert Spy.seen == devices
    assert {name for name, p in tower.named_parameters() if not p.requires_grad} == {"trunk.unused"}


class Positions(nn.Module):
    """A trunk with tables of 30 words and of positions, which RoBERTa counts from behind its padding_idx."""

    def __init__(self, positions: int, padding_idx: int | None) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, 4), nn.Embedding(positions, 4, padding_idx=padding_idx)

    def forward(self, tokens: Tensor) -> Tensor:
        first = 0 if self.positions.padding_idx is None else self.positions.padding_idx + 1
        return (self.words(tokens) + self.positions(first + torch.arange(tokens.shape[1]).to(tokens.device))).mean(1)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_a_text_longer_than_the_positions_is_refused(padding_idx: int | None) -> None:
    positions = 20 if padding_idx is None else 22
    for length, fits in ((20, True), (21, False)):
        tower, tokens = Tower(Positions(positions, padding_idx), nn.Identity()), torch.ones(1, length).long()
        with nullcontext() if fits else raises(ConfigError, "problem"):
            assert probe(tower, tokens, "problem") == 4

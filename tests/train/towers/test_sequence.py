"""Contexts of sequences: they depend on the items up to their step alone, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.dist import in_ways, launch
from helpers.messages import raises
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.base.limits import check_limits
from dyad.data.config import DataConfig, ItemKind
from dyad.train.config import ModelConfig, RunConfig, Task, TrainConfig
from dyad.train.context_config import ContextConfig, ContextKind
from dyad.train.towers.build import build_model
from dyad.train.towers.sequence import ContextNetwork, HistoryEncoder, SequenceTower, positions
from dyad.train.towers.tower import Tower

KINDS = pytest.mark.parametrize("kind", [*ContextKind])
LENGTHS = (3, 1, 5)
PLACES = np.concatenate([np.arange(n) for n in LENGTHS])


def tower(kind: ContextKind, dropout: float = 0.0) -> SequenceTower:
    torch.manual_seed(0)
    context = ContextNetwork(ContextConfig(kind=kind, layers=2, heads=2, width=8, dropout=dropout, embed_dim=4), 6)
    return SequenceTower(Tower(nn.Embedding(10, 6), nn.Identity()), context).double()


def items(seed: int = 0) -> Tensor:
    return torch.randint(10, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


@in_ways
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.soak) for size in (2, 4))])
def test_steps_on_sequences_equal_dense_autograd(world_size: int, ways: str) -> None:
    launch("dist_sequence.py", world_size, ways)


@KINDS
def test_a_context_depends_on_the_items_up_to_its_step_alone(kind: ContextKind) -> None:
    of, given = tower(kind), items()
    whole = of(given, places=PLACES)
    assert whole.shape == (9, 4)
    for row, place in enumerate(PLACES.tolist()):
        alone = of(given[row - place : row + 1], places=np.arange(place + 1))
        torch.testing.assert_close(whole[row], alone[-1], rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(whole[2].sum(), [*of.trunk.parameters()])
    assert {*gradient.abs().sum(1).nonzero()[:, 0].tolist()} == {*given[:3].tolist()}


@KINDS
def test_items_alone_are_embedded_as_items(kind: ContextKind) -> None:
    of, given = tower(kind), items()
    assert torch.equal(of(given), of.trunk(given)) and of(given).shape == (9, 6)


@KINDS
def test_histories_give_the_context_of_their_last_item(kind: ContextKind) -> None:
    of, given = tower(kind).eval(), items()
    ends = np.cumsum(LENGTHS) - 1
    numbers = torch.full((3, 5), -1)
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        numbers[row, :length] = given[end - length + 1 : end + 1]
    got = HistoryEncoder(of, of.trunk(torch.arange(10)))(numbers)
    torch.testing.assert_close(got, of(given, places=PLACES)[ends], rtol=1e-10, atol=1e-12)


@KINDS
def test_contexts_are_float32_under_autocast(kind: ContextKind) -> None:
    of = tower(kind).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert of(items(), places=PLACES).dtype == torch.float32


def test_dropout_is_on_in_training_alone() -> None:
    of = tower(ContextKind.gru, dropout=0.5)
    assert not torch.equal(of(items(), places=PLACES), of(items(), places=PLACES))
    of.eval()
    assert torch.equal(of(items(), places=PLACES), of(items(), places=PLACES))


def test_positions_are_those_of_the_paper() -> None:
    got = positions(torch.zeros(2, 7, 5, dtype=torch.float64))
    for place in range(7):
        for i in range(5):
            angle = place / 10_000 ** ((i - i % 2) / 5)
            assert float(got[place, i]) == pytest.approx(np.cos(angle) if i % 2 else np.sin(angle), abs=1e-12)


def test_models_of_ids_and_of_frames() -> None:
    for kind, width in ((ItemKind.ids, None), (ItemKind.frames, 3)):
        model = ModelConfig(embed_dim=6, context=ContextConfig(embed_dim=width))
        config = TrainConfig(task=Task.sequence, model=model, data=DataConfig(items=kind), run=RunConfig(inputs=10))
        of = build_model(config).towers.x_tower
        given = torch.arange(4) if kind is ItemKind.ids else torch.randn(4, 10)
        assert of(given).shape == (4, 6) and of(given, places=np.arange(4)).shape == (4, width or 6)
    with raises(ConfigError, "model.embed_dim=null"):
        build_model(
            TrainConfig(task=Task.sequence, model=ModelConfig(embed_dim=None), data=config.data, run=config.run)
        )
    with raises(ConfigError, "model.context.width=10", "model.context.heads=4"):
        ContextConfig(kind=ContextKind.transformer, width=10)
    with raises(ConfigError, "model.context.width=6", "model.context.heads=4"):  # the width of an item
        ContextNetwork(ContextConfig(kind=ContextKind.transformer), 6)
    with raises(ConfigError, "model.context.heads=0"):
        check_limits(ContextConfig(kind=ContextKind.transformer, heads=0), "model.context.")

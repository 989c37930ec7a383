"""What a run is made of: rules that need a model or its data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.loading.order import Order
from dyad.train.cli.compose import compose_config
from dyad.train.run.components import TrainingData, _objective, batch_norms
from dyad.train.towers.tower import Tower, TwoTower

LABELLED = ["task=labelled", "model=small_cnn", "data.train=a.tar", "steps=1"]


def test_batch_norms_would_hide_what_is_rare() -> None:
    tower = Tower(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = compose_config([*LABELLED, "objective=partial_auc", "data.rare=a"])
    with pytest.raises(ConfigError, match=r"model\.batch_norm=global: with data\.rare .* Set model\.batch_norm=frozen"):
        batch_norms(config, TwoTower(tower, tower), 1)
    assert batch_norms(replace(config, data=replace(config.data, rare=None)), TwoTower(tower, tower), 1)


def test_uniform_noise_is_over_the_classes() -> None:
    config = compose_config([*LABELLED, "objective=nce", "objective.noise=uniform"])
    config.run.classes = ["a", "b", "c"]
    data = TrainingData(None, Order([100], [1.0], seed=0, global_batch_size=10), "", {})  # type: ignore[arg-type]
    assert _objective(config, data).options.num_samples == 3

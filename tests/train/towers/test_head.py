"""Projection heads: the layers of their papers, what is left out after training, and towers for two views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.dist import launch
from helpers.messages import raises
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, ItemKind
from dyad.train.cli.compose import compose_config
from dyad.train.config import BatchNorm, Head, ImageTowerConfig, ModelConfig, RunConfig, Task, TrainConfig
from dyad.train.config_rules import validate
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.build import build_model, share_towers
from dyad.train.towers.heads import ProjectionHead, build_head, representation
from dyad.train.towers.models import ImageModel, TwoTowerModel
from dyad.train.towers.tower import Tower, TwoTower

LINEAR, NORM, RELU = nn.Linear, nn.BatchNorm1d, nn.ReLU
# As in model_util.py of google-research/simclr, byol of deepmind-research, main_vicreg.py of facebookresearch/vicreg
PUBLISHED = {
    Head.linear: ([LINEAR, NORM], [48, 16]),
    Head.simclr: ([LINEAR, NORM, RELU, LINEAR, NORM], [48, 48, 16]),
    Head.simclr_v2: ([LINEAR, NORM, RELU, LINEAR, NORM, RELU, LINEAR, NORM], [48, 48, 48, 16]),
    Head.byol: ([LINEAR, NORM, RELU, LINEAR], [48, 4096, 16]),
    Head.vicreg: ([LINEAR, NORM, RELU, LINEAR, NORM, RELU, LINEAR], [48, 8192, 8192, 16]),
}


def images(head: Head = Head.none, **options: Any) -> TwoTowerModel:
    image = ImageTowerConfig(kind="cnn", image_size=16, widths=[8, 8])
    torch.manual_seed(0)
    model = ModelConfig(name=None, embed_dim=16, image=image, head=head, **options)
    return build_model(TrainConfig(task=Task.views, model=model))


@pytest.mark.parametrize("head", PUBLISHED)
def test_a_head_has_the_layers_of_its_paper(head: Head) -> None:
    kinds, widths = PUBLISHED[head]
    made = build_head(ModelConfig(head=head, embed_dim=16), 48)
    assert [type(layer) for layer in made] == kinds
    linear = [layer for layer in made if isinstance(layer, nn.Linear)]
    assert [linear[0].in_features, *(layer.out_features for layer in linear)] == widths
    assert all(layer.bias is None for layer in linear)
    last = made[-1]
    if isinstance(last, nn.BatchNorm1d):  # center=False
        assert not last.bias.requires_grad and not last.bias.any() and last.weight.requires_grad
    narrow = build_head(ModelConfig(head=head, embed_dim=16, head_width=8), 48)
    assert {layer.out_features for layer in narrow[:-2] if isinstance(layer, nn.Linear)} <= {8}


@pytest.mark.parametrize("head", Head)
def test_one_tower_takes_both_views_and_is_used_without_its_head(head: Head) -> None:
    model = images(head, head_width=8)
    tower = model.towers.x_tower
    assert isinstance(model, ImageModel) and tower is model.towers.y_tower and isinstance(tower, Tower)
    seen = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    assert tower(seen).shape == (4, 16)
    used = representation(model).towers
    assert used.x_tower is used.y_tower
    want = tower.features(seen) if isinstance(tower.projection, ProjectionHead) else tower.eval()(seen)
    assert torch.equal(used.x_tower.eval()(seen), want)
    assert isinstance(tower.projection, ProjectionHead) is (head is not Head.none)


def test_a_head_takes_the_mean_of_feature_maps() -> None:
    """Trunks of timm without pooling and of open_clip's ResNets give maps; their own projections would pool them."""
    tower = Tower(nn.Conv2d(3, 8, 3), build_head(ModelConfig(head=Head.byol, embed_dim=4, head_width=8), 8))
    model = TwoTowerModel(TwoTower(tower, tower), None)
    seen = torch.rand(4, 3, 6, 6)
    assert tower(seen).shape == (4, 4)
    want = tower.trunk(seen).mean((2, 3))
    assert torch.equal(representation(model).towers.x_tower(seen), want)


def test_texts_take_a_transformers_encoder() -> None:
    with raises(ConfigError, "model.text.kind=transformers", "model=encoder"):
        build_model(TrainConfig(task=Task.views, data=DataConfig(items=ItemKind.texts)))


def labelled(config: ModelConfig, *classes: str) -> TrainConfig:
    return TrainConfig(task=Task.labelled, model=config, run=RunConfig(classes=[*classes]))


def test_vectors_of_classes_are_of_training_alone() -> None:
    config = ModelConfig(name=None, embed_dim=16, image=ImageTowerConfig(kind="cnn", image_size=16, widths=[8, 8]))
    model = build_model(labelled(config, "a", "b", "c"))
    used = representation(model).towers
    assert used.y_tower is used.x_tower is model.towers.x_tower


def test_losses_share_neither_vectors_of_classes_nor_scores() -> None:
    """Two losses may have as many classes, and others; each rare class has a score of its own."""
    config = ModelConfig(name=None, embed_dim=16, image=ImageTowerConfig(kind="cnn", image_size=16, widths=[8, 8]))
    of_run, of_loss = (build_model(labelled(config, "a", "b")).towers for _ in range(2))
    share_towers(of_loss, of_run)
    assert of_loss.x_tower is of_run.x_tower and of_loss.y_tower is not of_run.y_tower
    of_run, of_loss = (build_model(labelled(config, "a")).towers for _ in range(2))
    share_towers(of_loss, of_run, whole=False)
    assert of_loss.x_tower.trunk is of_run.x_tower.trunk
    assert of_loss.x_tower.projection is not of_run.x_tower.projection


def test_a_trunk_with_other_batch_norms_is_not_that_of_the_run() -> None:
    """model.batch_norm changes no shape. That of a head is the loss's own."""

    def towers(choice: BatchNorm, projection: nn.Module) -> TwoTower:
        tower = Tower(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), projection)
        set_batch_norms(found := TwoTower(tower, tower).train(), choice)
        return found

    of_run, of_loss = towers(BatchNorm["global"], nn.Identity()), towers(BatchNorm.per_chunk, nn.Identity())
    with raises(ConfigError, "model.*"):
        share_towers(of_loss, of_run)
    with_head = towers(BatchNorm["global"], build_head(ModelConfig(head=Head.simclr, embed_dim=4), 4))
    share_towers(with_head, of_run)
    assert with_head.x_tower.trunk is of_run.x_tower.trunk


def test_a_head_needs_a_width() -> None:
    words = "task=views model=cnn data.train=x steps=1 objective=simclr model.embed_dim=null model.head=byol".split()
    with raises(ConfigError, "model.embed_dim"):
        validate(compose_config(words), 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_on_two_views_equal_dense_autograd_for_every_head(world_size: int) -> None:
    launch("dist_views.py", world_size)

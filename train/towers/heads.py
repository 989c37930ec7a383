"""Projection heads, which are used in training only: build the one that model.head names; remove it from a model."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

from torch import Tensor, nn

from dyad.train.config import Head, ModelConfig
from dyad.train.towers.models import TwoTowerModel
from dyad.train.towers.tower import Tower, TwoTower


class Representation(nn.Identity):
    """Averages feature maps (b, C, H, W) over H and W to (b, C), and returns features (b, C) unchanged."""

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return features.mean((2, 3)) if features.dim() == 4 else features


class ProjectionHead(nn.Sequential):
    """The projection of a tower, for training only: exports and `dyad.load` leave it out and give its input features.

    Inputs are features (b, C), or feature maps (b, C, H, W), which are averaged over H and W. Each choice of model.head
    is that of its paper's own code, with a batch norm and a ReLU after every hidden layer. The first three follow
    projection_head in model_util.py of github.com/google-research/simclr: hidden layers are as wide as the trunk, and
    the output has a batch norm without bias. The output of the last two has no batch norm.

    linear     Chen et al. 2020 (SimCLR), appendix: no hidden layer
    simclr     Chen et al. 2020 (SimCLR), num_proj_layers=2: one hidden layer
    simclr_v2  Chen et al. 2020 (Big Self-Supervised Models), num_proj_layers=3: two hidden layers
    byol       Grill et al. 2020, section 3.3 and appendix: one hidden layer of width 4096
    vicreg     Bardes et al. 2022, the expander: two hidden layers of width 8192 (its output too: model.embed_dim=8192)
    """

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(Representation()(features))


# number of linear layers; width of all but the last (None: that of the trunk); whether the output has a batch norm
HEADS: dict[Head, tuple[int, int | None, bool]] = {
    Head.linear: (1, None, True),
    Head.simclr: (2, None, True),
    Head.simclr_v2: (3, None, True),
    Head.byol: (2, 4096, False),
    Head.vicreg: (3, 8192, False),
}


def build_head(config: ModelConfig, width: int) -> ProjectionHead:
    """Build the projection head that model.head names, from `width` features of the trunk to model.embed_dim.

    model.head must not be none, and model.embed_dim not null. Weights are random. model.head_width, if set, replaces
    the published width of the hidden layers. No linear layer has a bias: before a batch norm it would have no effect,
    and the papers' output layers have none. The bias of a batch norm of the output is frozen at 0.
    """
    count, published, is_normed = HEADS[config.head]
    assert config.embed_dim is not None
    widths = [width, *[config.head_width or published or width] * (count - 1), config.embed_dim]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
    layers[-2].requires_grad_(False).weight.requires_grad_(True)  # the bias of the last norm stays 0
    return ProjectionHead(*layers[: -1 if is_normed else -2])


def representation(model: TwoTowerModel) -> TwoTowerModel:
    """Return the model as it is used after training, sharing the weights of `model`.

    A ProjectionHead is replaced by Representation, so that the tower gives the head's input features, (b, C). If the y
    tower holds vectors of classes, the x tower takes its place. Other towers stay. `model` itself does not change.
    """

    @cache
    def ended(tower: nn.Module) -> nn.Module:
        if not isinstance(tower, Tower) or not isinstance(tower.projection, ProjectionHead):
            return tower
        return Tower(tower.trunk, Representation(), prepare=tower.prepare)

    x, y = model.towers.x_tower, model.towers.y_tower
    y = x if type(y) is Tower and isinstance(y.trunk, nn.Embedding) else y
    return replace(model, towers=TwoTower(ended(x), ended(y)))

"""Projection heads of learning from views: what the loss compares, and no one needs after training.

Each is that of its paper's own code: layers without ReLU after the last, a batch norm after every hidden layer.

    linear     Chen et al. 2020 (SimCLR), appendix; github.com/google-research/simclr, model_util.py projection_head
    simclr     there, num_proj_layers=2: as wide as the trunk; the output too has a batch norm, which adds no bias
    simclr_v2  Chen et al. 2020 (Big Self-Supervised Models), num_proj_layers=3
    byol       Grill et al. 2020, section 3.3 and appendix: 4096, the output without batch norm
    vicreg     Bardes et al. 2022, the expander: three layers of 8192 (model.embed_dim=8192), as byol
"""

from itertools import pairwise

from torch import nn

from dyad.train.config import Head, ModelConfig


class ProjectionHead(nn.Sequential):
    """The projection of a tower that only training needs: exports and `dyad.load` give what comes before it."""


# Linear layers; width of all but the last, None: that of the trunk; whether the output has a batch norm
HEADS: dict[Head, tuple[int, int | None, bool]] = {
    Head.linear: (1, None, True),
    Head.simclr: (2, None, True),
    Head.simclr_v2: (3, None, True),
    Head.byol: (2, 4096, False),
    Head.vicreg: (3, 8192, False),
}


def build_head(config: ModelConfig, width: int) -> ProjectionHead:
    """Build the head model.head, from the `width` of the trunk to model.embed_dim. model.head_width replaces the hidden
    width. Biases before batch norms would have no effect, and the papers' outputs have none: no linear layer has one.
    """
    count, published, is_normed = HEADS[config.head]
    assert config.embed_dim is not None
    widths = [width, *[config.head_width or published or width] * (count - 1), config.embed_dim]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
    layers[-2].requires_grad_(False).weight.requires_grad_(True)  # the bias of the last norm stays 0
    return ProjectionHead(*layers[: -1 if is_normed else -2])

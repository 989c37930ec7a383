"""Patch dropout (FLIP, Li et al. 2023): each training step leaves out a share of each picture's patches."""

from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError

PLACES = ("patch_dropout", "patch_drop")  # the module that drops patches, in ViTs of open_clip and of timm


class PatchDropout(nn.Module):
    """Keeps the share 1 − `prob` of the patches of each picture in training, drawn on the device that they are on.

    open_clip's own draws on the CPU, for which a GPU waits. On a CPU both keep the same patches. prefix: how many
    tokens before the patches, such as a class token, always stay.
    """

    def __init__(self, prob: float, prefix: int) -> None:
        super().__init__()
        self.prob, self.prefix = prob, prefix

    def forward(self, x_bLW: Tensor) -> Tensor:
        """Drop patches from tokens (b, L, W), with L tokens of width W per picture."""
        if not self.training or self.prob == 0:
            return x_bLW
        first, patches = x_bLW.tensor_split([self.prefix], 1)
        count = max(1, int(patches.shape[1] * (1 - self.prob)))
        kept = torch.randn(patches.shape[:2], device=patches.device).topk(count).indices
        return torch.cat([first, patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))], 1)


def set_patch_dropout(trunk: Any, share: float | None) -> None:
    """Make a ViT of open_clip or timm leave out the `share` of the patches in training, in place.

    share: None: as the model's own configuration says. Raises ConfigError if the trunk cannot leave out patches.
    """
    vit = getattr(trunk, "trunk", trunk)  # open_clip's TimmModel
    place = next((name for name in PLACES if isinstance(getattr(vit, name, None), nn.Module)), None)
    if place is None and share:
        raise ConfigError(
            f"model.image.patch_dropout={share}: {type(vit).__name__} cannot leave out patches; the ViTs of open_clip "
            "and timm can. Leave it out"
        )
    if share is None and place == PLACES[0]:
        share = getattr(getattr(vit, place), "prob", None)
    if place and share is not None:
        setattr(vit, place, PatchDropout(share, getattr(vit, "num_prefix_tokens", 1)))

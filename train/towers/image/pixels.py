"""Modules of an image tower that normalise pixels on the device and leave out some patches in training."""

import torch
from torch import Tensor, nn

from dyad.data.image_text.transforms import ImageSpec
from dyad.train.towers.tower import precision_of

PART = 2**20  # elements that are normalised together on a CPU: so many stay in its cache


class NormalizePixels(nn.Module):
    """Converts uint8 pixels to ((pixel / 255) − mean) / std per channel, in the dtype in which the tower computes.

    The result has the dtype of autocast if that is on, else that of the buffers. Values are computed in the dtype of
    the buffers and rounded once, without a copy of the whole batch in that dtype. spec: gives mean and std.
    channels_last: whether a float32 result on a CPU is channels-last, outside of torch.compile; other results have the
    layout of the input.
    """

    mean: Tensor
    std: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, spec: ImageSpec, *, channels_last: bool = False) -> None:
        super().__init__()
        self.channels_last = channels_last
        mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (spec.mean, spec.std))
        numbers = {"mean": mean, "std": std, "scale": 1 / (255 * std), "shift": -mean / std}
        for name, tensor in numbers.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels (b, 3, S, S), S the side in pixels, to floats of the same shape."""
        dtype = precision_of(pixels.device) or self.mean.dtype
        if torch.compiler.is_compiling():  # the compiler fuses the operations to one kernel
            return self._normalized(pixels).to(dtype)
        last = self.channels_last and dtype == torch.float32 and pixels.device.type == "cpu"
        layout = torch.channels_last if last else torch.preserve_format
        result = torch.empty_like(pixels, dtype=dtype, memory_format=layout)
        if pixels.is_cuda:  # one kernel; on a CPU this would convert the whole batch first
            return torch.addcmul(self.shift, pixels, self.scale, out=result)
        rows = max(1, PART // max(1, pixels[:1].numel()))
        for part, into in zip(pixels.split(rows), result.split(rows), strict=True):
            into.copy_(self._normalized(part))
        return result

    def _normalized(self, pixels: Tensor) -> Tensor:
        return pixels.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)


class PatchDropout(nn.Module):
    """Keeps a random share 1 − `prob` of the patches of each image in train() mode, and all patches in eval() mode.

    At least one patch stays. This is FLIP (Li et al. 2023). Random numbers are drawn on the device of the patches;
    open_clip's own module draws on the CPU, for which a GPU waits. On a CPU both modules keep the same patches for the
    same seed. prefix: how many tokens before the patches, such as a class token, always stay.
    """

    def __init__(self, prob: float, prefix: int) -> None:
        super().__init__()
        self.prob, self.prefix = prob, prefix

    def forward(self, x_bLW: Tensor) -> Tensor:
        """Return the tokens that stay, (b, L', W) with L' ≤ L.

        x_bLW: L tokens of width W for each of b images. If patches are left out, the others are in random order.
        """
        if not self.training or self.prob == 0:
            return x_bLW
        first, patches = x_bLW.tensor_split([self.prefix], 1)
        count = max(1, int(patches.shape[1] * (1 - self.prob)))
        kept = torch.randn(patches.shape[:2], device=patches.device).topk(count).indices
        return torch.cat([first, patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))], 1)

"""Noise of training images: all augmentation after the crop and the resizing, from rotation to solarising.

The same code runs on CPUs in loader processes, and on a GPU on whole batches after they were copied there. The random
numbers stay on the host, so the host knows which images each change applies to, and never waits for the GPU.

Shape letters: b images of a batch; n images that are changed together; S side of an image in pixels.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations, product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from dyad.data.batch import Noise
from dyad.data.config import AugmentConfig
from dyad.data.image_text.transforms import CROP_DRAWS, between
from dyad.data.loading.sample_rng import Floats

Cropped = tuple[Tensor, np.ndarray]  # an image before noise, uint8 (3, S, S); its DRAWS random numbers in [0, 1)
RECOLOURS = [11, 10, 17, 19]  # indices of the draws that decide about colour jitter, grey, blur and solarise
HUE = 3  # index of the hue among the changes of a colour jitter: brightness, contrast, saturation, hue
ORDERS = list(permutations(range(4)))
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as PIL's "L"
# pixels that are changed together: their floats fit into a CPU's cache, and take at most 1 GB of a GPU's memory
BLOCK_PIXELS = {"cpu": 2**16, "cuda": 2**24}


def stacked(cropped: Iterable[Cropped], augment: AugmentConfig) -> tuple[Tensor, Noise]:
    """Stack b ≥ 1 images of one size: return uint8 (b, 3, S, S), and the noise that `augment` sets, still to be added.
    cropped: each image with its random numbers."""
    images, draws = zip(*cropped, strict=True)
    return torch.stack(images), Noise(partial(add_noise, augment), np.stack(draws)[:, CROP_DRAWS:])


def add_noise(augment: AugmentConfig, images: Tensor, draws: Floats) -> Tensor:
    """Return the images of a batch augmented as `augment` says, by all changes but the crop. They are rotated, zoomed,
    stretched, shifted and flipped on white. Then their colour channels are scaled (gain, brightness). Then they are
    colour-jittered, made grey, blurred and solarised. Returns `images` itself if `augment` sets none of these changes.

    augment: the largest size, the range or the probability of each change. images: uint8 (b, 3, S, S), on a CPU or a
    CUDA device. draws, float64 (b, NOISE_DRAWS): random numbers in [0, 1). The result of an image depends on its own
    draws only, to the last bit, not on the other images. Devices may round differently, by 1 of 255.
    """
    warps = augment.rotate or augment.aspect or augment.shift or tuple(augment.zoom) != (1, 1)
    colours = augment.brightness or tuple(augment.gain) != (1, 1)
    recolours = (any(augment.jitter) and augment.jitter_prob, augment.grey, augment.blur, augment.solarise)
    if not (warps or augment.flip or colours or any(recolours)):
        return images
    inverse, brightness = _inverse_maps(augment, draws), 1 + augment.brightness * between((-1, 1), draws[:, 9:10])
    maps, gains = (_sent(numbers, images) for numbers in (inverse, between(augment.gain, draws[:, 6:9]) * brightness))
    mirrored, chosen = draws[:, 5] < augment.flip, draws[:, RECOLOURS] < recolours
    result = torch.empty_like(images)
    block = max(1, BLOCK_PIXELS[images.device.type] // images.shape[-1] ** 2)
    for start in range(0, len(images), block):
        rows = slice(start, start + block)
        pixels, recoloured = images[rows].float(), chosen[rows].T
        if warps:
            pixels = _warped(pixels, maps[rows])
        else:  # sampling pixels would take twenty times as long
            pixels = _changed(pixels, mirrored[rows], lambda part, _: part.flip(-1))
        if colours:
            pixels.mul_(gains[rows, :, None, None])
            pixels = _changed(pixels, recoloured[0], lambda part, _: part.clamp_(0, 255))
        if recoloured.any():
            pixels = _recoloured(pixels, augment, draws[rows], recoloured)
        result[rows] = pixels.add_(0.5).clamp_(0, 255)
    return result


def _changed(pixels: Tensor, chosen: np.ndarray, change: Callable[[Tensor, np.ndarray], Tensor]) -> Tensor:
    """Change some of n images, float (n, 3, S, S): those `chosen`, bool (n,). Return all of them; may overwrite
    `pixels`.

    change(part, rows): returns the chosen images `part` changed. rows: their row numbers in `pixels`.
    """
    rows = np.flatnonzero(chosen)
    if len(rows) == len(pixels):
        return change(pixels, rows)
    if len(rows):
        places = torch.from_numpy(rows).to(pixels.device, non_blocking=True)
        pixels.index_copy_(0, places, change(pixels.index_select(0, places), rows))
    return pixels


def _sent(numbers: Floats, pixels: Tensor) -> Tensor:
    """Return the array `numbers` as a float32 tensor on the device of `pixels`."""
    return torch.from_numpy(numbers).float().to(pixels.device, non_blocking=True)


# Colours and blur -----------------------------------------------------------------------------------------------------


def _recoloured(pixels: Tensor, augment: AugmentConfig, draws: Floats, chosen: np.ndarray) -> Tensor:
    """Return images, float (n, 3, S, S) in 0..255, after colour jitter, grey, blur and solarise. May overwrite
    `pixels`.

    The order is that of Chen et al. 2020 (appendix A) and Grill et al. 2020 (appendix B). chosen, bool (4, n): which of
    these four changes each image gets. draws (n, NOISE_DRAWS): random numbers in [0, 1).
    """
    jitter, grey, blur, solarise = chosen
    pixels = _jittered(pixels, augment.jitter, draws, jitter)
    pixels = _changed(pixels, grey, lambda part, _: _luma(part).repeat(1, 3, 1, 1))
    pixels = _changed(pixels, blur, lambda part, rows: _blurred(part, between(augment.blur_sigma, draws[rows, 18])))
    return _changed(pixels, solarise, lambda part, _: torch.where(part < 128, part, 255 - part))


def _jittered(pixels: Tensor, strengths: list[float], draws: Floats, chosen: np.ndarray) -> Tensor:
    """Change brightness, contrast, saturation and hue of some images, as torchvision's ColorJitter does.

    The order of the four changes is drawn for each image. May overwrite `pixels`. pixels: float (n, 3, S, S) in 0..255.
    strengths: the largest relative change of brightness, contrast and saturation, and the largest shift of the hue as a
    share of the colour circle. draws (n, NOISE_DRAWS): random numbers in [0, 1). chosen, bool (n,): the images to
    change.
    """

    def change(kind: int, part: Tensor, rows: np.ndarray) -> Tensor:
        strength = strengths[kind]
        interval = (-strength, strength) if kind == HUE else (max(0.0, 1 - strength), 1 + strength)
        return CHANGES[kind](part, _sent(between(interval, draws[rows, 13 + kind]), part)[:, None, None, None])

    orders = np.array(ORDERS)[(24 * draws[:, 12]).astype(int)]
    for place, kind in product(range(4), (kind for kind in range(4) if strengths[kind])):
        pixels = _changed(pixels, chosen & (orders[:, place] == kind), partial(change, kind))
    return pixels


def _brightened(pixels: Tensor, factors: Tensor) -> Tensor:
    return (pixels * factors).clamp_(0, 255)


def _contrasted(pixels: Tensor, factors: Tensor) -> Tensor:
    grey = _luma(pixels).round_()  # a sum of whole numbers is exact in any order
    return _mixed(pixels, grey.sum((1, 2, 3), keepdim=True, dtype=torch.int64) / grey[0].numel(), factors)


def _saturated(pixels: Tensor, factors: Tensor) -> Tensor:
    return _mixed(pixels, _luma(pixels), factors)


def _mixed(pixels: Tensor, grey: Tensor, factors: Tensor) -> Tensor:
    return (pixels - grey).mul_(factors).add_(grey).clamp_(0, 255)


def _hue_shifted(pixels: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue of images, float (n, 3, S, S) in 0..255, by `shifts` (n, 1, 1, 1), shares of the colour circle.

    Combines the conversions from RGB to HSV and back. The hue runs from 0 (red) over 2 (green) and 4 (blue) to 6. A
    channel whose own hue (0, 2 or 4) is at distance d from the shifted hue of the pixel gets the value
    high - (high - low) · min(max(d - 1, 0), 1). high, low: the largest and smallest of the pixel's channel values.
    """
    high, low = pixels.amax(1, keepdim=True), pixels.amin(1, keepdim=True)
    spread, (red, green, blue) = high - low, pixels.split(1, 1)
    scale = 1 / spread.clamp_min(1e-6)  # the hue of a grey pixel has no effect
    hue = torch.where(green == high, (blue - red).mul_(scale).add_(2), (red - green).mul_(scale).add_(4))
    hue = torch.where(red == high, (green - blue).mul_(scale), hue).add_(6 * shifts).remainder_(6)
    distances = [3 - (hue - 3).abs_(), (hue - 2).abs_(), (hue - 4).abs_()]  # beyond 2 all are alike
    return high - torch.cat(distances, 1).sub_(1).clamp_(0, 1).mul_(spread)


CHANGES = (_brightened, _contrasted, _saturated, _hue_shifted)


def _luma(pixels: Tensor) -> Tensor:
    """Return the grey value of each pixel, float (n, 1, S, S), of images (n, 3, S, S)."""
    red, green, blue = (channel * weight for channel, weight in zip(pixels.split(1, 1), LUMA, strict=True))
    return red.add_(green).add_(blue)


def _blurred(pixels: Tensor, sigma: Floats) -> Tensor:
    """Blur images, float (n, 3, S, S), by Gaussians of standard deviation `sigma` (n,) in pixels, one for each image.

    A Gaussian is cut off at 5 % of the side S to each side; images are mirrored at their edges. The order of the sums
    is fixed, because the bits of torch's convolution may depend on the number of threads.
    """
    size = pixels.shape[-1]
    reach = size // 20
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / torch.from_numpy(sigma).float()[:, None]).square())
    weights = (weights / weights.sum(1, keepdim=True)).to(pixels.device, non_blocking=True)
    first, *others = weights[:, :, None, None, None].unbind(1)
    for dim, margin in ((-1, (reach, reach, 0, 0)), (-2, (0, 0, reach, reach))):
        wide = pad(pixels, margin, mode="reflect")
        pixels = wide.narrow(dim, 0, size) * first
        for i, weight in enumerate(others, 1):
            pixels.addcmul_(wide.narrow(dim, i, size), weight)
    return pixels


# Motion ---------------------------------------------------------------------------------------------------------------


def _inverse_maps(augment: AugmentConfig, draws: Floats) -> Floats:
    """Return the affine map of each image from output pixels to input pixels, float64 (b, 2, 3).

    A map converts the coordinates of an output pixel to those of its input pixel. Coordinates range over [-1, 1] from
    one edge of the image to the other. augment: the largest size of each change. draws (b, NOISE_DRAWS): random numbers
    in [0, 1).
    """
    angle = np.radians(augment.rotate) * between((-1, 1), draws[:, 0])
    zoom = between(augment.zoom, draws[:, 1])
    stretch = np.sqrt(1 + augment.aspect * between((-1, 1), draws[:, 2]))
    shift = 2 * augment.shift * between((-1, 1), draws[:, 3:5])
    mirror = np.where(draws[:, 5] < augment.flip, -1.0, 1.0)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = mirror / (zoom * stretch), stretch / zoom
    return np.stack([np.stack([cos * x, sin * x, shift[:, 0]], 1), np.stack([-sin * y, cos * y, shift[:, 1]], 1)], 1)


def _warped(pixels: Tensor, inverse: Tensor) -> Tensor:
    """Rotate, zoom, stretch, shift and flip images, float (b, 3, S, S) in 0..255, by one affine map for each.

    inverse (b, 2, 3): the maps, from `_inverse_maps`, which give the input coordinates of each output pixel. The input
    is sampled bilinearly, and is white outside.
    """
    size = pixels.shape[-1]
    centres = (torch.arange(size, device=pixels.device) * 2 + 1) / size - 1  # centres of pixels, in [-1, 1]
    x, y = centres[None, None, :], centres[None, :, None]
    rows = inverse[:, :, :, None, None].unbind(1)
    # elementwise, not affine_grid: its matrix product may round differently in another batch
    grid = torch.stack([a * x + b * y + c for a, b, c in (row.unbind(1) for row in rows)], -1)
    return 255 - grid_sample(255 - pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

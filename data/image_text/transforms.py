"""From the bytes of a picture to the uint8 square that a tower (encoder) takes: decoding, resizing, augmentation.

Pictures stay uint8 until they are on the device, which normalises them. Augmentation is a function of the seed, the
epoch and the sample id: it gives the same bits in any process and any batch.

Shape letters: b pictures of a batch; H, W height and width of a decoded picture; S side of the tower's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad
from torchvision.transforms.v2 import InterpolationMode, functional as F

from dyad.data.config import AugmentConfig
from dyad.data.image_text.pictures import JPEG_MAGIC, check_size, opened_picture, refuse_many_scans

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 16  # of a picture with a longer side than this times the shorter one, only a part is resized
CROP_ATTEMPTS = 10
CROP_DRAWS, NOISE_DRAWS = 2 * CROP_ATTEMPTS + 2, 20
DRAWS = CROP_DRAWS + NOISE_DRAWS  # uniforms that the augmentation of one picture takes
CROP_RATIO = (3 / 4, 4 / 3)  # of width to height
RECOLOURS = [11, 10, 17, 19]  # the draws that decide about colour jitter, grey, blur and solarise
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # the changes of a colour jitter
ORDERS = list(permutations(range(4)))
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as PIL's "L"
NOISE_PIXELS = 2**15  # augmented at a time: their floats fit into the CPU's cache

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Interval = Sequence[float]


@dataclass(frozen=True)
class ImageSpec:
    """The input of a picture tower (encoder). size: its side S in pixels. mean, std: per colour, to normalise colour
    values in 0..1.

    resize: "shortest" (resize the shorter side, crop the centre), "longest" (resize the longer side, pad with black) or
    "squash" (resize both sides). interpolation: "bicubic" or "bilinear". The terms are open_clip's. resized: the length
    to which sides are resized before the centre is cropped to `size`, in evaluation; None: `size`.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: str = "shortest"
    interpolation: str = "bicubic"
    resized: int | None = None


# Decoding -------------------------------------------------------------------------------------------------------------


def decode(data: bytes, max_pixels: int) -> Tensor:
    """Decode a JPEG, PNG or WebP picture to uint8 (3, H, W), H its height and W its width.

    Transparent areas become white; of an animation the first frame is decoded. Raises DataError with the reason for
    damaged or other data, for more than `max_pixels` pixels, and for too many scans. Pixels and scans are counted
    before anything is decoded.
    """
    refuse_many_scans(data)
    if data[:3] == JPEG_MAGIC:
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            check_size(int(width), int(height), max_pixels, "data.max_image_pixels")
            if colours in ("RGB", "YCbCr", "Gray"):
                return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
        except ValueError:
            pass  # PIL decodes what libjpeg only warns of, and gives a reason for what is broken
    with opened_picture(data, max_pixels, "data.max_image_pixels") as picture:
        return torch.from_numpy(np.array(to_rgb(picture))).permute(2, 0, 1)


def to_rgb(picture: Image) -> Image:
    """Convert a picture to RGB, drawn on white where it is transparent."""
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


# Resizing -------------------------------------------------------------------------------------------------------------


def evaluation_transform(picture: Tensor, spec: ImageSpec) -> Tensor:
    """Resize a picture without augmentation: uint8 (3, H, W) → (3, S, S), S the side in `spec`. Returns a picture that
    already has this size as it is.

    With colours scaled to 0..1, the result differs from open_clip's preprocessing by at most (2/255).
    """
    size, side, (height, width) = spec.size, spec.resized or spec.size, picture.shape[-2:]
    if height == width == side == size:
        return picture
    shorter, longer = sorted((height, width))
    if longer > MAX_ASPECT * shorter:  # resize only a part of the pixels: the whole would take much memory
        if spec.resize == "shortest":
            height, width = (min(side, MAX_ASPECT * shorter) for side in (height, width))
            picture = F.center_crop(picture, [height, width])
        else:
            down, right = (max(1, side // (MAX_ASPECT * size)) for side in (height, width))
            picture = picture[:, ::down, ::right]
    if spec.resize == "squash":
        target = [side, side]
    elif spec.resize == "longest":
        ratio = longer / side
        target = [max(1, round(height / ratio)), max(1, round(width / ratio))]
    else:
        target = [max(side, side * length // shorter) for length in (height, width)]
    return F.center_crop(_resize(picture, target, spec), [size, size])


def evaluation_batch(pictures: Iterable[Tensor], spec: ImageSpec) -> Tensor:
    """Resize k pictures without augmentation, each uint8 (3, H, W): uint8 (k, 3, S, S)."""
    return torch.stack([evaluation_transform(picture, spec).contiguous() for picture in pictures])


def _resize(picture: Tensor, size: list[int], spec: ImageSpec) -> Tensor:
    return F.resize(picture, size, InterpolationMode(spec.interpolation), antialias=True)


# Augmentation ---------------------------------------------------------------------------------------------------------


def uniforms(seed: int, epoch: int, sample_id: int, count: int) -> Floats:
    """Return `count` random numbers in [0, 1) that depend only on the arguments. Each sample has its own stream of the
    random generator Philox."""
    key, counter = np.array([seed % 2**64, epoch], np.uint64), np.array([0, 0, 0, sample_id], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


def training_size(picture: Tensor, spec: ImageSpec, augment: AugmentConfig, draws: Floats) -> Tensor:
    """Resize a training picture: uint8 (3, H, W) → (3, S, S), S the side in `spec`.

    With augment.crop_scale other than (1, 1), a random crop is resized; otherwise the picture is resized as in
    evaluation. draws (DRAWS,): random numbers in [0, 1).
    """
    if tuple(augment.crop_scale) == (1, 1):
        return evaluation_transform(picture, spec)
    top, left, height, width = crop_box(picture.shape[1], picture.shape[2], augment.crop_scale, draws)
    return _resize(picture[:, top : top + height, left : left + width], [spec.size] * 2, spec)


def crop_box(height: int, width: int, scale: Interval, draws: Floats) -> tuple[int, int, int, int]:
    """Draw a random crop as torchvision's RandomResizedCrop does; return its top, left, height and width in pixels.

    height, width: of the picture. scale: lowest and highest share of the picture's area. draws: random numbers in [0,
    1). Up to ten boxes are drawn, and the first that fits into the picture is taken; if none fits, a box in the centre.
    """
    shapes = draws[: 2 * CROP_ATTEMPTS].reshape(CROP_ATTEMPTS, 2)
    area = height * width * _between(scale, shapes[:, 0])
    ratio = np.exp(_between([math.log(side) for side in CROP_RATIO], shapes[:, 1]))
    widths, heights = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
    fitting = np.flatnonzero((widths > 0) & (widths <= width) & (heights > 0) & (heights <= height))
    if len(fitting):
        h, w = int(heights[fitting[0]]), int(widths[fitting[0]])
        down, right = draws[2 * CROP_ATTEMPTS : CROP_DRAWS]
        return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    h = min(height, round(width / CROP_RATIO[0]))
    w = min(width, round(height * CROP_RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def add_noise(batch: Tensor, augment: AugmentConfig, draws: Floats) -> Tensor:
    """Return the pictures of a batch augmented: rotated, zoomed, stretched, shifted and flipped on white, then
    recoloured, jittered, made grey, blurred and solarised. Returns `batch` itself if `augment` asks for none of these.

    batch, uint8 (b, 3, S, S): the pictures. augment: how strong each change may be. draws (b, NOISE_DRAWS): random
    numbers in [0, 1). Each picture is changed only by its own draws, with the same instructions at any position in the
    batch, so that its bits do not depend on the other pictures.
    """
    warps = augment.rotate or augment.aspect or augment.shift or tuple(augment.zoom) != (1, 1)
    colours = augment.brightness or augment.grey or tuple(augment.gain) != (1, 1)
    recolours = (any(augment.jitter) and augment.jitter_prob, augment.grey, augment.blur, augment.solarise)
    if not (warps or augment.flip or colours or any(recolours)):
        return batch
    inverse = torch.from_numpy(_inverse_maps(augment, draws)).float()
    mirrored = torch.from_numpy(draws[:, 5] < augment.flip)
    brightness = 1 + augment.brightness * _between((-1, 1), draws[:, 9:10])
    gains = torch.from_numpy(_between(augment.gain, draws[:, 6:9]) * brightness).float()
    chosen = draws[:, RECOLOURS] < recolours
    result = torch.empty_like(batch)
    block = max(1, NOISE_PIXELS // batch.shape[-1] ** 2)
    for start in range(0, len(batch), block):
        rows = slice(start, start + block)
        pixels = batch[rows].float()
        if warps:
            pixels = _warped(pixels, inverse[rows])
        elif augment.flip:  # alone: sampling pixels would take twenty times as long
            pixels = torch.where(mirrored[rows, None, None, None], pixels.flip(-1), pixels)
        pixels.mul_(gains[rows, :, None, None])
        for row in np.flatnonzero(chosen[rows].any(1)).tolist():
            pixels[row] = _recoloured(pixels[row], augment, chosen[start + row], draws[start + row])
        result[rows] = pixels.add_(0.5).clamp_(0, 255)
    return result


def _recoloured(pixels: Tensor, augment: AugmentConfig, chosen: np.ndarray, draws: Floats) -> Tensor:
    """Return a picture, float (3, S, S) in 0..255, after those changes of RECOLOURS that are `chosen`, bool (4,).

    Their order is that of Chen et al. 2020 (appendix A) and Grill et al. 2020 (appendix B): colour jitter, grey, blur,
    solarise. draws (NOISE_DRAWS,): random numbers in [0, 1).
    """
    jitter, grey, blur, solarise = chosen
    if jitter:
        pixels = _jittered(pixels.clamp(0, 255), augment.jitter, ORDERS[int(24 * draws[12])], draws[13:17])
    if grey:
        pixels = _luma(pixels).expand(3, -1, -1)
    if blur:
        pixels = _blurred(pixels, float(_between(augment.blur_sigma, draws[18])))
    return torch.where(pixels < 128, pixels, 255 - pixels) if solarise else pixels


def _jittered(pixels: Tensor, strengths: Sequence[float], order: Sequence[int], draws: Floats) -> Tensor:
    """Change brightness, contrast, saturation and hue of a picture, float (3, S, S) in 0..255, in the order given, as
    torchvision's ColorJitter.

    strengths: the largest relative change of each; of the hue, the largest shift as a share of the colour circle. draws
    (4,): random numbers in [0, 1), one for each.
    """
    for change in (change for change in order if strengths[change]):
        strength = strengths[change]
        if change == HUE:
            pixels = F.adjust_hue(pixels / 255, float(_between((-strength, strength), draws[change]))) * 255
            continue
        factor = float(_between((max(0.0, 1 - strength), 1 + strength), draws[change]))
        grey = torch.zeros(()) if change == BRIGHTNESS else _luma(pixels)
        if change == CONTRAST:  # a sum of whole numbers is exact in any order
            grey = grey.round().sum(dtype=torch.int64) / grey.numel()
        pixels = (grey + factor * (pixels - grey)).clamp(0, 255)
    return pixels


def _luma(pixels: Tensor) -> Tensor:
    """Return the grey value of each pixel, float (S, S), of a picture (3, S, S)."""
    red, green, blue = (channel * weight for channel, weight in zip(pixels, LUMA, strict=True))
    return red + green + blue


def _blurred(pixels: Tensor, sigma: float) -> Tensor:
    """Blur a picture, float (3, S, S), by a Gaussian of `sigma` pixels, cut off at 5 % of the side S to each side; the
    picture is mirrored at its edges. Sums in a fixed order: a convolution of torch may differ with its threads."""
    size = pixels.shape[-1]
    reach = size // 20
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square())
    for dim, margin in ((-1, (reach, reach, 0, 0)), (-2, (0, 0, reach, reach))):
        wide = pad(pixels, margin, mode="reflect")
        parts = (wide.narrow(dim, i, size) * weight for i, weight in enumerate((weights / weights.sum()).tolist()))
        pixels = reduce(torch.add, parts)
    return pixels


def _inverse_maps(augment: AugmentConfig, draws: Floats) -> Floats:
    """Return affine maps (b, 2, 3), one for each picture, from the coordinates of an output pixel to those of its input
    pixel. Coordinates range over [-1, 1] from one edge of the picture to the other. augment: how strong each change may
    be. draws (b, NOISE_DRAWS): random numbers in [0, 1)."""
    angle = np.radians(augment.rotate) * _between((-1, 1), draws[:, 0])
    zoom = _between(augment.zoom, draws[:, 1])
    stretch = np.sqrt(1 + augment.aspect * _between((-1, 1), draws[:, 2]))
    shift = 2 * augment.shift * _between((-1, 1), draws[:, 3:5])
    mirror = np.where(draws[:, 5] < augment.flip, -1.0, 1.0)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = mirror / (zoom * stretch), stretch / zoom
    return np.stack([np.stack([cos * x, sin * x, shift[:, 0]], 1), np.stack([-sin * y, cos * y, shift[:, 1]], 1)], 1)


def _warped(pixels: Tensor, inverse: Tensor) -> Tensor:
    """Rotate, zoom, stretch, shift and flip pictures, float (b, 3, S, S) in 0..255, by the affine maps `inverse` (b, 2,
    3).

    The maps give the input coordinates of each output pixel, which is sampled bilinearly; outside the picture it is
    white.
    """
    size = pixels.shape[-1]
    centres = (torch.arange(size) * 2 + 1) / size - 1  # of pixels, in [-1, 1]
    x, y = centres[None, None, :], centres[None, :, None]
    rows = inverse[:, :, :, None, None].unbind(1)
    # elementwise, not affine_grid: its matrix product may round differently in another batch
    grid = torch.stack([a * x + b * y + c for a, b, c in (row.unbind(1) for row in rows)], -1)
    return 255 - grid_sample(255 - pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _between(interval: Interval, draws: Floats) -> Floats:
    """Map random numbers in [0, 1) to the interval (low, high)."""
    low, high = interval
    return low + (high - low) * draws

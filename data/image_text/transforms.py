"""Resize and randomly crop a decoded image to the uint8 square that a tower (encoder) takes.

Images stay uint8 until they are on the device, where they are normalised. Augmentation (here the crop, in noise.py the
rest) is a function of the seed, the epoch and the sample id, in a stream of the seed and the place in the stream. It
gives the same bits in any process and any batch; a GPU, which computes only the noise, may round it differently.

Shape letters: b images of a batch; H, W height and width of a decoded image; S side of the tower's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dyad.data.config import AugmentConfig
from dyad.data.loading.sample_rng import Floats

MAX_ASPECT = 64  # only a part is resized of an image whose longer side is more than so many times the shorter one
CROP_ATTEMPTS = 10
CROP_DRAWS, NOISE_DRAWS = 2 * CROP_ATTEMPTS + 2, 20
DRAWS = CROP_DRAWS + NOISE_DRAWS  # number of random numbers that the augmentation of one image takes
CROP_RATIO = (3 / 4, 4 / 3)  # smallest and largest ratio of width to height of a random crop

Interval = Sequence[float]


@dataclass(frozen=True)
class ImageSpec:
    """The preprocessing of images for an image tower (encoder). size: side S of the tower's input in pixels. mean, std:
    for each colour, to normalise colour values in 0..1.

    resize: "shortest" (resize the shorter side, crop the centre), "longest" (resize the longer side, pad with black) or
    "squash" (resize both sides), as in open_clip. interpolation: "bicubic" or "bilinear". resized: the length in pixels
    to which sides are resized in evaluation, before the centre is cropped to `size`; None: `size`.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: str = "shortest"
    interpolation: str = "bicubic"
    resized: int | None = None


# Resizing -------------------------------------------------------------------------------------------------------------


def evaluation_transform(image: Tensor, spec: ImageSpec) -> Tensor:
    """Resize an image without augmentation: uint8 (3, H, W) → uint8 (3, S, S), S = spec.size. An image that already has
    this size is returned unchanged, unless spec.resized is another length.

    With colours scaled to 0..1, the result of a photo differs from open_clip's preprocessing by at most 2/255, that of
    noise by some 20/255, because PIL rounds between the passes along the two sides in another order. It differs more
    for an image whose longer side is more than MAX_ASPECT times the shorter one: only a part of it may be resized.
    """
    size, side, (height, width) = spec.size, spec.resized or spec.size, image.shape[-2:]
    if height == width == side == size:
        return image
    shorter, longer = sorted((height, width))
    if longer > MAX_ASPECT * shorter:  # resize only a part of the pixels: the whole would take much memory
        if spec.resize == "shortest":
            height, width = (min(side, MAX_ASPECT * shorter) for side in (height, width))
            image = _center_crop(image, [height, width])
        else:
            down, right = (max(1, side // (MAX_ASPECT * size)) for side in (height, width))
            image = image[:, ::down, ::right]
    if spec.resize == "squash":
        target = [side, side]
    elif spec.resize == "longest":
        ratio = longer / side
        target = [max(1, round(height / ratio)), max(1, round(width / ratio))]
    else:
        target = [max(side, side * length // shorter) for length in (height, width)]
    return _center_crop(_resize(image, target, spec), [size, size])


def evaluation_batch(images: Iterable[Tensor], spec: ImageSpec) -> Tensor:
    """Resize k images without augmentation, each uint8 (3, H, W), and stack them: uint8 (k, 3, S, S), S = spec.size."""
    return torch.stack([evaluation_transform(image, spec).contiguous() for image in images])


def _center_crop(image: Tensor, size: list[int]) -> Tensor:
    from torchvision.transforms.v2 import functional as F  # here: two seconds, which models of sequences do not need

    return F.center_crop(image, size)


def _resize(image: Tensor, size: list[int], spec: ImageSpec) -> Tensor:
    from torchvision.transforms.v2 import InterpolationMode, functional as F

    return F.resize(image, size, InterpolationMode(spec.interpolation), antialias=True)


# Augmentation ---------------------------------------------------------------------------------------------------------


def crop_and_resize(image: Tensor, spec: ImageSpec, augment: AugmentConfig, draws: Floats) -> Tensor:
    """Crop and resize a training image: uint8 (3, H, W) → uint8 (3, S, S), S = spec.size.

    With augment.crop_scale other than (1, 1), a random crop is resized to the square; otherwise the image is resized as
    in evaluation, and `draws` is not used. draws, float64: random numbers in [0, 1), of which the first CROP_DRAWS are
    used.
    """
    if tuple(augment.crop_scale) == (1, 1):
        return evaluation_transform(image, spec)
    top, left, height, width = crop_box(image.shape[1], image.shape[2], augment.crop_scale, draws)
    return _resize(image[:, top : top + height, left : left + width], [spec.size] * 2, spec)


def crop_box(height: int, width: int, scale: Interval, draws: Floats) -> tuple[int, int, int, int]:
    """Draw a random crop as torchvision's RandomResizedCrop does. Return its top, left, height and width in pixels.

    height, width: of the image, in pixels. scale: lowest and highest share of the image's area. draws: at least
    CROP_DRAWS random numbers in [0, 1), for the area and the aspect ratio of each of ten boxes, then for the position.
    The first box that fits into the image is taken; if none fits, the largest central one with a ratio in CROP_RATIO.
    """
    shapes = draws[: 2 * CROP_ATTEMPTS].reshape(CROP_ATTEMPTS, 2)
    area = height * width * between(scale, shapes[:, 0])
    ratio = np.exp(between([math.log(side) for side in CROP_RATIO], shapes[:, 1]))
    widths, heights = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
    fitting = np.flatnonzero((widths > 0) & (widths <= width) & (heights > 0) & (heights <= height))
    if len(fitting):
        h, w = int(heights[fitting[0]]), int(widths[fitting[0]])
        down, right = draws[2 * CROP_ATTEMPTS : CROP_DRAWS]
        return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    h = min(height, round(width / CROP_RATIO[0]))
    w = min(width, round(height * CROP_RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def between(interval: Interval, draws: Floats) -> Floats:
    """Map random numbers in [0, 1) linearly to the interval [low, high)."""
    low, high = interval
    return low + (high - low) * draws

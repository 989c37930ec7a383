"""From the bytes of a picture to the uint8 square that a tower takes: decoding, resizing, training noise.

Everything is uint8 until the device normalises it. Noise is a function of (seed, epoch, sample id): the same on any
rank, in any worker and in any batch, down to the bit. S side of the tower's input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from data.config import AugmentConfig
from data.errors import DataError
from data.pictures import JPEG_MAGIC, refuse_many_scans

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP")
OBLONG = 16  # times the shorter side: of a longer picture only a part is resized
CROP_ATTEMPTS = 10
CROP_DRAWS, NOISE_DRAWS = 2 * CROP_ATTEMPTS + 2, 11
CROP_RATIO = (3 / 4, 4 / 3)
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as PIL's "L"
NOISE_PIXELS = 2**15  # at a time, so that their floats stay in the cache

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Interval = Sequence[float]


@dataclass(frozen=True)
class ImageSpec:
    """What a picture tower takes: S pixels square; mean and std of its normalisation for values in 0..1.

    resize: "shortest" (resize the shorter side, crop the centre), "longest" (resize the longer side, pad with black) or
    "squash". interpolation: "bicubic" or "bilinear". These are open_clip's words.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: str = "shortest"
    interpolation: str = "bicubic"


# Decoding -------------------------------------------------------------------------------------------------------------


def decode(data: bytes, max_pixels: int) -> Tensor:
    """The picture as uint8 (3, H, W). Transparency becomes white, of an animation the first frame is taken.

    Raises DataError with the reason for anything that is no sound JPEG, PNG or WebP or has more than `max_pixels` or
    too many scans; all that is read from the header, before anything is decoded.
    """
    refuse_many_scans(data)
    if data[:3] == JPEG_MAGIC:
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _check_size((int(width), int(height)), max_pixels)
            if colours in ("RGB", "YCbCr", "Gray"):
                return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
        except ValueError:
            pass  # what libjpeg only warns of is decoded by PIL, what is broken is refused there with a reason
    return torch.from_numpy(_decode_with_pil(data, max_pixels)).permute(2, 0, 1)


def _decode_with_pil(data: bytes, max_pixels: int) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit comes next
            with Image.open(BytesIO(data), formats=FORMATS) as picture:
                _check_size(picture.size, max_pixels)
                return np.array(_rgb(picture))
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"more pixels than data.max_image_pixels={max_pixels} ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"no sound JPEG, PNG or WebP picture (begins with {data[:8]!r})") from error
    except Exception as error:  # PIL raises nearly any type on bytes made to confuse it
        raise DataError(f"no sound JPEG, PNG or WebP picture ({type(error).__name__}: {error})") from error


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise DataError(f"{width} x {height} pixels are more than data.max_image_pixels={max_pixels}")


def _rgb(picture: Image) -> Image:
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


# Bringing to size -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationTransform:
    """(3, H, W) uint8 → (3, S, S) uint8 without any noise; agrees with open_clip's preprocessing to 2/255."""

    spec: ImageSpec

    def __call__(self, picture: Tensor) -> Tensor:
        size, sides = self.spec.size, picture.shape[-2:]
        if sides == (size, size):
            return picture
        if max(sides) > OBLONG * min(sides):
            picture, sides = self._shortened(picture)
        return F.center_crop(_resized(picture, self._target(*sides), self.spec), [size, size])

    def _shortened(self, picture: Tensor) -> tuple[Tensor, Sequence[int]]:
        """The middle of a very long picture, or some of its rows, which takes little memory to resize; and its sides,
        those of the whole where the whole is shown."""
        sides = picture.shape[-2:]
        if self.spec.resize == "shortest":
            kept = [min(side, OBLONG * min(sides)) for side in sides]
            return F.center_crop(picture, kept), kept
        down, right = (max(1, side // (OBLONG * self.spec.size)) for side in sides)
        return picture[:, ::down, ::right], sides

    def _target(self, height: int, width: int) -> list[int]:
        size = self.spec.size
        if self.spec.resize == "squash":
            return [size, size]
        if self.spec.resize == "longest":
            ratio = max(height, width) / size
            return [max(1, round(height / ratio)), max(1, round(width / ratio))]
        return [max(size, size * side // min(height, width)) for side in (height, width)]


def evaluation_transform(spec: ImageSpec) -> EvaluationTransform:
    return EvaluationTransform(spec)


def _resized(picture: Tensor, size: list[int], spec: ImageSpec) -> Tensor:
    return F.resize(picture, size, InterpolationMode(spec.interpolation), antialias=True)


# Training noise -------------------------------------------------------------------------------------------------------


def uniforms(seed: int, epoch: int, sample_id: int, count: int) -> Floats:
    """`count` numbers in [0, 1) that depend on nothing but the arguments. A Philox stream of its own per sample."""
    key, counter = np.array([seed % 2**64, epoch], np.uint64), np.array([0, 0, 0, sample_id], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


@dataclass(frozen=True)
class TrainingTransform:
    """Pictures and their uniforms (b, DRAWS) → one uint8 batch (b, 3, S, S) with the noise of `augment`."""

    spec: ImageSpec
    augment: AugmentConfig

    DRAWS = CROP_DRAWS + NOISE_DRAWS

    def __call__(self, pictures: Iterable[Tensor], draws: Floats) -> Tensor:
        return self.noisy(torch.stack([self.at_size(*each) for each in zip(pictures, draws, strict=True)]), draws)

    def at_size(self, picture: Tensor, draws: Floats) -> Tensor:
        """(3, H, W) uint8, draws (DRAWS,) → (3, S, S) uint8: resized as in evaluation, or cropped at random."""
        if tuple(self.augment.crop_scale) == (1, 1):
            return EvaluationTransform(self.spec)(picture)
        return self._cropped(picture, draws)

    def noisy(self, batch: Tensor, draws: Floats) -> Tensor:
        """batch (b, 3, S, S) of such pictures, draws (b, DRAWS)."""
        return add_noise(batch, self.augment, draws[:, CROP_DRAWS:])

    def _cropped(self, picture: Tensor, draws: Floats) -> Tensor:
        top, left, height, width = crop_box(picture.shape[1], picture.shape[2], self.augment.crop_scale, draws)
        return _resized(picture[:, top : top + height, left : left + width], [self.spec.size] * 2, self.spec)


def training_transform(spec: ImageSpec, augment: AugmentConfig) -> TrainingTransform:
    return TrainingTransform(spec, augment)


def crop_box(height: int, width: int, scale: Interval, draws: Floats) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random resized crop as torchvision's: up to ten attempts, then the centre."""
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
    """Rotate, zoom, stretch, shift and flip on white, then change colours. batch (b, 3, S, S) uint8; draws (b, 11).

    Every value is computed from its own picture and draws, with the same instructions wherever it stands in the batch.
    """
    moves = augment.rotate or augment.aspect or augment.shift or augment.flip or tuple(augment.zoom) != (1, 1)
    colours = augment.brightness or augment.grey or tuple(augment.gain) != (1, 1)
    if not (moves or colours):
        return batch
    inverse = torch.from_numpy(_inverse_maps(augment, draws)).float()
    gains = torch.from_numpy(_gains(augment, draws)).float()
    grey = draws[:, 10] < augment.grey
    result = torch.empty_like(batch)
    block = max(1, NOISE_PIXELS // batch.shape[-1] ** 2)
    for start in range(0, len(batch), block):
        rows = slice(start, start + block)
        pixels = batch[rows].float()
        if moves:
            pixels = _moved(pixels, inverse[rows])
        pixels.mul_(gains[rows, :, None, None])
        for row in np.flatnonzero(grey[rows]).tolist():
            red, green, blue = (channel * weight for channel, weight in zip(pixels[row], LUMA, strict=True))
            pixels[row] = red + green + blue
        result[rows] = pixels.add_(0.5).clamp_(0, 255)
    return result


def _inverse_maps(augment: AugmentConfig, draws: Floats) -> Floats:
    """(b, 2, 3): where each output pixel (x, y) in [-1, 1] comes from."""
    angle = np.radians(augment.rotate) * _between((-1, 1), draws[:, 0])
    zoom = _between(augment.zoom, draws[:, 1])
    stretch = np.sqrt(1 + augment.aspect * _between((-1, 1), draws[:, 2]))
    shift = 2 * augment.shift * _between((-1, 1), draws[:, 3:5])
    mirror = np.where(draws[:, 5] < augment.flip, -1.0, 1.0)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = mirror / (zoom * stretch), stretch / zoom
    return np.stack([np.stack([cos * x, sin * x, shift[:, 0]], 1), np.stack([-sin * y, cos * y, shift[:, 1]], 1)], 1)


def _moved(pixels: Tensor, inverse: Tensor) -> Tensor:
    """Bilinear samples at the places that `inverse` names; what lies outside is white. (b, 3, S, S) float 0..255."""
    size = pixels.shape[-1]
    place = (torch.arange(size) * 2 + 1) / size - 1  # centres of pixels in [-1, 1]
    x, y = place[None, None, :], place[None, :, None]
    rows = inverse[:, :, :, None, None].unbind(1)
    # elementwise instead of affine_grid, whose matrix product may round otherwise in another batch
    grid = torch.stack([a * x + b * y + c for a, b, c in (row.unbind(1) for row in rows)], -1)
    return 255 - grid_sample(255 - pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _gains(augment: AugmentConfig, draws: Floats) -> Floats:
    """(b, 3) factor of each channel."""
    brightness = 1 + augment.brightness * _between((-1, 1), draws[:, 9])
    return _between(augment.gain, draws[:, 6:9]) * brightness[:, None]


def _between(interval: Interval, draws: Floats) -> Floats:
    low, high = interval
    return low + (high - low) * draws

"""Prepare images that a Python caller passes (paths, bytes of files, PIL images, pixels) for an image tower."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from dyad.data.base.errors import DataError, first_line, printable
from dyad.data.base.files import open_foreign
from dyad.data.image_text.decode import as_png, decode, to_rgb
from dyad.data.image_text.items import Images
from dyad.data.image_text.transforms import ImageSpec, evaluation_batch
from dyad.data.shards.scan_tar import IMAGES, MAX_BYTES

# A path, the bytes of a file, a file opened for bytes (which Model reads), a PIL image, uint8 pixels: (H, W, 3) of
# numpy, (3, H, W) of torch
ImageInput: TypeAlias = "str | PathLike[str] | bytes | BinaryIO | Image | np.ndarray | Tensor"


@dataclass(frozen=True)
class GivenImages:
    """A list of images as inputs of an image tower (encoder). spec: the tower's preprocessing. max_pixels: encoded
    images of more pixels are refused before they are decoded."""

    images: Sequence[ImageInput]
    spec: ImageSpec
    max_pixels: int

    def __len__(self) -> int:
        return len(self.images)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the k images start … stop − 1 as uint8 (k, 3, S, S), S the side of the tower's input in pixels. Raises
        DataError as `pixels` does."""
        return evaluation_batch(map(self.decoded, range(start, min(stop, len(self)))), self.spec)

    def decoded(self, i: int) -> Tensor:
        """Return image i in its own height H and width W, uint8 (3, H, W).

        Raises DataError as `pixels` does, with the path or the position of the image.
        """
        try:
            return pixels(self.images[i], self.max_pixels)
        except DataError as error:
            key = self.key(i)
            raise DataError(f"{key if isinstance(key, str) else f'image {key}'}: {error}") from error

    def key(self, i: int) -> str | int:
        """Return what names image i: its path, or its position if it has none."""
        return str(path) if isinstance(path := self.images[i], str | PathLike) else i

    def chosen(self, rows: Sequence[int]) -> "GivenImages":
        """Return the images at the positions `rows` as a list of inputs of its own."""
        return replace(self, images=[self.images[i] for i in rows])


def readable(images: GivenImages | Images) -> list[int]:
    """Decode all images; return the positions of those that can be, and print a line on stderr for each other one."""
    rows = []
    for i in range(len(images)):
        try:
            images.decoded(i)
            rows.append(i)
        except DataError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    return rows


def pixels(image: ImageInput, max_pixels: int) -> Tensor:
    """Return an image as uint8 (3, H, W) on the CPU. image: a path, the bytes of a file, a PIL image (converted as by
    `to_rgb`), or uint8 pixels: (H, W, 3) of numpy or (3, H, W) of torch.

    max_pixels: the most pixels of an encoded image (path or bytes). Raises DataError for an image that cannot be read
    or is too large, and for a value that is no image.
    """
    if isinstance(image, bytes):
        return decode(as_png(image, max_pixels), max_pixels)
    if isinstance(image, str | PathLike):
        try:
            with open_foreign(os.path.expanduser(image), MAX_BYTES[IMAGES[0]]) as file:
                return decode(as_png(file.read(), max_pixels), max_pixels)
        except (OSError, ValueError) as error:
            raise DataError(str(error)) from error
    if isinstance(image, Tensor):
        found = image.cpu()
    elif not isinstance(image, np.ndarray | Image):
        raise DataError(f"an image must be a path, the bytes of a file, a PIL image or pixels, not {image!r:.50}")
    else:
        try:
            array = np.array(image if isinstance(image, np.ndarray) else to_rgb(image))
            found = torch.from_numpy(array).movedim(-1, 0)
        except Exception as error:  # PIL decodes the file of an opened image only now
            raise DataError(f"an image cannot be read: {first_line(error)}") from error
    if found.ndim == 2:
        raise DataError("an image has three colours, not grey alone: np.stack([grey] * 3, axis=-1), or torch.stack")
    if found.dtype != torch.uint8 or found.ndim != 3 or len(found) != 3 or not found.numel():
        form = f"{found.dtype} {tuple(found.shape)}"
        raise DataError(f"an image must be uint8, (H, W, 3) of numpy or (3, H, W) of torch, not {form} as (C, H, W)")
    return found

"""Pictures that a program hands over, as inputs of a picture tower: paths, bytes of files, PIL pictures, pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from dyad.data.base.errors import DataError
from dyad.data.base.files import open_foreign
from dyad.data.image_text.transforms import ImageSpec, decode, evaluation_batch, to_rgb
from dyad.data.shards.scan_tar import MAX_BYTES, PICTURES

# A path, the bytes of a file, a PIL picture, uint8 pixels: (H, W, 3) of numpy, (3, H, W) of torch
ImageInput: TypeAlias = "str | PathLike[str] | bytes | Image | np.ndarray | Tensor"


@dataclass(frozen=True)
class GivenPictures:
    """A list of pictures as inputs of a picture tower. max_pixels: larger files are refused before they are decoded."""

    pictures: Sequence[ImageInput]
    spec: ImageSpec
    max_pixels: int

    def __len__(self) -> int:
        return len(self.pictures)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the pictures start … stop − 1 as uint8 (k, 3, S, S), S the side of the tower's input in pixels."""
        return evaluation_batch((pixels(each, self.max_pixels) for each in self.pictures[start:stop]), self.spec)


def pixels(picture: ImageInput, max_pixels: int) -> Tensor:
    """Return a picture as uint8 (3, H, W). Raises DataError for one that cannot be read, or is no picture."""
    if isinstance(picture, bytes):
        return decode(picture, max_pixels)
    if isinstance(picture, str | PathLike):
        try:
            with open_foreign(Path(picture), MAX_BYTES[PICTURES[0]]) as file:
                return decode(file.read(), max_pixels)
        except (OSError, ValueError, DataError) as error:
            raise DataError(f"{picture}: {error}") from error
    if isinstance(picture, Tensor):
        found = picture.cpu()
    elif not isinstance(picture, np.ndarray | Image):
        raise DataError(f"a picture must be a path, the bytes of a file, a PIL picture or pixels, not {picture!r:.50}")
    else:
        array = np.array(picture if isinstance(picture, np.ndarray) else to_rgb(picture))
        found = torch.from_numpy(array).movedim(-1, 0)
    if found.dtype != torch.uint8 or found.ndim != 3 or len(found) != 3 or not found.numel():
        form = f"{found.dtype} {tuple(found.shape)}"
        raise DataError(f"a picture must be uint8, (H, W, 3) of numpy or (3, H, W) of torch, not {form} as (C, H, W)")
    return found

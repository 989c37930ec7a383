"""Thumbnails: small copies of the pictures in a gallery, as WebP without metadata, in a folder beside the result."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor

from dyad.data.base.files import remove, sync, whole_folder
from dyad.data.image_text.dataset import Pictures

SIDE = 96  # pixels of the longer side, at most
QUALITY = 80


class Thumbnails:
    """Collects the positions of the pictures that a gallery shows, and writes all of them at once."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self._asked: set[int] = set()

    def name(self, i: int) -> str:
        """The file name of picture i, which `write` will write. It is no sample key, which may have any character."""
        self._asked.add(i)
        return f"{i}.webp"

    def write(self, folder: Path) -> None:
        """Replace `folder` in one move by a folder of the pictures that were named; remove it if there are none.

        Raises DataError for a picture that cannot be read.
        """
        if not self._asked:
            return remove(folder)
        with whole_folder(folder, replace=True) as new:
            for i in sorted(self._asked):
                path = new / self.name(i)
                path.write_bytes(thumbnail(self._pictures.decoded(i)))
                sync(path)
        sync(folder.parent)


def thumbnail(picture: Tensor) -> bytes:
    """The WebP file of a picture, uint8 (3, H, W), with at most SIDE pixels a side."""
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return buffer.getvalue()

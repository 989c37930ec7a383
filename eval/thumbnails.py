"""Small copies of the pictures that a gallery shows, in a folder beside the result: WebP without metadata."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from data.files import remove, sync, whole_folder

if TYPE_CHECKING:
    from torch import Tensor

    from data.image_text import Pictures

SIDE = 96  # pixels of the longer side, at most
QUALITY = 80


class Thumbnails:
    """Pictures are asked for by position, and written together."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self._asked: set[int] = set()

    def name(self, i: int) -> str:
        """The file that picture i will have. It is made of the position: a sample's key may hold anything."""
        self._asked.add(i)
        return f"{i}.webp"

    def write(self, folder: Path) -> None:
        """Put all that were asked for into `folder` in one move, and what it had away; without any it goes.

        Raises DataError for a picture that cannot be read.
        """
        if not self._asked:
            return remove(folder)
        with whole_folder(folder) as new:
            for i in sorted(self._asked):
                path = new / self.name(i)
                path.write_bytes(thumbnail(self._pictures.decoded(i)))
                sync(path)
            remove(folder)
        sync(folder.parent)


def thumbnail(picture: Tensor) -> bytes:
    """A picture, uint8 (3, H, W), as WebP of at most SIDE pixels a side."""
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return buffer.getvalue()

"""Thumbnails: small copies of the images in example cases, WebP files without metadata, beside the result."""

from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor

from dyad.data.base.files import remove, sync, whole_folder
from dyad.data.image_text.items import Images

SIDE = 96  # pixels of the longer side, at most
QUALITY = 80


class Thumbnails:
    """Collects the indices of the images that example cases show, and writes all their thumbnails together.

    images: the images, by index.
    """

    def __init__(self, images: Images) -> None:
        self._images = images
        self._asked: set[int] = set()

    def name(self, i: int) -> str:
        """Return the file name of the thumbnail of image i, and remember i, so that `write` writes this thumbnail.

        The name is made from i, because a sample key could hold characters that do not suit a file name.
        """
        self._asked.add(i)
        return f"{i}.webp"

    def write(self, folder: Path) -> None:
        """Write the thumbnails of all images for which `name` was called into a new folder, which replaces `folder`.

        If `name` was never called, `folder` is removed. Raises SampleError, a DataError, for an image that cannot be
        read; `folder` then stays as it was. Raises OSError if the folder cannot be written.
        """
        if not self._asked:
            return remove(folder)
        with whole_folder(folder, replace=True) as new:
            for i in sorted(self._asked):
                path = new / self.name(i)
                path.write_bytes(thumbnail(self._images.decoded(i)))
                sync(path)
        sync(folder.parent)


def thumbnail(pixels: Tensor) -> bytes:
    """Convert an image, uint8 (3, height, width), to the bytes of a WebP file with at most SIDE pixels a side."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return buffer.getvalue()

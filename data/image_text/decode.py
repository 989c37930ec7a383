"""Decodes images: from the bytes of a JPEG, PNG or WebP file to its pixels."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import DataError
from dyad.data.image_text.image_files import (
    CONVERTED,
    CONVERTED_MAGIC,
    JPEG_MAGIC,
    check_size,
    opened_image,
    refuse_many_scans,
)

if TYPE_CHECKING:
    from PIL.Image import Image


def decode(data: bytes, max_pixels: int) -> Tensor:
    """Decode a JPEG, PNG or WebP image to uint8 (3, H, W), H its height and W its width.

    The tensor is on the CPU and not contiguous (a permuted view of the decoder's array). Transparent areas become
    white; the first frame of an animation is decoded. Raises DataError with the reason, without the name of a file, for
    damaged data, for other formats, for more than `max_pixels` pixels, and for a JPEG that `refuse_many_scans` refuses.
    Pixels and scans are counted before anything is decoded.
    """
    refuse_many_scans(data)
    if data[:3] == JPEG_MAGIC:
        import simplejpeg  # imported here, because towers and noise import this file without needing simplejpeg

        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            check_size(int(width), int(height), max_pixels, "data.max_image_pixels")
            if colours in ("RGB", "YCbCr", "Gray"):
                return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
        except ValueError:
            pass  # PIL decodes files for which libjpeg only warns, and names the fault of broken ones
    with opened_image(data, max_pixels, "data.max_image_pixels") as image:
        return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)


def as_png(data: bytes, max_pixels: int) -> bytes:
    """Convert an image of a format in CONVERTED (BMP, GIF, TIFF, AVIF) to PNG, with the pixels that `to_rgb` gives; of
    several frames or pages the first. Return other data unchanged.

    Raises DataError for a damaged image, one of more than `max_pixels` pixels, and one of floating-point pixels.
    """
    if not CONVERTED_MAGIC.match(data):
        return data
    with opened_image(data, max_pixels, "max_image_pixels", CONVERTED) as image:
        if image.mode == "F":
            raise DataError("its pixels are floating-point numbers of an unknown range; store 8 or 16 bits")
        png = BytesIO()
        to_rgb(image).save(png, "png")
    return png.getvalue()


def to_rgb(image: Image) -> Image:
    """Convert a PIL image to mode RGB, with white behind transparent pixels. Return the image itself if it is RGB
    without transparency. Mode I;16 has 16 bits a pixel, of which the upper 8 are taken; so has mode I with a value
    above 255."""
    from PIL import Image

    if image.mode.startswith("I"):  # convert() would clip 16 bits
        grey = np.asarray(image)
        bits = 8 if image.mode == "I" and grey.max() <= 255 else 16
        image = Image.fromarray((grey.clip(0, 65535) >> bits - 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")

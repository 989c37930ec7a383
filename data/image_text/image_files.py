"""Opens encoded images and checks their limits, without decoding them.

How unusual images are decoded (data/image_text/decode.py):

    grey, palette, 1 bit, CMYK (JPEG)       converted to RGB as PIL does
    transparent (RGBA, LA, palette)         drawn on white
    16 bits a channel                       the upper 8 bits are used
    animated (WebP, PNG), several (MPO)     the first frame is used
    rotated by EXIF                         decoded as stored: the tag is ignored
    1 x 1                                   resized like any other
    one side more than 64 times the other   only its middle, or every n-th row or column, is resized, to bound memory
    more than max_image_pixels              DataError; the header is enough, nothing is decoded
    a JPEG of more than MAX_SCANS scans     DataError: each scan costs as much as an image
    BMP, GIF, TIFF, AVIF in tables, folders converted to PNG once (`as_png`); in shards passed over and counted
    cut, damaged, empty, another format     DataError; a truncated image is never filled with grey
    a member of more than 64 MiB            reported by the index, which training refuses; a stream leaves it out

In training a sample whose image raises DataError is replaced, in a stream left out; with data.bad_samples=stop the run
stops. An evaluation stops at it.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dyad.data.base.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# PIL's name of each format that is read → suffix. An MPO is a JPEG with further frames, as phones and drones write it
SUFFIX_OF = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
OPENERS = ("JPEG", "PNG", "WebP")  # formats that PIL may try; its JPEG opener also opens MPO
CONVERTED = ("BMP", "GIF", "TIFF", "AVIF")  # formats that are converted to PNG; a PIL of one's own may lack AVIF
CONVERTED_SUFFIXES = ("bmp", "gif", "tif", "tiff", "avif")
CONVERTED_MAGIC = re.compile(rb"BM|GIF8|II[*+]\0|MM\0[*+]|....ftypavi[fs]", re.DOTALL)
JPEG_MAGIC = b"\xff\xd8\xff"
MAX_SCANS = 100  # a progressive JPEG has about ten
MAX_SEGMENTS = 10_000  # the most segments of a JPEG
SEGMENT = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")  # other markers are escaped bytes or have no length field
START_OF_SCAN, END_OF_IMAGE = b"\xda", b"\xd9"
SEQUENTIAL_FRAMES = (b"\xc0", b"\xc1", b"\xc9")


class Header(NamedTuple):
    """The header of an image file. suffix: jpg, png or webp, by the content of the file. mode: PIL's name of the colour
    format. width, height: in pixels."""

    suffix: str
    mode: str
    width: int
    height: int


def read_header(data: bytes, max_pixels: int) -> Header:
    """Return the header of a JPEG, PNG or WebP image. Pixels are not decoded, so damage behind the header is not found.
    Raises DataError for other data, for more than `max_pixels` pixels, and for a JPEG that `refuse_many_scans`
    refuses."""
    refuse_many_scans(data)
    with opened_image(data, max_pixels, "max_image_pixels") as image:
        return Header(SUFFIX_OF[str(image.format)], image.mode, *image.size)


@contextmanager
def opened_image(data: bytes, max_pixels: int, key: str, formats: tuple[str, ...] = OPENERS) -> Iterator["Image"]:
    """Context manager that yields an image of one of `formats`, opened by PIL and not yet decoded. It is closed at the
    end.

    key: the configuration key of `max_pixels`, for messages. Raises DataError for other data and for more than
    `max_pixels` pixels. Any Exception inside the block, such as one of decoding, is raised as DataError too.
    """
    from PIL import Image, UnidentifiedImageError

    damaged = f"no sound {', '.join(formats[:-1])} or {formats[-1]} image"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit comes next
            with Image.open(BytesIO(data), formats=formats) as image:
                check_size(*image.size, max_pixels, key)
                yield image
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"more pixels than {key}={max_pixels} ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{damaged} (begins with {data[:8]!r})") from error
    except Exception as error:  # PIL raises nearly any type on bytes made to confuse it
        raise DataError(f"{damaged} ({type(error).__name__}: {error})") from error


def check_size(width: int, height: int, max_pixels: int, key: str) -> None:
    """Raise DataError for an image of more than `max_pixels` pixels. key: the configuration key of this limit, for the
    message."""
    if width * height > max_pixels:
        raise DataError(f"{width} x {height} pixels are more than {key}={max_pixels}")


def refuse_many_scans(data: bytes) -> None:
    """Raise DataError for a JPEG of more than MAX_SCANS scans (passes over the image): it takes minutes to decode.

    A JPEG of more than MAX_SEGMENTS segments is refused too if its bytes have more than MAX_SCANS scan markers, in
    metadata or elsewhere. Other data pass, as does a JPEG of which a decoder reads only the first scan.
    """
    # count() also finds the marker's bytes in metadata: only when it finds many are the segments parsed
    if data[:3] != JPEG_MAGIC or _is_one_scan(data) or data.count(b"\xff" + START_OF_SCAN) <= MAX_SCANS:
        return
    scans = 0
    for number, (marker, _) in enumerate(_segments(data)):
        scans += marker == START_OF_SCAN
        if scans > MAX_SCANS or number >= MAX_SEGMENTS:
            raise DataError(f"a JPEG of more than {MAX_SCANS} scans or {MAX_SEGMENTS} segments is slow to decode")


def _is_one_scan(data: bytes) -> bool:
    """Whether a decoder reads only the first scan (pass over the image) of a JPEG: True when the JPEG is not
    progressive and this scan has all colour components."""
    components = None
    for marker, offset in islice(_segments(data), MAX_SEGMENTS):
        if marker in SEQUENTIAL_FRAMES:
            components = data[offset + 7 : offset + 8]
        elif marker == START_OF_SCAN:
            return data[offset + 2 : offset + 3] == components
    return False


def _segments(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield (marker byte, offset) for each segment of a JPEG up to the end of the image. offset: the place in `data`
    behind the marker, where the segment's length field is."""
    offset = 2
    while (found := SEGMENT.search(data, offset)) and found[1] != END_OF_IMAGE:
        yield found[1], found.end()
        offset = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")

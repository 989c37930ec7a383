"""What a picture's header tells, without decoding it.

What becomes of odd pictures, where they are decoded (data/transforms.py):
    grey, palette, 1 bit, CMYK (JPEG)       converted to RGB as PIL does
    transparent (RGBA, LA, palette)         laid on white
    16 bits a channel                       the upper 8 bits
    animated (WebP, PNG)                    the first frame
    rotated by EXIF                         as it is stored: the tag is not obeyed
    1 x 1                                   brought to size like any other
    one side more than 16 times the other   its middle, or some of its rows, is brought to size: little memory
    more than max_image_pixels              DataError, told by the header: nothing of it is decoded
    a JPEG of more than MOST_SCANS scans    DataError: each scan costs as much as a picture
    cut, damaged, empty, another format     DataError; a truncated picture is never filled up with grey
    a member of more than 64 MiB            found by the index, which training refuses
In training another sample takes the place of one with a DataError here; an evaluation stops at it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import NamedTuple

from data.errors import DataError

SUFFIX_OF = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
JPEG_MAGIC = b"\xff\xd8\xff"
MOST_SCANS = 100  # a progressive JPEG has about ten
MOST_SEGMENTS = 10_000  # of a JPEG: between its scans
SEGMENT = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")  # the others stand for a byte, or have no length
START_OF_SCAN, END_OF_IMAGE = b"\xda", b"\xd9"
SEQUENTIAL_FRAMES = (b"\xc0", b"\xc1", b"\xc9")


class Header(NamedTuple):
    """suffix: jpg, png or webp, by content; mode as PIL names it; width and height in pixels."""

    suffix: str
    mode: str
    width: int
    height: int


def read_header(data: bytes, max_pixels: int) -> Header:
    """The header of a JPEG, PNG or WebP picture. Raises DataError for anything else and for more than `max_pixels`."""
    from PIL import Image

    refuse_many_scans(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
            with Image.open(BytesIO(data), formats=tuple(SUFFIX_OF)) as picture:
                header = Header(SUFFIX_OF[str(picture.format)], picture.mode, *picture.size)
    except Image.DecompressionBombError as error:
        raise DataError(f"more pixels than max_image_pixels={max_pixels} ({error})") from None
    except Exception as error:  # PIL raises nearly any type on bytes made to confuse it
        raise DataError(f"no JPEG, PNG or WebP picture ({type(error).__name__}, begins with {data[:8]!r})") from None
    if header.width * header.height > max_pixels:
        raise DataError(f"{header.width} x {header.height} pixels are more than max_image_pixels={max_pixels}")
    return header


def refuse_many_scans(data: bytes) -> None:
    """Raise DataError for a JPEG whose decoding takes minutes because its scans are told over and over."""
    if data[:3] != JPEG_MAGIC or _is_one_scan(data) or data.count(b"\xff" + START_OF_SCAN) <= MOST_SCANS:
        return  # the marker's bytes can stand in metadata, too: where there are many, segments are counted
    scans = 0
    for number, (marker, _) in enumerate(_segments(data)):
        scans += marker == START_OF_SCAN
        if scans > MOST_SCANS or number >= MOST_SEGMENTS:
            raise DataError(
                f"a JPEG of more than {MOST_SCANS} scans or {MOST_SEGMENTS} segments takes too long to decode"
            )


def _is_one_scan(data: bytes) -> bool:
    """Whether decoders read the first scan alone: the frame is sequential, and that scan has all of its components."""
    components = None
    for marker, at in islice(_segments(data), MOST_SEGMENTS):
        if marker in SEQUENTIAL_FRAMES:
            components = data[at + 7 : at + 8]
        elif marker == START_OF_SCAN:
            return data[at + 2 : at + 3] == components
    return False


def _segments(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(marker, where its length stands) of each segment of a JPEG."""
    place = 2
    while (found := SEGMENT.search(data, place)) and found[1] != END_OF_IMAGE:
        yield found[1], found.end()
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")

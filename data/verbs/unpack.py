"""`python -m data unpack FILE.gz|.zst`: a compressed file as it was, so that it can be read by offset.

A compressed file is foreign data: memory stays bounded, and a bomb is refused long before it fills the disk.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from data.errors import ConfigError, DataError, nearest
from data.verbs.options import UnpackOptions
from data.verbs.outputs import new_file, refuse_existing

PIECE = 1 << 20
ZSTD_INPUT = 512  # a block of 4 bytes can stand for 128 KiB: at most 16 MiB come of so much
ZSTD_WINDOW = 1 << 27  # what `zstd --long` asks for; a frame that wants more memory is refused
HARMLESS = 16 << 20  # bytes that may come of any file, however small
SPARE = 256 << 20  # bytes of the disk that stay free
CHECK_EVERY = 64 << 20


def unpack(source: str, options: UnpackOptions) -> Path:
    """Write the content of a .gz or .zst file; returns the new file.

    Raises ConfigError for a file that is none of these, a target that is there already and a disk without room,
    DataError for a damaged or cut file and one that grows beyond max_ratio or max_size. Then nothing is left behind.
    """
    path = Path(source)
    if not path.is_file():
        near = nearest(path.name, [file.name for file in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"FILE {path} does not exist.{near}")
    if path.suffix not in DECODERS:
        raise ConfigError(f"FILE {path}: only {', '.join(DECODERS)} files are unpacked.")
    if options.max_ratio <= 0 or (options.max_size is not None and options.max_size <= 0):
        raise ConfigError(f"max_ratio={options.max_ratio:g} and max_size={options.max_size} must be positive.")
    out = Path(options.out) if options.out else path.with_suffix(".tar" if path.suffix == ".tgz" else "")
    refuse_existing(out, "name")
    with path.open("rb") as packed, new_file(out) as file:
        written = _copy(path, DECODERS[path.suffix](packed), file, out, options)
    print(f"{out}: {written:,} bytes, {written / max(path.stat().st_size, 1):.1f} times those of {path}")
    return out


def _copy(path: Path, pieces: Iterator[bytes], file: BinaryIO, out: Path, options: UnpackOptions) -> int:
    """All pieces into `file`, within the limits; returns their bytes."""
    packed, written, checked = path.stat().st_size, 0, 0
    if not packed:
        raise DataError(f"{path} is empty: not even the start of a compressed file.")
    _refuse_full_disk(out, packed)
    try:
        for piece in pieces:
            written += len(piece)
            _refuse_bomb(path, packed, written, options)
            if written - checked >= CHECK_EVERY:
                _refuse_full_disk(out, CHECK_EVERY)
                checked = written
            file.write(piece)
    except _Damaged as damaged:
        raise DataError(f"{path}: {damaged}, after {written:,} unpacked bytes.") from None
    return written


def _refuse_bomb(path: Path, packed: int, written: int, options: UnpackOptions) -> None:
    if options.max_size is not None and written > options.max_size:
        raise DataError(f"{path} holds more than max_size={options.max_size:g} bytes.")
    if written > max(HARMLESS, options.max_ratio * packed):
        raise DataError(
            f"{path} holds more than {options.max_ratio:g} times its {packed:,} bytes, as files made to fill disks do."
            " If you trust it, raise max_ratio=."
        )


def _refuse_full_disk(out: Path, coming: int) -> None:
    folder = out.resolve().parent
    free = shutil.disk_usage(folder).free
    if free < coming + SPARE:
        raise ConfigError(f"out={out}: only {free / 1e6:,.0f} MB are free in {folder}. Choose another place with out=.")


# ---- the formats ---------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """What is wrong with the compressed bytes."""


def _gzip(packed: BinaryIO) -> Iterator[bytes]:
    import gzip

    try:
        with gzip.open(packed) as file:
            while piece := file.read(PIECE):
                yield piece
    except EOFError:
        raise _Damaged("the file ends before its end-of-stream marker: it was cut") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _Damaged(f"no sound gzip file ({error})") from None


def _zstd(packed: BinaryIO) -> Iterator[bytes]:
    """Frame by frame, since the library's own readers take a cut frame for the end of the file."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame, rest = None, b""
    while rest := rest or packed.read(ZSTD_INPUT):
        frame = frame or decompressor.decompressobj()
        try:
            piece = frame.decompress(rest)
        except zstandard.ZstdError as error:
            raise _Damaged(f"no sound zstd file ({error})") from None
        rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if piece:
            yield piece
    if frame is not None:
        raise _Damaged("the file ends inside a frame: it was cut")


DECODERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {".gz": _gzip, ".tgz": _gzip, ".zst": _zstd}

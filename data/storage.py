"""Bytes of a shard by position, from a local file or through fsspec."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from data.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SCHEMES = ("https", "http", "s3", "gs", "memory")
PACKAGES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
STAMPS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
RETRY_SECONDS = (0.1, 1.0, 5.0)

T = TypeVar("T")
ReadRange = Callable[[int, int], bytes]


class Stat(NamedTuple):
    """What tells that a file is still the one we know: bytes, and its time stamp or entity tag."""

    size: int
    mtime: str


def scheme_of(path: str) -> str:
    """'s3' of 's3://bucket/x', 'pipe' of 'pipe:cat x', '' of a local path."""
    found = re.match(r"(pipe(?=:)|[A-Za-z][A-Za-z0-9+.-]*(?=://))", path)
    return found[0].lower() if found else ""


def shard_name(path: str) -> str:
    """Last part of a path or URL, without a query."""
    return os.path.basename(urlsplit(path).path if scheme_of(path) else path)


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """fsspec's file system of a URL and the path in it; ConfigError names the package when its driver is missing."""
    import fsspec.core

    scheme = scheme_of(url)
    assert scheme in SCHEMES, url
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        raise ConfigError(f"reading {scheme}:// needs a package: pip install {PACKAGES[scheme]}") from None


def listed(url: str) -> list[str]:
    """The URLs that a remote glob matches, or that a remote folder holds, sorted. OSError when it cannot be asked."""
    fs, path = filesystem(url)
    with drivers_errors():
        names: Any = fs.glob(path) if glob.has_magic(url) else fs.ls(path, detail=False) if fs.isdir(path) else []
        return sorted(str(fs.unstrip_protocol(name)) for name in names)


@contextmanager
def drivers_errors() -> Iterator[None]:
    """Errors of a driver's own types (HTTP status, credentials) as OSError."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def stat(path: str) -> Stat:
    """Size and stamp of a shard; ConfigError when there is none, DataError when it cannot be asked."""
    try:
        return ask(path)
    except FileNotFoundError:
        raise ConfigError(f"shard {path} does not exist.") from None
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error}") from error


def ask(path: str) -> Stat:
    """As `stat`; raises OSError."""
    return _remote_stat(path) if scheme_of(path) else _local_stat(path)


def _local_stat(path: str) -> Stat:
    found = os.stat(path)
    return Stat(found.st_size, str(found.st_mtime_ns))


def _remote_stat(path: str) -> Stat:
    fs, inner = filesystem(path)
    with drivers_errors():
        info: dict[str, Any] = fs.info(inner)
    if not isinstance(info.get("size"), int):
        raise DataError(f"shard {path}: the server does not tell its size, so it cannot be read by offset.")
    return Stat(info["size"], next((str(info[stamp]) for stamp in STAMPS if info.get(stamp)), ""))


def open_stream(path: str) -> BinaryIO:
    """The whole shard from its start, unbuffered where that is possible."""
    if not scheme_of(path):
        return open(path, "rb", buffering=0)
    fs, inner = filesystem(path)
    return cast(BinaryIO, fs.open(inner, "rb", block_size=8 << 20))


def open_ranges(path: str) -> ReadRange:
    """A function (start, end) -> bytes of the shard; shorter where the file ends. OSError after three retries."""
    if not scheme_of(path):
        return _LocalRanges(path)
    fs, inner = filesystem(path)

    def fetch(start: int, end: int) -> bytes:
        with drivers_errors():
            return cast(bytes, fs.cat_file(inner, start=start, end=end))

    return lambda start, end: retried(lambda: fetch(start, end))


class _LocalRanges:
    """pread, not mmap: a file that is cut or fails while mapped kills the process (SIGBUS); here it is an error."""

    def __init__(self, path: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY)

    def __call__(self, start: int, end: int) -> bytes:
        return retried(lambda: os.pread(self.descriptor, end - start, start))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def retried(read: Callable[[], T]) -> T:
    """read(), once more after each of RETRY_SECONDS while storage fails; not for what is not there."""
    for pause in RETRY_SECONDS:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(pause)
    return read()

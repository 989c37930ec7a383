"""Read the bytes of a local or remote shard: by byte range, or as a stream from its start to its end."""

import glob
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EINVAL, EPERM
from functools import lru_cache
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
from weakref import finalize

from dyad.data.base.errors import ConfigError, DataError, UserError
from dyad.data.base.files import foreign_descriptor

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SCHEMES = ("https", "http", "s3", "gs", "hf", "memory")
PACKAGES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
STAMPS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created", "blob_id")
HUB_TIMEOUT = 10.0  # seconds until the Hugging Face hub counts as out of reach; its own library tries for minutes
RETRY_SECONDS = (0.1, 1.0, 5.0)  # pauses before the retries of a read
TIMEOUT = 60.0  # seconds in which a server must send something
PIECE = 1 << 20  # bytes read at a time
GONE = (404, 410)  # HTTP status of a file that does not exist

T = TypeVar("T")
ReadRange = Callable[[int, int], bytes]


class Stat(NamedTuple):
    """The state of a file, by which a change is noticed: a file with an equal Stat counts as unchanged.

    size: in bytes. mtime: its time stamp in ns; for a remote file its entity tag or another stamp of STAMPS, "" if the
    server gives none.
    """

    size: int
    mtime: str


def scheme_of(path: str) -> str:
    """Return the URL scheme of a path: 's3' for 's3://bucket/x', 'pipe' for 'pipe:cat x', '' for a local path."""
    found = re.match(r"(pipe(?=:)|[A-Za-z][A-Za-z0-9+.-]*(?=://))", path)
    return found[0].lower() if found else ""


def shard_name(path: str) -> str:
    """Return the file name, which is the last part of a path or URL, without the query string."""
    return os.path.basename(urlsplit(path).path if scheme_of(path) else path)


def suffix_of(path: str) -> str:
    """Return the suffix of a path or URL with its dot, such as ".tar", without the query string."""
    return os.path.splitext(shard_name(path))[1]


def filesystem(url: str) -> tuple["AbstractFileSystem", str]:
    """Return fsspec's file system for a URL, and the URL's path in it. The URL must have one of SCHEMES.

    Raises ConfigError, which names the package to install, when the storage driver is missing; ConnectionError when the
    Hugging Face hub of an hf:// URL does not answer or HF_HUB_OFFLINE is set.
    """
    import fsspec.core

    scheme = scheme_of(url)
    assert scheme in SCHEMES, url
    if scheme == "hf":
        _reach_hub()
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        raise ConfigError(f"reading {scheme}:// needs a package: pip install {PACKAGES[scheme]}") from None


@lru_cache(maxsize=1)
def _reach_hub() -> None:
    """Raise ConnectionError when the Hugging Face hub does not answer, or HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set: give a local copy")
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except HTTPError as error:
        error.close()  # the hub answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({reason}): give a local copy") from None


def list_remote(url: str) -> list[str]:
    """Return the sorted URLs of the files and folders that match a remote glob, or that a remote folder has.

    The list is empty for any other URL. Raises OSError when storage fails; ConfigError as `filesystem` does.
    """
    fs, path = filesystem(url)
    with as_os_errors():
        names: Any = fs.glob(path) if glob.has_magic(url) else fs.ls(path, detail=False) if fs.isdir(path) else []
        return sorted(str(fs.unstrip_protocol(name)) for name in names)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Context manager that raises OSError in place of other exceptions of the block: a storage driver has its own types
    (HTTP status, credentials). A UserError passes."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Context manager that raises DataError ("PATH cannot be read: …") in place of any exception of the block, which
    reads the file at `path`. A UserError passes."""
    try:
        with as_os_errors():
            yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def stat(path: str) -> Stat:
    """Return the size and time stamp of a shard, local or remote, as `read_stat` does, but raise only UserErrors.

    Raises ConfigError when it does not exist or its storage driver is missing, DataError when storage fails, when it is
    neither a regular file nor a folder, or when the server does not tell the size.
    """
    try:
        return read_stat(path)
    except FileNotFoundError:
        raise ConfigError(f"shard {path} does not exist.") from None
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error}") from error


def read_stat(path: str) -> Stat:
    """Return size and time stamp of a file or folder, local or remote.

    Raises OSError when storage fails or it is neither a regular file nor a folder, ConfigError when the storage driver
    is missing, and DataError when the server does not tell the size.
    """
    if not scheme_of(path):
        found = os.stat(path)
        if not (S_ISREG(found.st_mode) or S_ISDIR(found.st_mode)):
            raise OSError(EINVAL, "not a regular file", path)
        return Stat(found.st_size, str(found.st_mtime_ns))
    fs, inner = filesystem(path)
    with as_os_errors():
        info: dict[str, Any] = fs.info(inner)
    if not isinstance(info.get("size"), int):
        raise DataError(f"shard {path}: the server does not tell its size, so it cannot be read by offset.")
    return Stat(info["size"], next((str(info[stamp]) for stamp in STAMPS if info.get(stamp)), ""))


def open_stream(path: str) -> BinaryIO:
    """Open a shard, local or remote, as a binary stream at its start; the caller closes it.

    A local file is unbuffered. Raises OSError if the shard cannot be opened or is no regular file, and ConfigError if
    the storage driver of its URL is missing. A storage driver may raise errors of its own.
    """
    if not scheme_of(path):
        return os.fdopen(foreign_descriptor(path), "rb", buffering=0)  # type: ignore[return-value]
    fs, inner = filesystem(path)
    return cast(BinaryIO, fs.open(inner, "rb", block_size=8 << 20))


def open_buffered(path: str) -> io.BufferedReader:
    """Open a file, local or remote, as a buffered stream at its start; the caller closes it.

    Raises ConfigError when it does not exist or its storage driver is missing, DataError when it cannot be opened.
    """
    with read_errors(path):
        try:
            return io.BufferedReader(open_stream(path), PIECE)  # type: ignore[arg-type]
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist.") from None


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file, local or remote, in hexadecimal digits. Reads the whole file.

    Raises OSError if it cannot be read, and as `open_stream` does.
    """
    with open_stream(str(path)) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def shard_sha256(path: str) -> str:
    """Return the SHA-256 of a shard, as `sha256_of` does, but raise DataError if the shard cannot be read.

    The message of the error names the shard. Raises ConfigError if the storage driver of a URL is missing.
    """
    with read_errors(path):
        return sha256_of(path)


def open_ranges(path: str) -> ReadRange:
    """Return a function (start, end) -> bytes that reads the bytes from start to end - 1 of the shard.

    It returns fewer bytes where the file ends, and raises OSError when a read and its retries (`with_retries`) fail. A
    local file stays open while the function exists. `open_ranges` itself raises OSError when a local shard cannot be
    opened, and errors as `filesystem` does for a URL; a remote shard is not opened before the first read.
    """
    if not scheme_of(path):
        # a memory-mapped file would be faster, but SIGBUS kills the process when it is truncated or its disk fails
        descriptor = foreign_descriptor(path)

        def read(start: int, end: int) -> bytes:
            return with_retries(lambda: os.pread(descriptor, end - start, start))

        finalize(read, os.close, descriptor)
        return read
    fs, inner = filesystem(path)

    def fetch(start: int, end: int) -> bytes:
        with as_os_errors():
            return cast(bytes, fs.cat_file(inner, start=start, end=end))

    return lambda start, end: with_retries(lambda: fetch(start, end))


def with_retries(read: Callable[[], T]) -> T:
    """Call read() and return its result. After an OSError, call it again, once after each pause in RETRY_SECONDS.

    Raises at once a FileNotFoundError, an OSError that says that a file is not regular or leads out of its folder, and
    every other exception; raises any other OSError after the last retry.
    """
    for pause in RETRY_SECONDS:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (EINVAL, EPERM):  # the path is now a pipe, a device or a link
                raise
            time.sleep(pause)
    return read()


# ---- from the first byte to the last: the server needs no ranges, size or time stamp ---------------------------------


def open_sequential(path: str) -> BinaryIO:
    """Open a shard, local or remote, as a stream that is read once from its start; the caller closes it.

    The file is opened at the first read, and again after a failure. A read raises OSError when the shard does not exist
    or retries fail, ConfigError when the storage driver is missing. http servers need not support ranges.
    """
    return io.BufferedReader(_SequentialReader(path), PIECE)


class _SequentialReader(io.RawIOBase):
    """A raw stream of a shard, local or remote. The first read opens the shard. After a broken connection the shard is
    opened again, and the bytes that were read before are skipped."""

    def __init__(self, path: str) -> None:
        self._path, self._offset = path, 0
        self._source: BinaryIO | HTTPResponse | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = with_retries(lambda: self._read(len(buffer)))
        buffer[: len(piece)] = piece
        self._offset += len(piece)
        return len(piece)

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            with as_os_errors():
                return _next_bytes(self._source or self._open(), size)
        except OSError:
            self._disconnect()
            raise

    def _open(self) -> BinaryIO | HTTPResponse:
        """Open the stream's shard, and skip the bytes that were read before a broken connection.

        Return the open file or HTTP response.
        """
        if scheme_of(self._path) not in ("http", "https"):
            self._source = open_stream(self._path)
            self._source.seek(self._offset)
            return self._source
        self._source = _request(self._path)
        left = self._offset
        while left and (skipped := _next_bytes(self._source, min(left, PIECE))):
            left -= len(skipped)
        return self._source

    def _disconnect(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None


def _request(url: str) -> HTTPResponse:
    """Open a URL. Raises FileNotFoundError if the server says that the file does not exist, OSError for other
    failures."""
    try:
        return urlopen(url, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()  # the error holds the connection
        reason = f"the server says {error.code} {error.reason}"
        raise FileNotFoundError(reason) if error.code in GONE else OSError(reason) from error
    except URLError as error:
        raise ConnectionError(str(error.reason)) from error


def _next_bytes(source: BinaryIO | HTTPResponse, size: int) -> bytes:
    """Read at most `size` bytes from the source; b"" at the end.

    Raises ConnectionError for an HTTP response that ends before its announced length.
    """
    try:
        piece = source.read(size)
    except HTTPException as error:
        raise ConnectionError(f"the answer broke off: {type(error).__name__}") from error
    if not piece and isinstance(source, HTTPResponse) and source.length:  # http.client reports no error here
        raise ConnectionError(f"the answer broke off {source.length} bytes before its end")
    return piece

"""Sequential reading of a shard, from the first byte to the last. The server needs no ranges, size or time stamp."""

from __future__ import annotations

import io
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from dyad.data.shards.storage import as_os_errors, open_stream, scheme_of, with_retries

TIMEOUT = 60.0  # seconds in which a server must send something
PIECE = 1 << 20
GONE = (404, 410)


def open_sequential(path: str) -> BinaryIO:
    """The whole shard as a stream; close it. A read raises OSError when the shard does not exist or retries fail."""
    return io.BufferedReader(_SequentialReader(path), PIECE)


class _SequentialReader(io.RawIOBase):
    """Opens with the first read. A broken connection is opened again, and the bytes read before are skipped."""

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
        """Open the shard at the current offset."""
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
    try:
        return urlopen(url, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()  # the error holds the connection
        reason = f"the server says {error.code} {error.reason}"
        raise FileNotFoundError(reason) if error.code in GONE else OSError(reason) from error
    except URLError as error:
        raise ConnectionError(str(error.reason)) from error


def _next_bytes(source: BinaryIO | HTTPResponse, size: int) -> bytes:
    """At most `size` bytes, b"" at the end. Raises ConnectionError for a response that ends too early."""
    try:
        piece = source.read(size)
    except HTTPException as error:
        raise ConnectionError(f"the answer broke off: {type(error).__name__}") from error
    if not piece and isinstance(source, HTTPResponse) and source.length:  # http.client reports no error here
        raise ConnectionError(f"the answer broke off {source.length} bytes before its end")
    return piece

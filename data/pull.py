"""A shard's bytes in one go, from the first to the last: what serves them need not know ranges, size or time stamp."""

from __future__ import annotations

import io
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from data.storage import drivers_errors, open_stream, retried, scheme_of

TIMEOUT = 60.0  # seconds in which a server must send something
PIECE = 1 << 20
GONE = (404, 410)


def pulled(path: str) -> BinaryIO:
    """The whole shard, to be closed. A read raises OSError when the shard is not there or stops coming for good."""
    return io.BufferedReader(_Pull(path), PIECE)


class _Pull(io.RawIOBase):
    """Opened with the first read; a connection that breaks is opened anew, and what was read already is passed over."""

    def __init__(self, path: str) -> None:
        self._path, self._offset = path, 0
        self._source: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = retried(lambda: self._read(len(buffer)))
        buffer[: len(piece)] = piece
        self._offset += len(piece)
        return len(piece)

    def close(self) -> None:
        self._let_go()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            with drivers_errors():
                self._source = self._source or _opened(self._path, self._offset)
                return self._source.read(size)
        except OSError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None


def _opened(path: str, offset: int) -> BinaryIO:
    if scheme_of(path) not in ("http", "https"):
        source = open_stream(path)
        source.seek(offset)
        return source
    answer = io.BufferedReader(_Answer(_asked(path)), PIECE)
    while offset and (passed := answer.read(min(offset, PIECE))):
        offset -= len(passed)
    return answer


def _asked(url: str) -> HTTPResponse:
    try:
        return urlopen(url, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()  # it is the connection as well
        reason = f"the server says {error.code} {error.reason}"
        raise FileNotFoundError(reason) if error.code in GONE else OSError(reason) from error
    except URLError as error:
        raise ConnectionError(str(error.reason)) from error


class _Answer(io.RawIOBase):
    """urllib takes an answer that ends too early for a whole one; here it is an OSError."""

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer, self._left = answer, answer.length  # None: the server does not tell

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            count = self._answer.readinto(buffer)
        except HTTPException as error:
            raise ConnectionError(f"the answer broke off: {type(error).__name__}") from error
        if self._left is not None:
            self._left -= count
            if not count and self._left:
                raise ConnectionError(f"the answer broke off {self._left} bytes before its end")
        return count

    def close(self) -> None:
        self._answer.close()
        super().close()

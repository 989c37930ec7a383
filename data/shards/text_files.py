"""Open text files (JSON, JSON-lines, tables, judgements), local or remote. All readers of text use this module.

The text must be UTF-8. A byte-order mark at the start is skipped. A file in another encoding, as spreadsheets save, is
refused with an error that names the command to convert it, unless it is compressed. A file with a suffix of CODECS is
unpacked while it is read.
"""

import codecs
import shlex
from io import BufferedReader, RawIOBase
from typing import Any

from dyad.data.base.errors import DataError, first_line
from dyad.data.shards.storage import open_buffered, shard_name, suffix_of

BUFFER = 1 << 20  # bytes of the buffer; the encoding is judged by so many bytes at the start of the file
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix of a compressed file → name of its codec in Arrow
MARKS = {  # UTF-32 first: its little-endian mark begins with the mark of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def open_text(path: str) -> "BufferedReader[Any]":
    """Open a file of text, local or a URL, as a stream of bytes without the byte-order mark; the caller closes it.

    Raises ConfigError when it does not exist, DataError when it cannot be opened or its start looks like another
    encoding than UTF-8. Single damaged bytes are left to the reader.
    """
    stream: BufferedReader[Any] = open_buffered(path)
    if codec := CODECS.get(suffix_of(path)):
        stream = BufferedReader(_Unpacked(stream, codec, path), BUFFER)
    try:
        skip_mark(stream, path)
    except DataError:
        stream.close()
        raise
    return stream


class _Unpacked(RawIOBase):
    """The unpacked content of a compressed stream. Reading raises DataError, naming `path`, if it is damaged or cut."""

    def __init__(self, packed: BufferedReader, codec: str, path: str) -> None:
        import pyarrow as pa

        self._packed, self._path, self._unpacked = packed, path, pa.CompressedInputStream(packed, codec)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._unpacked.readinto(buffer)
        except OSError as error:
            raise DataError(f"{self._path} cannot be unpacked: {first_line(error)}") from error

    def close(self) -> None:
        self._packed.close()
        super().close()


def decoded(content: bytes) -> str:
    """Decode UTF-8 text of a small file or of a member of a shard, without a byte-order mark.

    Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    return content.decode("utf-8-sig")


def skip_mark(stream: "BufferedReader[Any]", path: str) -> int:
    """Skip the byte-order mark at the start of a stream, and return its number of bytes; 0 if there is none.

    path: path of the file, for the message. Raises DataError for a file that begins as UTF-16 or UTF-32 does, or whose
    start has more invalid bytes than valid non-ASCII characters. With fewer, readers name the damaged rows.
    """
    head = stream.peek(BUFFER)
    if encoding := _other_encoding(head):
        command = shlex.join(["iconv", "-f", encoding, "-t", "utf-8", path])
        convert = f", or convert it: {command} > {shlex.quote(f'utf8_{shard_name(path)}')}"
        packed = suffix_of(path) in CODECS  # iconv would read the packed bytes
        raise DataError(f"{path} is not UTF-8, but {encoding} as it seems. Save it as UTF-8{'' if packed else convert}")
    return len(stream.read(len(codecs.BOM_UTF8))) if head.startswith(codecs.BOM_UTF8) else 0


def _other_encoding(head: bytes) -> str | None:
    """Return the probable encoding of a file that begins with the bytes `head`, as iconv names it; None for UTF-8.

    Text without a byte-order mark counts as UTF-16 if one of its first two bytes is zero. It counts as CP1252, the code
    page of Western Windows, which covers Latin-1, if most of the non-ASCII part of `head` is invalid UTF-8.
    """
    if marked := next((name for mark, name in MARKS.items() if head.startswith(mark)), None):
        return marked
    if head[:2].count(0) == 1:
        return "UTF-16LE" if head[0] else "UTF-16BE"
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)  # the last character may be cut
    invalid = text.count("\ufffd") - head.count("\ufffd".encode())  # the file itself may have valid U+FFFD
    return "CP1252" if 2 * invalid > len(text) - len(text.encode("ascii", "ignore")) else None

"""Strict scan of a file of rows: JSON-lines, a JSON array of objects, or a table of tab-separated values.

Each row becomes a sample with one member: the bytes of the row. A file may have tens of millions of rows, so a scan
holds columns of numbers, not an object for each row, and only a part of the file at a time.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from dyad.data.base.json_text import check_depth, check_value_count, parse_json
from dyad.data.shards.scan_tar import MAX_BYTES, PIECE, Problem, Problems

BLANK = re.compile(r"[ \t\r\n]*")
TABLE_FIELDS = ("id", "text", "title")
DECODER = json.JSONDecoder()
MAX_ROW = MAX_BYTES["json"]  # of a table too
csv.field_size_limit(MAX_ROW)  # csv's own limit of 128 KiB is less than a row may have


@dataclass
class RowScan:
    """The rows of a file as columns. Each row is a sample with one member, whose suffix is `suffix`.

    key: the number of the row's first line, or of the row in an array. offset, size: of its bytes in the file.
    """

    suffix: str
    key: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("I"))
    crc32: array[int] = field(default_factory=lambda: array("I"))
    problems: Problems = field(default_factory=Problems)

    def add(self, key: int, offset: int, content: bytes) -> None:
        self.key.append(key)
        self.offset.append(offset)
        self.size.append(len(content))
        self.crc32.append(zlib.crc32(content))


def scan_lines(stream: BinaryIO) -> RowScan:
    """Scan JSON-lines: each line is a sample with one member 'json'. Its key is the line number, from 1."""
    scan = RowScan("json")
    offset = number = 0
    while line := stream.readline(MAX_ROW + 2):
        number += 1
        text = line.rstrip(b"\r\n")
        if len(text) > MAX_ROW:
            scan.problems.add(Problem(offset, f"line {number} is longer than {MAX_ROW} bytes"))
        elif error := _line_error(text):
            scan.problems.add(Problem(offset, f"line {number} {error}"))
        else:
            scan.add(number, offset, text)
        offset += len(line)
        while len(text) > MAX_ROW and not line.endswith(b"\n") and (line := stream.readline(PIECE)):
            offset += len(line)
    return scan


def _line_error(text: bytes) -> str:
    """What is wrong with a line of JSON-lines; "" for a JSON object."""
    try:
        value = parse_json(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        return f"is not JSON: {error}" if text.strip() else "is empty"
    return _type_error(value)


def _type_error(value: Any) -> str:
    return "" if isinstance(value, dict) else f"is a {type(value).__name__}, not an object {{…}}"


# ---- JSON arrays ---------------------------------------------------------------------------------------------------


class _BrokenArray(Exception):
    """The rest of the array cannot be read. Its message says why."""


class _ArrayText:
    """The part of a stream that is decoded at present, and a position in it.

    text: the decoded part; at: the position in `text`; offset, line: the same position in the whole stream.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.offset, self.line = "", 0, 0, 1

    def more(self) -> bool:
        """Double the text that is left, so that a long row is parsed only a few times. False at the end."""
        piece = self.stream.read(max(PIECE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :], 0
        try:
            self.text += self.decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            before = self.text.count("\n") + error.object[: error.start].count(b"\n")
            raise _BrokenArray(f"line {self.line + before} is not UTF-8: {error.reason}") from None
        return bool(piece)

    def next(self) -> str:
        """Skip blanks and return the next character without taking it; '' at the end."""
        while True:
            self.take(BLANK.match(self.text, self.at).end() - self.at)  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, count: int) -> bytes:
        """Move past `count` characters and return their bytes."""
        part = self.text[self.at : self.at + count]
        content = part.encode()
        self.at += count
        self.offset += len(content)
        self.line += part.count("\n")
        return content

    def value(self) -> tuple[Any, int]:
        """The JSON value at the position, and its length in characters."""
        while True:
            try:
                value, end, invalid = *DECODER.raw_decode(self.text, self.at), None
            except RecursionError:
                raise _BrokenArray("is not JSON: nested too deep") from None
            except ValueError as error:
                # not the error itself: it references all of the text, and this frame would reference the error
                value, end, invalid = None, len(self.text), getattr(error, "msg", str(error))
            if invalid is not None and len(self.text) - self.at > MAX_ROW:
                raise _BrokenArray(f"is not JSON, or longer than {MAX_ROW} bytes: {invalid}")
            try:
                check_value_count(self.text[self.at : end])
                check_depth(value)
            except ValueError as error:
                raise _BrokenArray(str(error)) from None
            if invalid is None:
                return value, end - self.at
            if not self.more():
                raise _BrokenArray(f"is not JSON: {invalid}")


def scan_array(stream: BinaryIO) -> RowScan:
    """Scan one JSON array of objects: each is a sample with one member 'json'. Its key is its number, from 1.

    stream: buffered. A file that starts with an object is read as JSON-lines, whatever its name.
    """
    peeked: bytes = stream.peek(1)  # type: ignore[attr-defined]
    if peeked.lstrip()[:1] == b"{":
        return scan_lines(stream)
    scan = RowScan("json")
    text = _ArrayText(stream)
    try:
        _add_elements(text, scan)
    except _BrokenArray as broken:
        where = f"row {len(scan.key) + 1} (line {text.line})" if text.offset else "the file"
        message = str(broken) if str(broken).startswith("line") else f"{where} {broken}"
        scan.problems.add(Problem(text.offset, message, last=True))
    return scan


def _add_elements(text: _ArrayText, scan: RowScan) -> None:
    """Add each object of the array to `scan`. Raises _BrokenArray where the array cannot be read further."""
    if text.next() != "[":
        raise _BrokenArray("is no array of rows [{…}, …] and no JSON-lines")
    text.take(1)
    while text.next() != "]":
        if scan.key:
            if text.next() != ",":
                raise _BrokenArray("is not JSON: a ',' or ']' is missing before it")
            text.take(1)
            text.next()
        value, length = text.value()
        if error := _type_error(value):
            raise _BrokenArray(error)
        offset = text.offset
        content = text.take(length)
        if len(content) > MAX_ROW:
            raise _BrokenArray(f"is longer than {MAX_ROW} bytes")
        scan.add(len(scan.key) + 1, offset, content)
    text.take(1)
    if text.next():
        raise _BrokenArray("is not expected: the array is closed before it")


# ---- tables --------------------------------------------------------------------------------------------------------


def cells(row: bytes) -> list[str]:
    """The cells of one row of a table, separated by tabs and quoted as in CSV. Raises ValueError or csv.Error."""
    return next(csv.reader([row.decode("utf-8")], delimiter="\t", strict=True), [])


def header(row: bytes) -> list[str]:
    """The column names in the first line. Raises ValueError when a column of passages is missing."""
    names = cells(row.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8))
    missing = [name for name in TABLE_FIELDS if name not in names]
    if missing:
        raise ValueError(f"has no column '{missing[0]}': the first line must name id, text and title, tabs between")
    return names


def scan_table(stream: BinaryIO) -> RowScan:
    """Scan a table of passages with column names in its first line, such as psgs_w100.tsv.

    Each row is a sample with one member 'tsv'. Its key is the number of its first line; a quoted cell may have several.
    """
    scan = RowScan("tsv")
    first = stream.readline(MAX_ROW)
    try:
        width = len(header(first))
    except (ValueError, csv.Error) as error:
        scan.problems.add(Problem(0, f"line 1 {_reason(error)}", last=True))
        return scan
    row: list[bytes] = []  # the lines of the current row: several where a quote is open
    size = 0  # bytes of these lines

    def next_line() -> str:
        nonlocal size
        line = stream.readline(MAX_ROW)
        if line:
            row.append(line)
        size += len(line)
        if size >= MAX_ROW:
            raise ValueError(f"is longer than {MAX_ROW} bytes; is a quote not closed?")
        return line.decode("utf-8")

    reader = csv.reader(iter(next_line, ""), delimiter="\t", strict=True)
    offset, number = len(first), 2
    while True:
        row.clear()
        size = 0
        try:
            columns = len(next(reader))
            wrong = "" if columns == width else f"has {columns} columns, the first line has {width}"
        except StopIteration:
            return scan
        except (ValueError, csv.Error) as error:
            wrong = _reason(error)
        content = b"".join(row)
        if wrong:
            lost = f"; {len(row)} lines are lost by it" if len(row) > 1 else ""
            scan.problems.add(Problem(offset, f"line {number} {wrong}{lost}"))
        else:
            scan.add(number, offset, content.rstrip(b"\r\n"))
        offset, number = offset + len(content), number + len(row)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return f"cannot be read as tab-separated values: {error}" if isinstance(error, csv.Error) else str(error)

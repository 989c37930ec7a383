"""One strict walk over a file of rows: JSON-lines, a JSON array of objects, or a table of tab-separated values.

Each row becomes a sample with one member, its own bytes. A file may have tens of millions of rows, so what is known of
them is kept in columns of numbers, and no more of the file than its longest row.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from data.json_text import parsed, refuse_crowded, refuse_deep
from data.scan import MAX_BYTES, PIECE, Problem, Problems

BLANK = re.compile(r"[ \t\r\n]*")
TABLE_FIELDS = ("id", "text", "title")
DECODER = json.JSONDecoder()
MAX_ROW = MAX_BYTES["json"]  # of a table too
csv.field_size_limit(MAX_ROW)  # csv's own limit of 128 KiB is less than a row may have


@dataclass
class Rows:
    """Samples of one member each, as columns. key: number of the line where it begins, or of the row in an array."""

    suffix: str
    key: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("I"))
    crc32: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.key)

    def add(self, key: int, offset: int, content: bytes) -> None:
        self.key.append(key)
        self.offset.append(offset)
        self.size.append(len(content))
        self.crc32.append(zlib.crc32(content))


@dataclass
class RowScan:
    """As `scan.Scan`, of a file of rows."""

    rows: Rows
    problems: Problems = field(default_factory=Problems)


def scan_lines(stream: BinaryIO) -> RowScan:
    """JSON-lines: each line is a sample with one member 'json'; its key is the line number, from 1."""
    scan = RowScan(rows := Rows("json"))
    offset = number = 0
    while line := stream.readline(MAX_ROW + 2):
        number += 1
        text = line.rstrip(b"\r\n")
        if len(text) > MAX_ROW:
            scan.problems.add(Problem(offset, f"line {number} is longer than {MAX_ROW} bytes"))
        elif wrong := _wrong_with_line(text):
            scan.problems.add(Problem(offset, f"line {number} {wrong}"))
        else:
            rows.add(number, offset, text)
        offset += len(line)
        while len(text) > MAX_ROW and not line.endswith(b"\n") and (line := stream.readline(PIECE)):
            offset += len(line)
    return scan


def _wrong_with_line(text: bytes) -> str:
    try:
        value = parsed(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        return f"is not JSON: {error}" if text.strip() else "is empty"
    return _wrong_with_value(value)


def _wrong_with_value(value: Any) -> str:
    return "" if isinstance(value, dict) else f"is a {type(value).__name__}, not an object {{…}}"


# ---- JSON arrays ---------------------------------------------------------------------------------------------------


class _Broken(Exception):
    """The walk cannot go on."""


class _Text:
    """The part of a stream that is being looked at, decoded; knows the byte offset and the line of its position."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.offset, self.line = "", 0, 0, 1

    def more(self) -> bool:
        """Read on, as much as is left already: a long row is then tried a few times only. False at the end."""
        piece = self.stream.read(max(PIECE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :], 0
        try:
            self.text += self.decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            before = self.text.count("\n") + error.object[: error.start].count(b"\n")
            raise _Broken(f"line {self.line + before} is not UTF-8: {error.reason}") from None
        return bool(piece)

    def next(self) -> str:
        """The next character that is not blank, '' at the end; blanks before it are passed over."""
        while True:
            self.take(BLANK.match(self.text, self.at).end() - self.at)  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, count: int) -> bytes:
        """Go on behind `count` characters; their bytes."""
        part = self.text[self.at : self.at + count]
        content = part.encode()
        self.at += count
        self.offset += len(content)
        self.line += part.count("\n")
        return content

    def value(self) -> tuple[Any, int]:
        """The JSON value that begins here, and its length in characters."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                return self._within_bounds(value, end)
            except RecursionError:
                raise _Broken("is not JSON: nested too deep") from None
            except ValueError as error:
                # not the error itself: it holds all of the text, and this frame would hold it in turn
                wrong = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            if len(self.text) - self.at > MAX_ROW:
                raise _Broken(f"is not JSON, or longer than {MAX_ROW} bytes: {wrong}")
            self._within_bounds(None, len(self.text))
            if not self.more():
                raise _Broken(f"is not JSON: {wrong}")

    def _within_bounds(self, value: Any, end: int) -> tuple[Any, int]:
        """`value`, which ends there, and its length. Raises _Broken when it is out of the bounds of `json_text`."""
        try:
            refuse_crowded(self.text[self.at : end])
            refuse_deep(value)
        except ValueError as error:
            raise _Broken(str(error)) from None
        return value, end - self.at


def scan_array(stream: BinaryIO) -> RowScan:
    """One JSON array of objects: each is a sample with one member 'json'; its key is its number, from 1.

    A file that starts with an object instead is read as JSON-lines, whatever its name.
    """
    if _first_character(stream) == b"{":
        return scan_lines(stream)
    scan = RowScan(rows := Rows("json"))
    text, number = _Text(stream), 0
    try:
        for number, offset, content in _elements(text):
            rows.add(number, offset, content)
    except _Broken as broken:
        where = f"row {number + 1} (line {text.line})" if number or text.offset else "the file"
        message = str(broken)
        message = message if message.startswith("line") else f"{where} {message}"
        scan.problems.add(Problem(text.offset, message, last=True))
    return scan


def _first_character(stream: BinaryIO) -> bytes:
    """b'{' or another; nothing is consumed: `stream` is buffered."""
    peeked: bytes = stream.peek(1)  # type: ignore[attr-defined]
    return peeked.lstrip()[:1]


def _elements(text: _Text) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, bytes) of each object."""
    if text.next() != "[":
        raise _Broken("is no array of rows [{…}, …] and no JSON-lines")
    text.take(1)
    number = 0
    while text.next() != "]":
        if number:
            if text.next() != ",":
                raise _Broken("is not JSON: a ',' or ']' is missing before it")
            text.take(1)
            text.next()
        value, length = text.value()
        if wrong := _wrong_with_value(value):
            raise _Broken(wrong)
        number += 1
        offset = text.offset
        content = text.take(length)
        if len(content) > MAX_ROW:
            raise _Broken(f"is longer than {MAX_ROW} bytes")
        yield number, offset, content
    text.take(1)
    if text.next():
        raise _Broken("is not expected: the array is closed before it")


# ---- tables --------------------------------------------------------------------------------------------------------


def cells(row: bytes) -> list[str]:
    """The cells of one row of a table: tabs between, quoted as csv does. ValueError or csv.Error when it is none."""
    return next(csv.reader([row.decode("utf-8")], delimiter="\t", strict=True), [])


def header(row: bytes) -> list[str]:
    """The names in the first line; ValueError, with the reason, when passages cannot be read by them."""
    names = cells(row.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8))
    missing = [name for name in TABLE_FIELDS if name not in names]
    if missing:
        raise ValueError(f"has no column '{missing[0]}': the first line must name id, text and title, tabs between")
    return names


def scan_table(stream: BinaryIO) -> RowScan:
    """A table of passages with a first line of names (psgs_w100.tsv): each row is a sample with one member 'tsv'.

    Its key is the number of the line where it begins; a quoted cell may go over several lines.
    """
    scan = RowScan(rows := Rows("tsv"))
    first = stream.readline(MAX_ROW)
    try:
        width = len(header(first))
    except (ValueError, csv.Error) as error:
        scan.problems.add(Problem(0, f"line 1 {_reason(error)}", last=True))
        return scan
    lines, offset, number = _Lines(stream), len(first), 2
    reader = csv.reader(lines, delimiter="\t", strict=True)
    while not lines.ended:
        wrong = ""
        try:
            found = len(next(reader, []))
            wrong = "" if found == width else f"has {found} columns, the first line has {width}"
        except (ValueError, csv.Error) as error:
            wrong = _reason(error)
        row, count = lines.taken()
        if wrong and row:
            lost = f"; {count} lines are lost by it" if count > 1 else ""
            scan.problems.add(Problem(offset, f"line {number} {wrong}{lost}"))
        elif row:
            rows.add(number, offset, row.rstrip(b"\r\n"))
        offset, number = offset + len(row), number + count
    return scan


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return f"cannot be read as tab-separated values: {error}" if isinstance(error, csv.Error) else str(error)


class _Lines:
    """Decoded lines for csv's reader, which asks for another while a quoted cell is open; keeps the row's bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.row, self.count, self.ended = stream, [], 0, False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.stream.readline(MAX_ROW)
        self.ended = not line
        if self.ended:
            raise StopIteration
        self.row.append(line)
        self.count += len(line)
        if self.count >= MAX_ROW:
            raise ValueError(f"is longer than {MAX_ROW} bytes; is a quote not closed?")
        return line.decode("utf-8")

    def taken(self) -> tuple[bytes, int]:
        """Bytes and number of lines since the last call."""
        row, lines = b"".join(self.row), len(self.row)
        self.row, self.count = [], 0
        return row, lines

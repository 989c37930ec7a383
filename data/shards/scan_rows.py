"""Scan a file of rows strictly: JSON-lines, a JSON array of objects, or a table of tab-separated values.

Each row becomes a sample with one member (one piece of data, like a file in a tar): the bytes of the row. A file may
have tens of millions of rows, so a scan stores its results in arrays of integers, without an object for each row, and
holds only a part of the file at a time.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from dyad.data.base.json_text import check_depth, check_value_count, parse_json
from dyad.data.shards.scan_tar import MAX_BYTES, PIECE, Problem, Problems
from dyad.data.shards.text_files import decoded

BLANK = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[^\W\d][\w.-]*")  # the name of a column: a text of several words is no name
PASSAGE_WORDS = 4  # the fewest words of a cell that counts as a passage
ID_TRIPLES = ["query_id", "positive_id", "negative_id"]
DECODER = json.JSONDecoder()
MAX_ROW = MAX_BYTES["json"]  # bytes of a row, also of a table
csv.field_size_limit(MAX_ROW)  # csv's own limit of 128 KiB is less than a row may have


@dataclass
class RowScan:
    """The result of scanning a file of rows: arrays with one entry per valid row. Each row is a sample with one member
    (piece of data), the bytes of the row.

    suffix: the member's suffix, json or tsv. key: the line number of the row, or its position in a JSON array, from 1.
    offset, size: byte offset and number of the row's bytes; crc32: their CRC32. problems: the errors; rows with errors
    are not in the arrays.
    """

    suffix: str
    key: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("I"))
    crc32: array[int] = field(default_factory=lambda: array("I"))
    problems: Problems = field(default_factory=Problems)

    def add(self, key: int, offset: int, content: bytes) -> None:
        """Add a valid row. key, offset: as in the class; content: the bytes of the row."""
        self.key.append(key)
        self.offset.append(offset)
        self.size.append(len(content))
        self.crc32.append(zlib.crc32(content))


def scan_lines(stream: BinaryIO, start: int = 0) -> RowScan:
    """Scan JSON-lines. Each line becomes a sample with one member 'json', the bytes of the line.

    The sample's key is the line number, from 1. Blank lines are left out. Invalid lines, also values other than
    objects, are added to the `problems` of the result; no error is raised for them. start: the byte offset in the file
    at which `stream` begins.
    """
    scan = RowScan("json")
    offset, number = start, 0
    while line := stream.readline(MAX_ROW + 2):
        number += 1
        text = line.rstrip(b"\r\n")
        if len(text) > MAX_ROW:
            scan.problems.add(Problem(offset, f"line {number} is longer than {MAX_ROW} bytes"))
        elif error := text.strip() and _line_error(text):
            scan.problems.add(Problem(offset, f"line {number} {error}"))
        elif text.strip():
            scan.add(number, offset, text)
        offset += len(line)
        while len(text) > MAX_ROW and not line.endswith(b"\n") and (line := stream.readline(PIECE)):
            offset += len(line)
    return scan


def _line_error(text: bytes) -> str:
    """Return the reason why a line is no valid row of JSON-lines; "" for a JSON object."""
    try:
        value = parse_json(text.decode("utf-8"))
        hint = "; an array is read from a file named .json" if isinstance(value, list) else ""
        return f"{_type_error(value)}{hint}"
    except UnicodeDecodeError as error:
        return _reason(error)
    except ValueError as error:
        objects = "Extra data" in str(error) and text.startswith(b"{")
        return f"is not JSON: {error}{'; every object needs a line of its own' if objects else ''}"


def _type_error(value: Any) -> str:
    """Return the reason why a parsed JSON value is no row: it is no object; "" for an object."""
    return "" if isinstance(value, dict) else f"is a {type(value).__name__}, not an object {{…}}"


# ---- JSON arrays ---------------------------------------------------------------------------------------------------


class _ArrayText:
    """The decoded part of a JSON stream, and a read position in it.

    text: the decoded part; at: the read position, an index in `text`; offset, line: byte offset and line number of the
    read position in the whole file. start: byte offset in the file at which `stream` begins.
    """

    def __init__(self, stream: BinaryIO, start: int) -> None:
        self.stream, self.decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.offset, self.line = "", 0, start, 1

    def more(self) -> bool:
        """Read and decode the next part of a JSON stream; return False at its end.

        It reads PIECE bytes or, if the decoded text after the read position has more characters, as many bytes. This
        limits how often a long row is parsed again. Raises ValueError for bytes that are not UTF-8.
        """
        piece = self.stream.read(max(PIECE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :], 0
        try:
            self.text += self.decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            before = self.text.count("\n") + error.object[: error.start].count(b"\n")
            raise ValueError(f"line {self.line + before} is not UTF-8: {error.reason}") from None
        return bool(piece)

    def next(self) -> str:
        """Skip white space in a JSON stream and return the character after it, without moving past that character.

        The result is '' at the end of the stream. Raises ValueError as `more` does.
        """
        while True:
            self.take(BLANK.match(self.text, self.at).end() - self.at)  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, count: int) -> bytes:
        """Move the read position past `count` characters of the decoded JSON text and return their UTF-8 bytes."""
        part = self.text[self.at : self.at + count]
        content = part.encode()
        self.at += count
        self.offset += len(content)
        self.line += part.count("\n")
        return content

    def value(self) -> tuple[Any, int]:
        """Parse the JSON value at the read position of a JSON stream, without moving past it.

        Return the value and its length in characters. Raises ValueError when it is not valid JSON, too long, has too
        many values or is nested too deep.
        """
        while True:
            try:
                value, end, invalid = *DECODER.raw_decode(self.text, self.at), None
            except RecursionError:
                raise ValueError("is not JSON: nested too deep") from None
            except ValueError as error:
                # not the error itself: it references all of the text, and this frame would reference the error
                value, end, invalid = None, len(self.text), getattr(error, "msg", str(error))
            if invalid is not None and len(self.text) - self.at > MAX_ROW:
                raise ValueError(f"is not JSON, or longer than {MAX_ROW} bytes: {invalid}")
            check_value_count(self.text[self.at : end])
            check_depth(value)
            if invalid is None:
                return value, end - self.at
            if not self.more():
                raise ValueError(f"is not JSON: {invalid}")


def scan_array(stream: BinaryIO, start: int = 0) -> RowScan:
    """Scan a JSON array of objects. Each object becomes a sample with one member 'json', the bytes of the object.

    The sample's key is the object's position, from 1. The scan ends at the first error, which is added to the
    `problems` of the result; rows after it are lost. stream: a buffered stream (with `peek`). start: the byte offset in
    the file at which it begins. A file that starts with '{' is scanned as JSON-lines, whatever its name.
    """
    peeked: bytes = stream.peek(1)  # type: ignore[attr-defined]
    if peeked.lstrip()[:1] == b"{":
        return scan_lines(stream, start)
    scan = RowScan("json")
    text = _ArrayText(stream, start)
    try:
        _add_elements(text, scan)
    except ValueError as broken:
        where = f"row {len(scan.key) + 1} (line {text.line})" if text.offset > start else "the file"
        message = str(broken) if str(broken).startswith("line") else f"{where} {broken}"
        scan.problems.add(Problem(text.offset, message, last=True))
    return scan


def _add_elements(text: _ArrayText, scan: RowScan) -> None:
    """Read each object of the JSON array in `text` and add it to the result `scan`. Raises ValueError at the first
    error, such as invalid JSON or an element that is no object; the objects before the error stay in `scan`."""
    if text.next() != "[":
        raise ValueError("is no array of rows [{…}, …] and no JSON-lines")
    text.take(1)
    while text.next() != "]":
        if scan.key:
            if text.next() != ",":
                raise ValueError("is not JSON: a ',' or ']' is missing before it")
            text.take(1)
            text.next()
        value, length = text.value()
        if error := _type_error(value):
            raise ValueError(error)
        offset = text.offset
        content = text.take(length)
        if len(content) > MAX_ROW:
            raise ValueError(f"is longer than {MAX_ROW} bytes")
        scan.add(len(scan.key) + 1, offset, content)
    text.take(1)
    if text.next():
        raise ValueError("is not expected: the array is closed before it")


# ---- tables --------------------------------------------------------------------------------------------------------


def cells(row: bytes, quoted: bool = True) -> list[str]:
    """Split one row of a table into cells, which are separated by tabs and, if `quoted`, quoted as in CSV.

    row: its bytes, UTF-8; several lines if a quoted cell has line breaks. Raises ValueError when the row is not UTF-8,
    csv.Error when its quoting is invalid.
    """
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return next(csv.reader([row.decode("utf-8")], delimiter="\t", strict=True, quoting=quoting), [])


def header(row: bytes) -> tuple[list[str], bool]:
    """Return the column names of a table, and whether its first line has these names. row: the bytes of the first line.

    A table without a line of names must be one of MS MARCO: ids and texts; triples of ids; or triples of question,
    right and wrong passage. Cells are then not quoted. Raises ValueError when the first line is none of these.
    """
    line = decoded(row.rstrip(b"\r\n"))
    names = found = line.split("\t")
    with suppress(csv.Error):
        names = cells(line.encode())
    if names and all(map(NAME.fullmatch, names)) and len({*names}) == len(names):
        return names, True
    match found:
        case [number, _] if number.isdigit():
            return ["id", "text"], False
        case [_, _, _] if all(map(str.isdigit, found)):
            return ID_TRIPLES, False
        case [_, right, wrong] if min(len(right.split()), len(wrong.split())) >= PASSAGE_WORDS:
            return ["anchor", "positive", "negative"], False
    raise ValueError(f"does not name its columns, one word each and no word twice, with tabs between: {line!r:.80}")


def scan_table(stream: BinaryIO, start: int = 0) -> RowScan:
    """Scan a table of tab-separated values, such as psgs_w100.tsv, or collection.tsv of MS MARCO.

    The first line names the columns, except in tables of MS MARCO, which `header` recognises. Each row becomes a sample
    with one member 'tsv', the bytes of the row. The sample's key is the number of the row's first line; a quoted cell
    may span several lines. Empty lines are left out. Invalid rows are added to the `problems` of the result; the scan
    ends at once if the first line is invalid. start: the byte offset in the file at which `stream` begins.
    """
    scan = RowScan("tsv")
    first = stream.readline(MAX_ROW)
    try:
        names, named = header(first)
    except (ValueError, csv.Error) as error:
        scan.problems.add(Problem(start, f"line 1 {_reason(error)}", last=True))
        return scan
    width, pending = len(names), [] if named else [first]
    row: list[bytes] = []  # the lines of the current row: several if a quoted cell spans lines
    size = 0  # bytes of these lines

    def next_line() -> str:
        nonlocal size
        line = pending.pop() if pending else stream.readline(MAX_ROW)
        if line:
            row.append(line)
        size += len(line)
        if size >= MAX_ROW:
            raise ValueError(f"is longer than {MAX_ROW} bytes; is a quote not closed?")
        return line.decode("utf-8")

    quoting = csv.QUOTE_MINIMAL if named else csv.QUOTE_NONE
    reader = csv.reader(iter(next_line, ""), delimiter="\t", strict=True, quoting=quoting)
    offset, number = (start + len(first), 2) if named else (start, 1)
    while True:
        row.clear()
        size = columns = 0
        try:
            columns = len(next(reader))
            wrong = "" if columns in (0, width) else f"has {columns} columns, the first line has {width}"
        except StopIteration:
            return scan
        except (ValueError, csv.Error) as error:
            wrong = _reason(error)
        content = b"".join(row)
        if wrong:
            lost = f"; {len(row)} lines are lost by it" if len(row) > 1 else ""
            scan.problems.add(Problem(offset, f"line {number} {wrong}{lost}"))
        elif columns:
            scan.add(number, offset, content.rstrip(b"\r\n"))
        offset, number = offset + len(content), number + len(row)


def _reason(error: Exception) -> str:
    """Return the reason of an error as the end of a message "line N …"."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return f"cannot be read as tab-separated values: {error}" if isinstance(error, csv.Error) else str(error)

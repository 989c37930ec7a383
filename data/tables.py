"""Pairs as people keep them (CSV, a folder, Parquet, JSON-lines), read row by row; messages name the row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import ConfigError, DataError, nearest
from data.json_text import parse_json
from data.scan import MAX_BYTES, PICTURES
from data.verbs.options import PackOptions

IMAGE_FIELDS = ("image", "filepath", "image_path", "file_name", "filename", "path")
CAPTION_FIELDS = ("caption", "title", "text", "captions", "texts", "sentences")


class BadRow(Exception):
    """A row that cannot become a sample. reason: a few words to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


Fields = dict[str, Any]
Rows = Iterator[tuple[str, "Fields | BadRow"]]


@dataclass(frozen=True)
class Pair:
    """A picture's path, its caption (a list where the table has lists) and the other fields of the row."""

    image: Path
    caption: str | list[str]
    extra: Fields


@dataclass(frozen=True)
class Table:
    """An input. `listed`: captions are lists; `extra`: there are fields besides picture and caption; both for the whole
    table, because all samples of a shard have the same members. `rows()` starts anew: (where, fields as they stand).
    """

    folder: Path
    image_key: str
    caption_key: str
    listed: bool
    extra: bool
    rows: Callable[[], Rows]

    def pair(self, fields: Fields | BadRow) -> Pair:
        """Raises BadRow when the picture's path or a caption is missing, empty or no text."""
        if isinstance(fields, BadRow):
            raise fields
        image, caption = fields.get(self.image_key), fields.get(self.caption_key)
        if not image or not isinstance(image, str):
            raise BadRow("no picture path", f"{self.image_key} = {image!r:.80}" if image else "")
        texts = caption if isinstance(caption, list) else [caption]
        if caption is None or not texts:
            raise BadRow("no caption")
        if not all(isinstance(text, str) for text in texts):
            raise BadRow("caption is no text", f"{caption!r:.80}")
        stripped = [str(text).strip() for text in texts]
        if not all(stripped):
            raise BadRow("empty caption")
        try:
            "".join(stripped).encode()
        except UnicodeEncodeError:
            raise BadRow("caption is no Unicode text", f"{caption!r:.80}") from None
        extra = {key: value for key, value in fields.items() if key not in (self.image_key, self.caption_key)}
        return Pair(self.folder / image, stripped if self.listed else _lines(stripped), extra)


def _lines(captions: list[str]) -> str:
    """As a txt member holds captions: one per line, so that none may have a line break of its own."""
    return "\n".join(" ".join(caption.splitlines()) for caption in captions)


def open_table(path: Path, options: PackOptions) -> Table:
    """The table of an input. Raises ConfigError when it is no known kind or lacks the columns that are asked for."""
    if path.is_dir():
        return Table(path, "image", "caption", listed=False, extra=False, rows=lambda: _folder_rows(path))
    if not path.is_file():
        near = nearest(path.name, [file.name for file in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"INPUT {path} does not exist.{near}")
    if path.suffix not in OPENERS:
        raise ConfigError(f"INPUT {path}: takes a folder of pictures and .txt files, or {', '.join(OPENERS)}.")
    return OPENERS[path.suffix](path, options)


def _chosen(
    path: Path, key: str, wanted: str | None, candidates: Sequence[str], columns: Sequence[str], hint: str = ""
) -> str:
    """The column to use: the one the option `key` names, else the first candidate that is there."""
    found = [name for name in ([wanted] if wanted else candidates) if name in columns]
    if not found:
        lacks = f"no column '{wanted}'.{nearest(wanted, columns)}" if wanted else f"none of {', '.join(candidates)}."
        raise ConfigError(f"{path}: {lacks} Its columns are {', '.join(columns)}: set {key}=.{hint}")
    return found[0]


# ---- CSV -----------------------------------------------------------------------------------------------------------


def _csv(path: Path, options: PackOptions) -> Table:
    separator = options.csv_separator.replace("\\t", "\t")
    if len(separator) != 1:
        raise ConfigError(f"csv_separator='{options.csv_separator}' is not one character (\\t is a tab).")
    _, columns = next(_csv_cells(path, separator), (0, []))
    if isinstance(columns, BadRow):
        raise DataError(f"{path}: its first line cannot be read: {columns}")
    hint = " Is csv_separator right?" if len(columns) < 2 else ""
    image = _chosen(path, "csv_image_key", options.csv_image_key, (), columns, hint)
    caption = _chosen(path, "csv_caption_key", options.csv_caption_key, (), columns, hint)
    rows = lambda: _csv_rows(path, separator)  # noqa: E731
    return Table(path.parent, image, caption, listed=False, extra=len(columns) > 2, rows=rows)


def _csv_rows(path: Path, separator: str) -> Rows:
    lines = _csv_cells(path, separator)
    columns = next(lines)[1]
    assert not isinstance(columns, BadRow), "refused by _csv"
    for number, (line, cells) in enumerate(lines, start=1):
        yield f"row {number} (line {line})", cells if isinstance(cells, BadRow) else _csv_fields(columns, cells)


def _csv_fields(columns: list[str], cells: list[str]) -> Fields | BadRow:
    fields = dict(zip(columns, cells, strict=False))  # a missing caption is reported as such
    return BadRow("too many columns") if len(cells) > len(columns) else fields


def _csv_cells(path: Path, separator: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Line number and cells of each row that is not blank. utf-8-sig: spreadsheets write a byte-order mark.

    Raises DataError for a broken row that may go on in the next line, which is then no row of its own.
    """
    row: list[str] = []  # its lines so far

    def lines(file: Iterable[str]) -> Iterator[str]:
        for line in file:
            row.append(line)
            yield line

    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(lines(file), delimiter=separator, strict=True)
        while True:
            row.clear()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "".join(row).count('"') % 2:
                    raise DataError(f"{path}: line {reader.line_num}: {error}; mend the quotes of this row") from error
                cells = BadRow("no row of a CSV", str(error))
            if cells:
                yield reader.line_num, cells


# ---- a folder ------------------------------------------------------------------------------------------------------


def _folder_rows(folder: Path) -> Rows:
    """A row per picture, with the text of the .txt file of the same stem, and one per .txt file without a picture."""
    files = sorted(file for file in folder.rglob("*") if not file.name.startswith(".") and file.is_file())
    pictures = [file for file in files if file.suffix.lower().removeprefix(".") in PICTURES]
    for picture in pictures:
        name = str(picture.relative_to(folder))
        try:
            _refuse_link(picture, folder)
            fields = {"image": name, "caption": _text_beside(picture, folder)}
        except BadRow as bad:
            fields = bad
        yield name, fields
    stems = {picture.with_suffix("") for picture in pictures}
    for file in files:
        if file.suffix.lower() == ".txt" and file.with_suffix("") not in stems:
            yield str(file.relative_to(folder)), BadRow("no picture beside the text")


def _refuse_link(file: Path, folder: Path) -> None:
    """A link could lead to any file of this disk, and what is packed is given away. Raises BadRow."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise BadRow("link out of the folder", f"{file}; copy what it leads to (cp -L)")


def _text_beside(picture: Path, folder: Path) -> list[str] | None:
    """The captions in the .txt file of a picture, one per line. Raises BadRow."""
    file = picture.with_suffix(".txt")
    if not file.is_file():
        return None
    _refuse_link(file, folder)
    try:
        text = content(file, MAX_BYTES["txt"]).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow("caption is no text", f"{file} is not UTF-8 at byte {error.start}") from None
    return [line for line in text.splitlines() if line.strip()]


def content(path: Path, most: int) -> bytes:
    """What a file holds. Raises BadRow when it is missing, no file, or of more than `most` bytes."""
    try:
        if not path.exists():
            raise BadRow("missing file", str(path))
        if not path.is_file():  # a pipe would be waited for
            raise BadRow("unreadable file", f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise BadRow("unreadable file", f"{path} ({error})") from None
    if len(data) > most:
        raise BadRow("file too big", f"{path}: more than {most} bytes")
    return data


# ---- Parquet and JSON-lines ----------------------------------------------------------------------------------------


def _parquet(path: Path, options: PackOptions) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error
    image = _chosen(path, "image_key", options.image_key, IMAGE_FIELDS, schema.names)
    caption = _chosen(path, "caption_key", options.caption_key, CAPTION_FIELDS, schema.names)
    kind = schema.field(caption).type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return Table(path.parent, image, caption, listed, len(schema.names) > 2, lambda: _parquet_rows(path))


def _parquet_rows(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=1024)
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
                raise DataError(f"{path}: after row {number} it cannot be read: {error}") from error
            for fields in rows:
                number += 1
                yield f"row {number}", fields


def _jsonl(path: Path, options: PackOptions) -> Table:
    """Lines are free to differ, so they are read once before: for the fields, and whether any caption is a list."""
    kept = [fields for _, fields in _jsonl_rows(path) if isinstance(fields, dict)]
    columns = list(dict.fromkeys(name for fields in kept for name in fields))
    image = _chosen(path, "image_key", options.image_key, IMAGE_FIELDS, columns)
    caption = _chosen(path, "caption_key", options.caption_key, CAPTION_FIELDS, columns)
    listed = any(isinstance(fields.get(caption), list) for fields in kept)
    return Table(path.parent, image, caption, listed, len(columns) > 2, lambda: _jsonl_rows(path))


def _jsonl_rows(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = parse_json(line)
            except ValueError as error:
                yield f"line {number}", BadRow("no JSON", str(error))
                continue
            yield f"line {number}", fields if isinstance(fields, dict) else BadRow("no JSON object")


OPENERS: dict[str, Callable[[Path, PackOptions], Table]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".jsonl": _jsonl,
}

"""Read tables of pictures and captions row by row: a CSV, Parquet or JSON-lines file, or a folder.

Error messages name the row.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dyad.data.base.errors import BadRow, ConfigError, DataError, nearest
from dyad.data.base.json_text import parse_json
from dyad.data.cli.options import PackOptions
from dyad.data.shards.scan_tar import MAX_BYTES, PICTURES

IMAGE_FIELDS = ("image", "filepath", "image_path", "file_name", "filename", "path")
CAPTION_FIELDS = ("caption", "title", "text", "captions", "texts", "sentences")


Fields = dict[str, Any]
TableRows = Iterator[tuple[str, Fields | BadRow]]  # where the row stands, for messages; its fields


@dataclass(frozen=True)
class TablePair:
    """A picture and its captions from one row. image: the picture's path; caption: a text, or a list of texts where the
    table has lists; extra: the other fields of the row."""

    image: Path
    caption: str | list[str]
    extra: Fields


@dataclass(frozen=True)
class PairTable:
    """A table of pictures and captions, opened by `open_table`.

    folder: the folder that picture paths are relative to. image_key, caption_key: names of the columns. listed: whether
    captions are lists. extra: whether there are columns besides picture and caption. rows: a function that reads the
    rows from the start. `listed` and `extra` hold for the whole table, because all samples of a shard must have the
    same members.
    """

    folder: Path
    image_key: str
    caption_key: str
    listed: bool
    extra: bool
    rows: Callable[[], TableRows]

    def pair(self, fields: Fields | BadRow) -> TablePair:
        """Convert one row of a table (column -> value) to a TablePair, a picture's path and its captions. Raises BadRow
        when the path or a caption is missing, empty or not text. If `fields` is itself a BadRow, it is raised."""
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
        # a txt member holds one caption per line: line breaks inside a caption become blanks
        lines = "\n".join(" ".join(caption.splitlines()) for caption in stripped)
        return TablePair(self.folder / image, stripped if self.listed else lines, extra)


def open_table(path: Path, options: PackOptions) -> PairTable:
    """Open the table of pictures and captions at `path`, a folder or a file (.csv, .tsv, .parquet, .jsonl).

    options: names of the picture column and the caption column, and the separator of a CSV. Raises ConfigError for
    another kind of file or a missing column, and DataError for a file that cannot be read.
    """
    if path.is_dir():
        return PairTable(path, "image", "caption", listed=False, extra=False, rows=partial(_folder_rows, path))
    if not path.is_file():
        near = nearest(path.name, [file.name for file in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"INPUT {path} does not exist.{near}")
    if path.suffix not in OPENERS:
        raise ConfigError(f"INPUT {path}: takes a folder of pictures and .txt files, or {', '.join(OPENERS)}.")
    return OPENERS[path.suffix](path, options)


def _chosen(path: Path, key: str, wanted: str | None, candidates: Sequence[str], columns: Sequence[str]) -> str:
    """Return the name of the column to use: `wanted` if it is set, otherwise the first of `candidates` that is in
    `columns`. path: the table's file and key: the option that sets `wanted`, both for messages. Raises ConfigError when
    the table lacks the column."""
    found = [name for name in ([wanted] if wanted else candidates) if name in columns]
    if not found:
        lacks = f"no column '{wanted}'.{nearest(wanted, columns)}" if wanted else f"none of {', '.join(candidates)}."
        hint = " Is csv_separator right?" if key.startswith("csv_") and len(columns) < 2 else ""
        raise ConfigError(f"{path}: {lacks} Its columns are {', '.join(columns)}: set {key}=.{hint}")
    return found[0]


# ---- CSV -----------------------------------------------------------------------------------------------------------


def _csv(path: Path, options: PackOptions) -> PairTable:
    separator = options.csv_separator.replace("\\t", "\t")
    if len(separator) != 1:
        raise ConfigError(f"csv_separator='{options.csv_separator}' is not one character (\\t is a tab).")
    _, columns = next(_csv_cells(path, separator), (0, []))
    if isinstance(columns, BadRow):
        raise DataError(f"{path}: its first line cannot be read: {columns}")
    image = _chosen(path, "csv_image_key", options.csv_image_key, (), columns)
    caption = _chosen(path, "csv_caption_key", options.csv_caption_key, (), columns)
    return PairTable(path.parent, image, caption, False, len(columns) > 2, partial(_csv_rows, path, separator, columns))


def _csv_rows(path: Path, separator: str, columns: Sequence[str]) -> TableRows:
    for number, (line, cells) in enumerate(islice(_csv_cells(path, separator), 1, None), start=1):
        if isinstance(cells, list):  # missing cells: PairTable.pair reports a missing caption
            long = len(cells) > len(columns)
            cells = BadRow("too many columns") if long else dict(zip(columns, cells, strict=False))
        yield f"row {number} (line {line})", cells


def _csv_cells(path: Path, separator: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield the line number and the cells of each CSV row that is not blank. An invalid row gives a BadRow (an error
    object) in place of the cells.

    Raises DataError for a row with an open quote, because it is then unknown where the next row begins.
    """
    row: list[str] = []  # the lines of the current row, so far

    def lines(file: Iterable[str]) -> Iterator[str]:
        for line in file:
            row.append(line)
            yield line

    # utf-8-sig: spreadsheets write a byte-order mark
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


def _folder_rows(folder: Path) -> TableRows:
    """Yield a row (name, fields) for each picture in the folder, with the captions from the .txt file of the same stem.
    A BadRow (an error object) replaces the fields of a row that cannot be used. Then yield a BadRow for each .txt file
    without a picture."""
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
    """Raise BadRow if `file` is a symbolic link that leads out of the folder. Packed shards are shared with others, so
    no file from outside the folder may get into a shard."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise BadRow("link out of the folder", f"{file}; copy what it leads to (cp -L)")


def _text_beside(picture: Path, folder: Path) -> list[str] | None:
    """Return the captions in the .txt file beside a picture, one per line; None if there is no such file. Raises BadRow
    for a file that is too big, not UTF-8, or a link out of the folder."""
    file = picture.with_suffix(".txt")
    if not file.is_file():
        return None
    _refuse_link(file, folder)
    try:
        text = content(file, MAX_BYTES["txt"]).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow("caption is no text", f"{file} is not UTF-8 at byte {error.start}") from None
    return [line for line in text.splitlines() if line.strip()]


def content(path: Path, limit: int) -> bytes:
    """Read a file and return its bytes. Raises BadRow when it is missing, not a regular file, or larger than `limit`
    bytes."""
    try:
        if not path.exists():
            raise BadRow("missing file", str(path))
        if not path.is_file():  # reading a pipe could block
            raise BadRow("unreadable file", f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise BadRow("unreadable file", f"{path} ({error})") from None
    if len(data) > limit:
        raise BadRow("file too big", f"{path}: more than {limit} bytes")
    return data


# ---- Parquet and JSON-lines ----------------------------------------------------------------------------------------


def _parquet(path: Path, options: PackOptions) -> PairTable:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error
    image = _chosen(path, "image_key", options.image_key, IMAGE_FIELDS, schema.names)
    caption = _chosen(path, "caption_key", options.caption_key, CAPTION_FIELDS, schema.names)
    kind = schema.field(caption).type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return PairTable(path.parent, image, caption, listed, len(schema.names) > 2, partial(_parquet_rows, path))


def _parquet_rows(path: Path) -> TableRows:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            rows = (fields for batch in file.iter_batches(batch_size=1024) for fields in batch.to_pylist())
            for number, fields in enumerate(rows, start=1):
                yield f"row {number}", fields
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: after row {number} it cannot be read: {error}") from error


def _jsonl(path: Path, options: PackOptions) -> PairTable:
    """Open a JSON-lines table. Reads all lines once to find the columns and whether any caption is a list, because each
    line may have other fields."""
    objects = [fields for _, fields in _jsonl_rows(path) if isinstance(fields, dict)]
    columns = list(dict.fromkeys(name for fields in objects for name in fields))
    image = _chosen(path, "image_key", options.image_key, IMAGE_FIELDS, columns)
    caption = _chosen(path, "caption_key", options.caption_key, CAPTION_FIELDS, columns)
    listed = any(isinstance(fields.get(caption), list) for fields in objects)
    return PairTable(path.parent, image, caption, listed, len(columns) > 2, partial(_jsonl_rows, path))


def _jsonl_rows(path: Path) -> TableRows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = parse_json(line)
                row = fields if isinstance(fields, dict) else BadRow("no JSON object")
            except ValueError as error:
                row = BadRow("no JSON", str(error))
            yield f"line {number}", row


OPENERS: dict[str, Callable[[Path, PackOptions], PairTable]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".jsonl": _jsonl,
}

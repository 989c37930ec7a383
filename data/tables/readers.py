"""Read all rows of a table in order: CSV, Parquet, Arrow, JSON-lines, JSON. Error messages name the row."""

import csv
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from typing import Any

from dyad.data.base.errors import BadRow, ConfigError, DataError, first_line
from dyad.data.base.json_text import parse_json
from dyad.data.shards.scan_rows import ID_TRIPLES, header
from dyad.data.shards.scan_tar import MAX_BYTES
from dyad.data.shards.storage import open_buffered, shard_name, suffix_of
from dyad.data.shards.text_files import CODECS, open_text
from dyad.data.tables.coco import Fields, caption_rows, split_of

COLUMNAR = (".parquet", ".arrow", ".feather")
SEPARATORS = ("\t", ",", ";", "|", "::")  # of a line with the names of columns, which may have blanks
SEPARATOR_NAMES = " ".join(SEPARATORS).replace("\t", "tab")
UNIT_SEPARATOR = "\x1f"  # replaces a separator of two characters, which the module csv does not take
HEAD = 20  # number of first rows by which the content of a table is recognised
TRIPLES = ("query_id", "query_text", "positive_document_ids", "negative_document_ids")  # columns of triples of ids
MOST_OF_COCO = 1 << 26  # most commas and opening brackets of a .json file: a million captions have some millions
BATCH = 256  # rows of Parquet that are held at a time: each may have an image
UNFOLDED = 1 << 29  # bytes of rows that are held as Python objects at a time

Row = Fields | BadRow  # the fields of a row, or the error of a row that cannot be used
TableRows = Iterator[tuple[str, Row]]  # (location of the row, for messages; the row)


@dataclass(frozen=True)
class Table:
    """A table whose rows are read in order.

    path: path of its file or folder, or a URL. columns: names of the columns; of JSON-lines and JSON arrays the fields
    of the first rows. rows(): yields all rows from the start. folder: the folder to which image paths are relative;
    None for a URL, whose image paths are not followed. files(): returns the paths of the files from which the rows are
    read; for a folder of images, also the images.
    """

    path: str
    columns: Sequence[str]
    rows: Callable[[], TableRows]
    folder: str | None
    files: Callable[[], Iterable[str]]

    def head(self) -> list[Fields]:
        """Return the fields of the first HEAD (20) rows of this table, without rows that cannot be read."""
        return _head(self.rows)


def open_table(path: str, names: Sequence[str] = ()) -> Table:
    """Open the table in the file (or URL) `path`, or a split of a file that `split_of` knows.

    Its suffix, or the one before that of a compressed file, says how it is read; of another suffix than those of
    OPENERS as CSV. names: the columns of a file of text whose first line is a row and does not name them; all of them,
    in order.

    Raises DataError for a table that cannot be read or has two columns of one name; ConfigError for a missing file or
    storage driver, for triples of ids without a file of questions, for another number of `names` than of cells, and for
    `names` of a file that is not of text in cells.
    """
    file, split = split_of(path)
    opener = partial(_unnamed, names=names) if names else OPENERS.get(_kind(path), _csv)
    columns, rows = _json(file, split) if split else opener(path)
    if twice := next((name for name, count in Counter(columns).items() if name and count > 1), None):
        raise DataError(f"{path}: several columns are named {twice!r:.80}: which one is meant? Rename the others")
    folder = None if "://" in path else os.path.dirname(path)
    queries = [_queries_beside(path)] if columns is TRIPLES else []
    return Table(path, columns, rows, folder, lambda: [file, *queries])


def _kind(path: str) -> str:
    """Return the suffix of a table's name, of a compressed table the one before .gz, .bz2 or .zst."""
    suffix = suffix_of(path)
    return suffix_of(path.removesuffix(suffix)) if suffix in CODECS else suffix


Opened = tuple[Sequence[str], Callable[[], TableRows]]  # names of the columns; a function that yields the rows


# ---- CSV -----------------------------------------------------------------------------------------------------------


def _csv(path: str) -> Opened:
    """Open a CSV. Its separator is the one of SEPARATORS that splits the first line into the most columns."""
    first = {separator: next(_csv_cells(path, separator), (0, []))[1] for separator in SEPARATORS}
    # a wrong separator may break the quotes of a line; if two give equally many columns, the first is taken
    found = {separator: columns for separator, columns in first.items() if isinstance(columns, list)}
    if not found:
        raise DataError(f"{path}: its first line cannot be read: {first[SEPARATORS[0]]}")
    separator, columns = max(found.items(), key=lambda item: len(item[1]))
    if not columns:
        raise DataError(f"{path} has no rows.")
    return columns, lambda: _csv_rows(path, separator, columns, has_names=True)


def _unnamed(path: str, names: Sequence[str]) -> Opened:
    """Open a CSV whose first line is a row. Its separator, which may also be a blank, is one that splits this line into
    as many cells as there are `names`. Raises ConfigError if none does, and for a file of another format."""
    if OPENERS.get(_kind(path), _csv) not in (_csv, _tsv):
        raise ConfigError(f"columns=[{','.join(names)}]: {path} names its columns. Leave columns out")
    first = {separator: next(_csv_cells(path, separator), (0, []))[1] for separator in (*SEPARATORS, " ")}
    found = {separator: row for separator, row in first.items() if isinstance(row, list)}
    separator = next((separator for separator, row in found.items() if len(row) == len(names)), None)
    if separator is None:
        raise ConfigError(
            f"columns=[{','.join(names)}]: the first line of {path} has not {len(names)} cells, but "
            f"{max(found.values(), key=len, default=[])!s:.80}. Name all of them, in their order. Separators are "
            f"{SEPARATOR_NAMES}, and one blank"
        )
    return names, lambda: _csv_rows(path, separator, names, has_names=False)


def _csv_rows(path: str, separator: str, columns: Sequence[str], has_names: bool) -> TableRows:
    """Yield the rows of a CSV. has_names: whether its first line has the names of the columns, and is no row."""
    for number, (line, row) in enumerate(islice(_csv_cells(path, separator), int(has_names), None), start=1):
        if isinstance(row, list):  # missing cells at the end are reported only where they are needed
            row = BadRow("too many columns") if len(row) > len(columns) else dict(zip(columns, row, strict=False))
        yield f"row {number} (line {line})", row


def _csv_cells(path: str, separator: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield (number of its last line, cells) for each CSV row that is not blank. For an invalid row the cells are
    replaced by a BadRow (an error object).

    Raises DataError for a row with an open quote, because it is then unknown where the next row begins.
    """
    row: list[str] = []  # the lines of the current row, so far
    delimiter = separator if len(separator) == 1 else UNIT_SEPARATOR

    def lines(file: Iterable[str]) -> Iterator[str]:
        for line in file:
            row.append(line)
            yield line.replace(separator, delimiter)

    with TextIOWrapper(open_text(path), newline="", encoding="utf-8", errors="surrogateescape") as file:
        reader = csv.reader(lines(file), delimiter=delimiter, strict=True)
        while True:
            row.clear()
            try:
                found = [cell.replace(delimiter, separator) for cell in next(reader)]  # quoted cells may have it
            except StopIteration:
                return
            except csv.Error as error:
                if "".join(row).count('"') % 2:
                    raise DataError(f"{path}: line {reader.line_num}: {error}; mend the quotes of this row") from error
                found = BadRow("no row of a CSV", str(error))
            if found:
                yield reader.line_num, found


# ---- triples of ids, as MS MARCO has them ----------------------------------------------------------------------------


def _tsv(path: str) -> Opened:
    """Open a .tsv file: a table with a line of column names, or one of MS MARCO, which has no such line.

    Rows of three ids (question, right passage, wrong passage) get the fields TRIPLES; their questions are read from
    queries.train.tsv or queries.tsv beside the file, without which `open_table` raises ConfigError.
    """
    with open_text(path) as file:
        line = file.readline(MAX_BYTES["json"])
    try:
        names, named = header(line)
    except ValueError:
        named, names = True, []
    if named:
        return _csv(path)
    if names != ID_TRIPLES:
        return names, lambda: _lines(path, lambda line: dict(zip(names, _cells(line), strict=False)))
    return TRIPLES, lambda: _triples(path, _queries_beside(path))


def _queries_beside(path: str) -> str:
    """Return the path of the questions of the triples in the file `path`. Raises ConfigError when there are none."""
    beside = [os.path.join(os.path.dirname(path), name) for name in ("queries.train.tsv", "queries.tsv")]
    if (queries := next(filter(os.path.isfile, beside), None)) is None:
        raise ConfigError(
            f"{path} has ids of questions and passages: put queries.train.tsv (id, text) beside it. "
            "If it is a log of events: python -m data sequences FILE columns=[user,item,time]"
        )
    return queries


def _lines(path: str, convert: Callable[[bytes], Row]) -> TableRows:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", convert(line)


def _cells(line: bytes) -> list[str]:
    return line.decode(errors="surrogateescape").rstrip("\r\n").split("\t")  # a row with invalid UTF-8 is refused later


def _triples(path: str, queries: str) -> TableRows:
    texts = dict(_questions(queries))

    def row(line: bytes) -> Row:
        match _cells(line):
            case [question, right, wrong] if question in texts:
                return dict(zip(TRIPLES, (question, texts[question], [right], [wrong]), strict=True))
            case found:
                return BadRow("no triple of ids", f"{found!r:.80}; questions are in {queries}")

    return _lines(path, row)


def _questions(path: str) -> Iterator[tuple[str, str]]:
    """Yield (id, text) of each question in a file of MS MARCO, whose lines are id <tab> text. Blank lines are skipped.
    Raises DataError for a line of another form."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            match _cells(line):
                case [question, text, *_] if line.decode(errors="ignore").encode() == line:
                    yield question, text
                case other if line.strip():
                    raise DataError(f"{path}: line {number} is {other!r:.80}, not id and text in UTF-8, a tab between")


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------


def _columnar(path: str) -> Opened:
    """Open a Parquet or Arrow file. Numbers in columns of class labels are replaced by the class names, which the
    library `datasets` stores in the metadata of the schema."""
    import pyarrow as pa

    try:
        schema = next(_batches(path))
    except (pa.ArrowException, OSError, ValueError) as error:  # names of columns that are not UTF-8
        raise DataError(f"{path} cannot be read as {suffix_of(path)}: {first_line(error)}") from error
    labels = _class_labels(schema)

    def rows() -> TableRows:
        number = 0
        try:
            batches = map(_in_microseconds, islice(_batches(path), 1, None))
            for number, fields in enumerate(chain.from_iterable(map(_unfolded, batches)), start=1):
                for name, names in labels.items():
                    if isinstance(value := fields[name], int) and 0 <= value < len(names):
                        fields[name] = names[value]
                yield f"row {number}", fields
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"{path}: after row {number} it cannot be read: {first_line(error)}") from error

    return schema.names, rows


def _batches(path: str) -> Iterator[Any]:
    """Yield the schema of a Parquet or Arrow file, then its rows as record batches of at most BATCH rows. An Arrow file
    may be a stream, as `datasets` writes, or a file with an index, as pyarrow and Feather write."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_buffered(path) as raw:
        if shard_name(path).endswith(".parquet"):
            columns = pq.ParquetFile(raw).schema
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
            # a value that many rows share is held once: kilobytes could else unfold to gigabytes
            file = pq.ParquetFile(raw, read_dictionary=texts)
            yield file.schema_arrow
            for group in range(file.num_row_groups):  # a batch over two groups would have two dictionaries of a column
                yield from file.iter_batches(batch_size=BATCH, row_groups=[group])
            return
        is_file = raw.peek(6)[:6] == b"ARROW1"
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(raw)
        yield reader.schema
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            batch.validate(full=True)  # offsets in an untrusted file could lead out of it
            yield from (batch.slice(start, BATCH) for start in range(0, len(batch), BATCH))


def _in_microseconds(batch: Any) -> Any:
    """Return an Arrow record batch with columns of nanoseconds cut to microseconds: Python's own times hold no more."""
    import pyarrow as pa

    def cut(kind: Any) -> Any:
        if getattr(kind, "unit", None) != "ns":
            return kind
        if pa.types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz)
        return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")

    return batch.cast(pa.schema([field.with_type(cut(field.type)) for field in batch.schema]), safe=False)


def _unfolded(batch: Any) -> Iterator[Fields]:
    """Yield the rows of an Arrow record batch as dicts.

    A few rows at a time are converted to Python objects: a value that the batch stores once for many rows (dictionary
    encoding) is copied for each row, so that one row may take as much memory as the whole batch.
    """
    step = max(1, min(BATCH, UNFOLDED // max(batch.nbytes, 1)))
    for start in range(0, len(batch), step):
        yield from batch.slice(start, step).to_pylist()


def _class_labels(schema: Any) -> dict[str, list[str]]:
    """Return {name of a column: names of its classes} for the columns of class labels in an Arrow schema.

    The library `datasets` writes them into the metadata of the schema. The dict is empty if there are none, or the
    metadata cannot be read.
    """
    try:
        features = parse_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        labels = {name: one["names"] for name, one in features.items() if one.get("_type") == "ClassLabel"}
        return {name: [str(each) for each in names] for name, names in labels.items() if name in schema.names}
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _jsonl(path: str) -> Opened:
    rows = partial(_lines, path, _object)
    return _named(rows), rows


def _object(line: bytes) -> Row:
    try:
        fields = parse_json(line)
    except ValueError as error:
        return BadRow("no JSON", str(error))
    return fields if isinstance(fields, dict) else BadRow("no JSON object")


def _named(rows: Callable[[], TableRows]) -> list[str]:
    """Return the names of all fields of the first HEAD rows."""
    return list(dict.fromkeys(name for fields in _head(rows) for name in fields))


def _head(rows: Callable[[], TableRows]) -> list[Fields]:
    return [fields for _, fields in islice(rows(), HEAD) if isinstance(fields, dict)]


def _json(path: str, split: str | None = None) -> Opened:
    """Open a .json file: an array of objects, JSON lines, or captions that `caption_rows` converts. split: the name of
    one of Karpathy's splits."""
    if split is not None and not is_coco(path):
        raise ConfigError(f"{path}@{split}: only files of Karpathy have splits. A weight is a number, like @0.5")
    if _has_lines(path):
        return _jsonl(path)

    def rows() -> TableRows:
        with open_text(path) as file:
            try:
                value = parse_json(file.read(), MOST_OF_COCO)
                found = caption_rows(value, path, split) if isinstance(value, dict) else value
                if not isinstance(found, list):
                    raise ValueError(f"its value is {found!r:.80}")
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is no array of objects, and has no captions as COCO: {error}") from error
        for number, fields in enumerate(found, start=1):
            yield f"row {number}", fields if isinstance(fields, dict) else BadRow("no JSON object")

    return ("file_name", "captions") if is_coco(path) else _named(rows), rows


def is_coco(path: str) -> bool:
    """Whether a .json file begins as COCO annotations do: with an object whose first field is info, images, licenses,
    annotations or type. False for JSON lines. The rest of the file is not checked. Errors as of `open_text`."""
    with open_text(path) as file:
        begin = file.read(256).split(b":")[0].strip(b'{ \t\r\n"')
    return begin in (b"info", b"images", b"licenses", b"annotations", b"type") and not _has_lines(path)


def coco_files(folder: str) -> list[str]:
    """Return the files with COCO annotations in a folder and in its folder `annotations`, those of captions first."""
    names = (name for place in ("", "annotations/") for name in sorted(glob.glob(f"{place}*.json", root_dir=folder)))
    found = filter(is_coco, (os.path.join(folder, name) for name in names))
    return sorted(found, key=lambda file: "caption" not in os.path.basename(file))


def _has_lines(path: str) -> bool:
    """Whether a .json file has JSON lines: its first line is an object, and another line follows."""
    with open_text(path) as file:
        first = _object(file.readline(MAX_BYTES["json"]))
        return isinstance(first, dict) and any(line.strip() for line in file)


OPENERS = {".csv": _csv, ".tsv": _tsv, **dict.fromkeys(COLUMNAR, _columnar), ".jsonl": _jsonl, ".json": _json}

"""Read single rows of files as dicts, by byte offset.

The files are JSON-lines, JSON arrays, tables of tab-separated values, or tar shards; in a tar shard a row is the .json
file of a sample.
"""

import csv
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from dyad.data.base.errors import BadRow, DataError
from dyad.data.base.json_text import parse_json
from dyad.data.shards.index import ROW_SCANS
from dyad.data.shards.scan_rows import cells, header
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import ShardSource
from dyad.data.shards.storage import open_buffered, read_errors, sha256_of, stat

T = TypeVar("T")

SUFFIXES = (*ROW_SCANS, ".tar")
UNITS = {".jsonl": "line", ".tsv": "line", ".json": "row"}


def open_rows(files: Sequence[str]) -> "Rows":
    """Open all files and return their rows, in the order of `files`; files without an index are indexed first.

    Raises ConfigError for a missing file, DataError for a damaged one, also for a single bad row in it.
    """
    return Rows(open_shards([ShardSource(tuple(files))]))


class Rows:
    """Random access to the rows of several files by row index, 0 … len - 1 across all files. Can be pickled.

    files: paths of the files. fingerprint: a hash of their names and contents. shards: the opened files, each row as a
    sample.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.files = [index.path for index in shards.indexes]
        self.fingerprint = shards.fingerprint

    def __len__(self) -> int:
        return len(self.shards)

    def where(self, i: int) -> str:
        """Return the location of row i, counted over all opened files, as text for error messages.

        It has the path of its file and the line number, the position in a JSON array, or the sample key in a tar shard.
        """
        path, key = self.shards.origin(i)
        unit = UNITS.get(os.path.splitext(self.shards.locate(i)[0].name)[1])
        return f"{path}: {unit} {key}" if unit else f"{path}: sample '{key}'"

    def fields(self, i: int) -> dict[str, Any]:
        """Read row i and return it as a dict, field name -> value. i counts the rows of all opened files.

        The values of a table are texts. Raises DataError when its file has changed since it was indexed or cannot be
        read, and, naming the row, when the row is neither a JSON object nor a row of a table; SampleError, a DataError,
        when only the row's bytes are damaged.
        """
        return self.read(i, dict)

    def read(self, i: int, convert: Callable[[dict[str, Any]], T], error: type[DataError] = DataError) -> T:
        """Return convert(fields), where `fields` is row i as a dict. i counts the rows of all opened files.

        Raises `error`, naming the row, when the row is neither a JSON object nor a row of a table, or when `convert`
        raises BadRow; SampleError when the row's bytes are damaged; DataError when its file has changed since it was
        indexed or cannot be read.
        """
        try:
            return convert(self.parse(i))
        except BadRow as bad:
            raise error(f"{self.where(i)}: {bad}") from bad

    def parse(self, i: int) -> dict[str, Any]:
        """Read row i and return it as a dict, field name -> value, as `fields` does, with BadRow for a bad row.

        BadRow, which does not name the row, is raised when the row is neither a JSON object nor a row of a table, for
        example a tar sample without a .json file. Raises DataError when the file has changed since it was indexed or
        cannot be read; SampleError when the row's bytes are damaged. i counts the rows of all opened files.
        """
        index = self.shards.locate(i)[0]
        return parse_row(self.shards.read(i), lambda: _header(index.path, index.sha256, index.size, index.mtime))


def parse_row(members: dict[str, bytes], columns: Callable[[], tuple[list[str], bool]]) -> dict[str, Any]:
    """Convert a row, as the members of its sample (suffix -> bytes), to a dict, field name -> value.

    columns: returns the column names of the table that the row is of, and whether its first line has them; called only
    for a member 'tsv'. In a table with names, quotes around the cell `text` are removed. Raises BadRow when the row is
    neither a JSON object nor a row of a table.
    """
    try:
        if "json" in members:
            value = parse_json(members["json"])
            if not isinstance(value, dict):
                raise ValueError(f"a {type(value).__name__}, not an object {{…}}")
            return value
        if "tsv" in members:
            names, named = columns()
            fields = dict(zip(names, cells(members["tsv"], quoted=named), strict=True))
            if named and "text" in fields:
                fields["text"] = fields["text"].strip('"')  # as DPR reads passages
            return fields
    except (ValueError, csv.Error) as error:
        raise BadRow("unreadable row", str(error)) from error
    raise BadRow("no json member", f"its members are {', '.join(members)}")


@lru_cache(maxsize=1024)
def _header(path: str, sha256: str, *size_and_mtime: int | str) -> tuple[list[str], bool]:
    """Return the column names of the table at `path`, and whether its first line has them.

    sha256, size_and_mtime (two arguments): digest, size and time stamp of the file when it was indexed. Raises
    DataError when the content has changed since then, because the columns may have changed too, and when it cannot be
    read; ConfigError when the file is gone.
    """
    with read_errors(path):
        if stat(path) != size_and_mtime and sha256_of(path) != sha256:
            raise DataError(f"{path} has changed since it was indexed. Start again to index it anew.")
        with open_buffered(path) as stream:
            line = stream.readline()
    return header(line)

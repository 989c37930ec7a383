"""Rows of files as dicts of fields: JSON-lines, JSON arrays, tables and the json members of shards, by offset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from dyad.data.base.errors import BadRow, DataError
from dyad.data.base.json_text import parse_json
from dyad.data.shards.index import SCANS
from dyad.data.shards.scan_rows import cells, header
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import ShardSource
from dyad.data.shards.storage import open_stream, sha256_of, stat

T = TypeVar("T")

SUFFIXES = tuple(SCANS)
UNITS = {".jsonl": "line", ".tsv": "line", ".json": "row"}


def open_rows(files: Sequence[str]) -> Rows:
    """Index the files without an index, and open all. Raises as `open_shards`."""
    return Rows(open_shards([ShardSource(tuple(files))]))


class Rows:
    """The rows of some files, numbered 0 … len - 1 through all of them. Can be pickled."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.files = [index.path for index in shards.indexes]
        self.fingerprint = shards.fingerprint

    def __len__(self) -> int:
        return len(self.shards)

    def where(self, i: int) -> str:
        """The row's name in error messages: file and line, row of an array, or sample of a shard."""
        path, key = self.shards.origin(i)
        unit = UNITS.get(os.path.splitext(self.shards.locate(i)[0].name)[1])
        return f"{path}: {unit} {key}" if unit else f"{path}: sample '{key}'"

    def fields(self, i: int) -> dict[str, Any]:
        """The row. Raises DataError, naming the row, when its bytes have changed or are not an object."""
        return self.read(i, dict)

    def read(self, i: int, convert: Callable[[dict[str, Any]], T]) -> T:
        """convert(fields) of the row. Raises DataError as `fields`, and for a BadRow of `convert`."""
        try:
            return convert(self.parse(i))
        except BadRow as bad:
            raise DataError(f"{self.where(i)}: {bad}") from bad

    def parse(self, i: int) -> dict[str, Any]:
        """As `fields`, but raises BadRow for a row that is not an object. Only a sample of a shard can be such a row:
        the index leaves out such lines of other files."""
        members = self.shards.read(i)
        try:
            if "json" in members:
                value = parse_json(members["json"])
                if not isinstance(value, dict):
                    raise ValueError(f"a {type(value).__name__}, not an object {{…}}")
                return value
            if "tsv" in members:
                index = self.shards.locate(i)[0]
                names = _header(index.path, index.sha256, index.size, index.mtime)
                texts = [cell.strip('"') for cell in cells(members["tsv"])]  # DPR strips quotes that csv leaves
                return dict(zip(names, texts, strict=True))
        except ValueError as error:
            raise BadRow("unreadable row", str(error)) from error
        raise BadRow("no json member", f"its members are {', '.join(members)}")


@lru_cache(maxsize=1024)
def _header(path: str, sha256: str, *size_and_mtime: int | str) -> list[str]:
    """The column names of a table with this SHA-256, size and time stamp. A changed file may have other columns."""
    if stat(path) != size_and_mtime and sha256_of(path) != sha256:
        raise DataError(f"{path} has changed since it was indexed. Start again to index it anew.")
    with open_stream(path) as stream:
        return header(stream.readline())

"""Rows of files as fields: JSON-lines, JSON arrays, tables, and the json members of shards, read by offset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from data.errors import BadRow, DataError
from data.index import sha256_of
from data.json_text import parsed
from data.scan_rows import cells, header
from data.shards import Shards, open_shards
from data.sources import Source
from data.storage import open_stream, stat

SUFFIXES = (".jsonl", ".json", ".tsv", ".tar")
PLACES = {".jsonl": "line", ".tsv": "line", ".json": "row"}


def open_rows(files: Sequence[str]) -> Rows:
    """Index what is not indexed yet, and open. Raises as `open_shards`."""
    return Rows(open_shards([Source(tuple(files))]))


class Rows:
    """Rows 0 … len - 1 of some files. Can be pickled."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.files = [index.path for index in shards.indexes]
        self.fingerprint = shards.fingerprint

    def __len__(self) -> int:
        return len(self.shards)

    def where(self, i: int) -> str:
        """How an error names the row: file and line, row of an array, or sample of a shard."""
        path, key = self.origin(i)
        name = self.shards.locate(i)[0].name
        place = next((place for suffix, place in PLACES.items() if name.endswith(suffix)), None)
        return f"{path}: {place} {key}" if place else f"{path}: sample '{key}'"

    def origin(self, i: int) -> tuple[str, str]:
        """File and key: the number of a line or row, or the key of a sample."""
        return self.shards.origin(i)

    def fields(self, i: int) -> dict[str, Any]:
        """Raises DataError, naming the row, when its bytes are not those that were indexed or are no object."""
        try:
            return self.parsed(i)
        except BadRow as bad:
            raise DataError(f"{self.where(i)}: {bad}") from bad

    def parsed(self, i: int) -> dict[str, Any]:
        """As `fields`; raises BadRow for a row that is no object, which only a sample of a shard can be."""
        members = self.shards.read(i)
        try:
            if "json" in members:
                return _object(members["json"])
            if "tsv" in members:
                index = self.shards.locate(i)[0]
                names = _header(index.path, index.sha256, index.size, index.mtime)
                return dict(zip(names, _stripped(members["tsv"]), strict=True))
        except ValueError as error:
            raise BadRow("unreadable row", str(error)) from error
        raise BadRow("no json member", f"its members are {', '.join(members)}")


def _object(content: bytes) -> dict[str, Any]:
    value = parsed(content)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object {{…}}")
    return value


def _stripped(row: bytes) -> list[str]:
    """As DPR reads them: without quotes at either end, also those that csv leaves there."""
    return [cell.strip('"') for cell in cells(row)]


@lru_cache(maxsize=1024)
def _header(path: str, sha256: str, *known: int | str) -> list[str]:
    """Of the file with this SHA-256, size and time stamp: another content may have its columns in another order."""
    if stat(path) != known and sha256_of(path) != sha256:
        raise DataError(f"{path} has changed since it was indexed. Start again to index it anew.")
    with open_stream(path) as stream:
        return header(stream.readline())

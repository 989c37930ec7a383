"""Outputs of `python -m data pack`: a folder that appears only when it is complete, shards, counts of skipped rows."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyad.data.base.errors import BadRow, ConfigError, DataError
from dyad.data.base.files import whole_folder
from dyad.data.base.progress import print_line
from dyad.data.cli.options import OnError, PackOptions
from dyad.data.shards.index import ShardIndex, index_shards
from dyad.data.shards.rows import SUFFIXES
from dyad.data.shards.scan_tar import MAX_BYTES

SHOWN = 5  # bad rows that are printed in full


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A context that gives a new folder to fill. It is renamed to `out` when the block ends, deleted when it raises."""
    try:
        beside = out.resolve().parent / f".{out.name}.{os.getpid()}.partial"  # others may write the same folder
        with whole_folder(out, beside) as folder:
            yield folder
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error}") from error


def checked_out(options: PackOptions) -> Path:
    """The folder that `pack` writes. Raises ConfigError for options that cannot work; an empty folder may be there."""
    if not options.out:
        raise ConfigError("pack needs out=FOLDER, for example out=shards.")
    if options.maxcount < 1 or options.maxsize <= 0:
        raise ConfigError(f"maxcount={options.maxcount} and maxsize={options.maxsize:g} must be positive.")
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already; choose a new folder or delete it.")
    return out


@contextmanager
def shard_writer(folder: Path, options: PackOptions) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A context that gives a function. It adds a sample {"__key__": …, suffix: bytes} to the shards 000000.tar ….

    Equal samples make equal bytes.
    """
    from webdataset.writer import ShardWriter

    pattern = str(folder).replace("%", "%%") + "/%06d.tar"
    limits = {"maxcount": options.maxcount, "maxsize": options.maxsize}
    with ShardWriter(pattern, **limits, mtime=0, encoder=False, verbose=0) as writer:
        yield writer.write


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """The fields of a row as JSON. Raises BadRow when JSON cannot hold them, or when it is longer than readers take."""
    try:
        content = json.dumps(fields, ensure_ascii=False, allow_nan=False, default=str).encode()
    except ValueError as error:
        raise BadRow("a field JSON cannot hold", str(error)) from None
    return checked_size("json", content)


def checked_size(suffix: str, content: bytes) -> bytes:
    """The content of a member. Raises BadRow when it is longer than readers of members with this suffix take."""
    if len(content) > MAX_BYTES[suffix]:
        raise BadRow(f"{suffix} too long", f"more than {MAX_BYTES[suffix]} bytes")
    return content


def index_new(folder: Path) -> list[ShardIndex]:
    """Index the files of a new folder, which reads them as training will."""
    indexes = list(index_shards(sorted(str(file) for file in folder.iterdir() if file.suffix in SUFFIXES)))
    assert not any(index.problems for index in indexes), indexes
    return indexes


def shard_names(folder: Path, shards: int) -> Path:
    """All shards of a folder as one path with a brace list."""
    return folder / ("000000.tar" if shards == 1 else f"{{000000..{shards - 1:06d}}}.tar")


def command(program: str, paths: Mapping[str, Path], *others: str) -> str:
    """A command line to print: program, key=path for `paths`, and other arguments, quoted for the shell and Hydra."""
    escaped = {key: str(path).replace("\\", "\\\\").replace('"', '\\"') for key, path in paths.items()}
    arguments = [*(f'{key}="{value}"' for key, value in escaped.items()), *others]
    return " ".join([program, *map(shlex.quote, arguments)])


@dataclass
class Tally:
    """The number of rows that were read, and of those that were skipped, by reason."""

    on_error: OnError
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def row(self, where: str) -> Iterator[None]:
        """A context for one row. A BadRow in it is printed and counted; with on_error=stop it becomes a DataError."""
        self.rows += 1
        try:
            yield
        except BadRow as bad:
            message = f"{f'{where}: {bad}':.1000}"
            if self.on_error is OnError.stop:
                raise DataError(f"{message}. With on_error=skip such rows are left out and counted.") from None
            self.skipped[bad.reason] += 1
            if self.skipped.total() <= SHOWN:
                print_line(f"skipped {message}", sys.stderr)

    def check_any(self, source: str) -> None:
        """Raise DataError when no row was good."""
        if self.rows == self.skipped.total():
            raise DataError(f"{source}: no sample to write. {self if self.rows else 'It has no rows.'}")

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        return f"skipped {self.skipped.total():,} of {self.rows:,} rows: {reasons}"

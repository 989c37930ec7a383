"""What a command writes appears whole under its name, or not at all; what it left out and what to do next is said."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import ConfigError, DataError, printable
from data.files import whole_folder
from data.verbs.options import OnError, PackOptions

SHOWN = 5  # bad rows that are printed in full


def refuse_existing(out: Path, what: str = "folder") -> None:
    """Raises ConfigError when `out` is there already; an empty folder may be filled."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already; choose a new {what} or delete it.")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block succeeds and vanishes when it does not."""
    try:
        with whole_folder(out, _beside(out)) as folder:
            yield folder
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error}") from error


def _beside(out: Path) -> Path:
    return out.resolve().parent / f".{out.name}.{os.getpid()}.partial"


def checked_out(options: PackOptions) -> Path:
    """The new folder that `pack` is to write. Raises ConfigError for options that cannot work."""
    if not options.out:
        raise ConfigError("pack needs out=FOLDER, for example out=shards.")
    if options.maxcount < 1 or options.maxsize <= 0:
        raise ConfigError(f"maxcount={options.maxcount} and maxsize={options.maxsize:g} must be positive.")
    refuse_existing(Path(options.out))
    return Path(options.out)


@contextmanager
def shard_writer(folder: Path, options: PackOptions) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that adds a sample {"__key__": …, suffix: bytes} to the shards 000000.tar …; the same bytes always."""
    from webdataset.writer import ShardWriter

    pattern = str(folder).replace("%", "%%") + "/%06d.tar"
    limits = {"maxcount": options.maxcount, "maxsize": options.maxsize}
    with ShardWriter(pattern, **limits, mtime=0, encoder=False, verbose=0) as writer:
        yield writer.write


def shard_names(folder: Path, shards: int) -> Path:
    """All shards of a folder as one path with a brace list."""
    return folder / ("000000.tar" if shards == 1 else f"{{000000..{shards - 1:06d}}}.tar")


def command(program: str, paths: Mapping[str, Path], *others: str) -> str:
    """A command to copy: `paths` by key are quoted for the shell and for Hydra, whose grammar knows no bare braces."""
    escaped = {key: str(path).replace("\\", "\\\\").replace('"', '\\"') for key, path in paths.items()}
    words = [*(f'{key}="{value}"' for key, value in escaped.items()), *others]
    return " ".join([program, *map(shlex.quote, words)])


@dataclass
class Tally:
    """How many rows were read, and why some were left out."""

    on_error: OnError
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def leave_out(self, message: str, reason: str) -> None:
        """Count a bad row; with on_error=stop raise DataError."""
        message = f"{message:.1000}"
        if self.on_error is OnError.stop:
            raise DataError(f"{message}. With on_error=skip such rows are left out and counted.")
        self.skipped[reason] += 1
        if self.skipped.total() <= SHOWN:
            print(printable(f"skipped {message}"), file=sys.stderr)

    def refuse_nothing(self, source: str) -> None:
        """Raises DataError when there is no good row."""
        if self.rows == self.skipped.total():
            raise DataError(f"{source}: no sample to write. {self if self.rows else 'It has no rows.'}")

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        return f"skipped {self.skipped.total():,} of {self.rows:,} rows: {reasons}"

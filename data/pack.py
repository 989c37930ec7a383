"""`python -m data pack`: pictures and captions into webdataset shards, byte for byte and the same bytes every time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data.errors import ConfigError, DataError
from data.index import ShardIndex, index_shards
from data.options import OnError, PackOptions
from data.pictures import read_header
from data.scan import MAX_BYTES
from data.tables import BadRow, Pair, Table, open_table

SHOWN = 5  # bad rows that are printed in full


@dataclass
class Tally:
    """How many rows were read, and why some were left out."""

    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        return f"skipped {self.skipped.total():,} of {self.rows:,} rows: {reasons}"


def pack_pairs(source: str, options: PackOptions) -> None:
    """Write the shards of an input into the new folder `options.out`, index them, print how to train on them.

    Raises ConfigError for a folder that is there already or columns that are not, DataError naming the row for a
    missing or undecodable picture and an empty caption (`on_error=stop`). Nothing is left behind in either case.
    """
    if not options.out:
        raise ConfigError("pack needs out=FOLDER, for example out=shards.")
    if options.maxcount < 1 or options.maxsize <= 0:
        raise ConfigError(f"maxcount={options.maxcount} and maxsize={options.maxsize:g} must be positive.")
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already; choose a new folder or delete it.")
    table = open_table(Path(source), options)
    with _renamed_at_the_end(out) as folder:
        tally = _write(source, table, folder, options)
        shards = sorted(str(shard) for shard in folder.glob("*.tar"))
        indexes = list(index_shards(shards))
        assert not any(index.problems for index in indexes), indexes
    print(_summary(out, indexes, table, tally))


@contextmanager
def _renamed_at_the_end(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block succeeds and vanishes when it does not."""
    folder = out.resolve().parent / f".{out.name}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True)
        yield folder
        os.replace(folder, out)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(source: str, table: Table, folder: Path, options: PackOptions) -> Tally:
    from webdataset.writer import ShardWriter

    tally = Tally()
    pattern = str(folder).replace("%", "%%") + "/%06d.tar"
    limits = {"maxcount": options.maxcount, "maxsize": options.maxsize}
    with ShardWriter(pattern, **limits, mtime=0, encoder=False, verbose=0) as writer:
        for where, fields in table.rows():
            tally.rows += 1
            try:
                members = _members(table.pair(fields), table, options)
            except BadRow as bad:
                _bad_row(f"{source}: {where}: {bad}", bad.reason, tally, options)
                continue
            writer.write({"__key__": f"{tally.rows - 1:09d}", **members})
    if tally.rows == tally.skipped.total():
        raise DataError(f"{source}: no sample to write. {tally if tally.rows else 'It has no rows.'}")
    return tally


def _bad_row(message: str, reason: str, tally: Tally, options: PackOptions) -> None:
    if options.on_error is OnError.stop:
        raise DataError(f"{message}. With on_error=skip such rows are left out and counted.")
    tally.skipped[reason] += 1
    if tally.skipped.total() <= SHOWN:
        print(f"skipped {message}", file=sys.stderr)


def _members(pair: Pair, table: Table, options: PackOptions) -> dict[str, bytes]:
    """Picture, `txt` for a single caption, `json` for lists of captions and for other fields."""
    suffix, picture = _picture(pair.image, options.max_image_pixels)
    members = {suffix: picture}
    if not table.listed:
        members["txt"] = str(pair.caption).encode()
    if table.listed or table.extra:
        members["json"] = _json({table.caption_key: pair.caption, **pair.extra})
    for kind in ("txt", "json"):
        if len(members.get(kind, b"")) > MAX_BYTES[kind]:
            raise BadRow(f"{kind} too long", f"more than {MAX_BYTES[kind]} bytes")
    return members


def _json(value: dict) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
    except ValueError as error:
        raise BadRow("a field JSON cannot hold", str(error)) from None


def _picture(path: Path, max_pixels: int) -> tuple[str, bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadRow("missing file", str(path)) from None
    except OSError as error:
        raise BadRow("unreadable file", f"{path} ({error.strerror})") from None
    try:
        suffix = read_header(data, max_pixels).suffix
    except DataError as error:
        raise BadRow("undecodable picture", f"{path}: {error}") from None
    if len(data) > MAX_BYTES[suffix]:
        raise BadRow("picture too big", f"{path}: {len(data)} bytes")
    return suffix, data


def _summary(out: Path, indexes: Sequence[ShardIndex], table: Table, tally: Tally) -> str:
    samples, megabytes = sum(i.samples for i in indexes), sum(i.size for i in indexes) / 1e6
    lines = [f"{samples:,} samples in {len(indexes)} shards ({megabytes:,.1f} MB) in {out}, indexed"]
    if tally.skipped:
        lines.append(str(tally))
    return "\n".join([*lines, "train on them:", f"  {train_command(out, len(indexes), table)}"])


def train_command(out: Path, shards: int, table: Table) -> str:
    """The command to copy, quoted for the shell and, inside, for Hydra, whose grammar knows no bare braces."""
    names = "000000.tar" if shards == 1 else f"{{000000..{shards - 1:06d}}}.tar"
    value = str(out / names).replace("\\", "\\\\").replace('"', '\\"')
    overrides = [f'data.train="{value}"', *([f"data.captions=[{table.caption_key}]"] if table.listed else [])]
    return " ".join(["python -m train", *map(shlex.quote, overrides)])

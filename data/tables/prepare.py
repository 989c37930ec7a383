"""Convert tables to shards in the cache, once, so that training can read them by offset.

A table of images becomes a .tar, a table of texts a .jsonl file, in the folder `.index` beside the table or in the
user's cache. A later run takes the same shard as long as the table, the images that it names and the options are equal.
"""

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, TypeVar

from dyad.data.base.errors import BadFormat, BadRow, ConfigError, DataError, sound
from dyad.data.base.progress import EVERY, print_line, print_once
from dyad.data.config import DataConfig
from dyad.data.shards.index_cache import read_cached, write_entry
from dyad.data.shards.sources import Tables
from dyad.data.shards.storage import shard_name, stat
from dyad.data.tables.coco import split_of
from dyad.data.tables.folders import tables_of, unread_in
from dyad.data.tables.image_table import ImageTable, TableOptions, image_table, json_bytes
from dyad.data.tables.readers import Fields, Row, Table

FORMAT = 2
# The most bytes of a table, and of its shard, that are converted at the start of a run; ImageNet's val has 6.3 GiB
LARGEST = 8 << 30
ROLES = ("anchor", "positive", "negative")  # names that the named columns of texts get; further ones negative_1, …
SCORES = (  # columns that say whether, or how well, the texts of a row belong together
    *("score", "scores", "label", "labels", "similarity_score", "similarity", "relatedness_score", "is_duplicate"),
    "gold_label",  # SNLI, MNLI: names of classes
)

CheckRow = Callable[[Fields], object]  # a function that raises BadRow for a row of texts that training refuses
T = TypeVar("T")


def table_options(config: DataConfig, captioned: bool = False) -> TableOptions:
    """Return the options for tables in a configuration, whose messages name the keys data.*. captioned: whether images
    without captions are refused."""
    chosen = config.columns, config.template, config.max_image_pixels
    return TableOptions(*chosen, "data.", config.caption_per, captioned, config.relevance, config.teacher)


def checked_tables(options: TableOptions, check_row: CheckRow = id) -> Tables:
    """Return a function tables(path) that checks the tables at a path and returns their paths; it converts nothing.

    It is the argument `tables` of `parse_sources`. The result is empty for a path that is no table. Columns and sizes
    are checked, and the first readable row of a table of texts. check_row: called with the fields of this row; raises
    BadRow for a row that cannot be used (the default accepts all). tables(path) raises ConfigError for a table that
    cannot be used, and as `tables_of` does.
    """

    def check(path: str) -> Sequence[str]:
        tables = tables_of(path, options.columns)
        for table in tables:
            _refuse_large(sum(stat(file).size for file in table.files()), table, options)
            head = [] if image_table(table, options) else table.head()
            for fields in head[:1]:
                try:
                    check_row(named_texts(fields, options))
                except BadRow as bad:
                    others = "" if isinstance(bad, BadFormat) else f"; or name others: {options.prefix}columns=[…]"
                    raise ConfigError(f"{table.path}: {bad}{others}") from None
        return [table.path for table in tables]

    return check


def prepared_tables(options: TableOptions, check_row: CheckRow = id) -> Tables:
    """Return a function tables(path) that converts the tables at a path to shards and returns the paths of the shards.

    It is the argument `tables` of `parse_sources`. The result is empty for a path that is no table. A shard that the
    cache has is not made again; a line is printed when one is made, and for texts of which options.columns leaves out
    one of SCORES. check_row: called with the fields of each row of a table of texts; raises BadRow for a row that
    cannot be used (the default accepts all). tables(path) raises ConfigError for a table whose shard gets too large,
    DataError for a bad row, for a table without rows, and if no cache folder can be written; and as `tables_of` and
    `image_table` do.
    """
    return lambda path: [_prepared(table, options, check_row) for table in tables_of(path, options.columns)]


def named_texts(fields: Fields, options: TableOptions) -> Fields:
    """Return the fields of a row of texts, renamed if the user named columns: to anchor, positive, negative,
    negative_1, ….

    All other columns except options.relevance and options.teacher are then left out; a named column that the row lacks
    gets None. Without options.columns the fields are returned unchanged.
    """
    if not options.columns:
        return fields
    names = [*ROLES, *(f"{ROLES[-1]}_{i}" for i in range(1, len(options.columns)))]
    chosen = {name: fields.get(column) for name, column in zip(names, options.columns, strict=False)}
    return chosen | {name: value for name, value in fields.items() if name in (options.relevance, options.teacher)}


def left_out(columns: Iterable[str], options: TableOptions) -> list[str]:
    """Return the names in `columns` that `named_texts` leaves out."""
    named = (*options.columns, options.relevance, options.teacher)
    return [name for name in columns if options.columns and name not in named]


def _prepared(table: Table, options: TableOptions, check_row: CheckRow) -> str:
    """Return the path of the shard made of a table. Convert the table now if the cache has no such shard. Errors as of
    `prepared_tables`."""
    if images := image_table(table, options):  # rows without captions are kept: training replaces such samples
        options = replace(options, relevance=None, teacher=None)  # a sample keeps all columns
        images = replace(images, options=replace(options, captioned=False))
    elif scores := [name for name in left_out(table.columns, options) if name in SCORES]:
        own = f"{table.path}: {options.prefix}columns leaves out {' and '.join(scores)}: whatever is there"
        print_once(f"{own}, a row counts as a right pair. Keep the rows of right pairs alone")
    chosen = hashlib.sha256(json.dumps([FORMAT, *options.as_args(), options.max_pixels]).encode()).hexdigest()[:8]
    name = f"{shard_name(os.path.normpath(table.path) if table.folder is not None else table.path)}.{chosen}"
    facts: dict[str, Any] = {"name": name, "made_of": _state(table, images)}
    path = split_of(table.path)[0]
    for stored, _ in read_cached(path, name, facts):
        return str(stored)

    def write(file: BinaryIO) -> None:
        if images is None:
            rows = _converted(table, partial(_line, options, check_row), options, file)
            file.writelines(line for _, line in rows)
            return
        from webdataset.writer import TarWriter

        with TarWriter(file, mtime=0, encoder=False) as writer:
            for number, (where, sample) in enumerate(_converted(table, images.members, options, file)):
                # the place in the table stands before the slash, because names of files may have dots and repeat
                place = where.encode(errors="backslashreplace").decode()
                writer.write({"__key__": f"{place}/{number:09d}", **sample})

    began = time.monotonic()
    file = str(write_entry(path, name, ".jsonl" if images is None else ".tar", facts, write))
    size, seconds = os.path.getsize(file) / 1e6, time.monotonic() - began
    print_line(f"{table.path} was converted once, in {seconds:.0f} s, and is read from {file} ({size:,.1f} MB)")
    if unread := unread_in(table.path):
        print_line(f"not read of {table.path}: {unread}")
    return file


def _state(table: Table, images: ImageTable | None) -> str:
    """Return a hash of the sizes and time stamps of all files of a table, and of the images that it names if one of its
    first rows names one."""
    digest = hashlib.sha256()
    for file in table.files():
        name = file if table.folder is None else os.path.relpath(file, table.folder)
        digest.update(json.dumps([name, *stat(file)]).encode())
    if images and not os.path.isdir(table.path) and any(map(images.path, table.head())):
        for fields in (fields for _, fields in table.rows() if isinstance(fields, dict)):
            with suppress(OSError, ValueError):  # a missing image is reported when its row is converted
                found = os.stat(images.path(fields) or "")
                digest.update(json.dumps([str(fields[images.image]), found.st_size, found.st_mtime_ns]).encode())
    return digest.hexdigest()


def _converted(
    table: Table, convert: Callable[[Row], T], options: TableOptions, file: BinaryIO
) -> Iterator[tuple[str, T]]:
    """Yield the location and convert(row) of each row of a table. The caller writes the results to `file`. Raises
    DataError for a bad row and for a table without rows, ConfigError when the file grows larger than LARGEST bytes."""
    last_line, number = time.monotonic(), 0
    for number, (where, fields) in enumerate(table.rows(), start=1):
        try:
            yield where, convert(fields)
        except BadRow as bad:
            message = f"{f'{table.path}: {where}: {bad}':.1000}"
            if number == 1 and isinstance(bad, BadFormat):
                raise DataError(message) from None
            pack = f"{_pack_command(table, options)} on_error=skip"
            raise DataError(f"{message}. Such rows are left out by: {pack}") from None
        _refuse_large(file.tell(), table, options)
        if time.monotonic() - last_line >= EVERY:
            last_line = time.monotonic()
            print_line(f"converting {table.path}: {number:,} rows, {file.tell() / 1e6:,.0f} MB", sys.stderr)
    if not number:
        raise DataError(f"{table.path} has no rows.")


def _line(options: TableOptions, check_row: CheckRow, fields: Row) -> bytes:
    """Return a row of texts as a line of JSON. Raises BadRow for a row that cannot be used."""
    named = named_texts(sound(fields), options)
    check_row(named)
    return json_bytes(named) + b"\n"


def _refuse_large(size: int, table: Table, options: TableOptions) -> None:
    """Raise ConfigError, with the command that packs the table, when `size` is more than LARGEST. size: bytes of the
    table or of its shard."""
    if size > LARGEST:
        raise ConfigError(
            f"{table.path}: more than {LARGEST >> 30} GiB, which are not converted at a start. Pack it once, and train "
            f"on the shards: {_pack_command(table, options)}"
        )


def _pack_command(table: Table, options: TableOptions) -> str:
    out = f"{os.path.splitext(shard_name(os.path.normpath(table.path)))[0]}_shards"
    return shlex.join(["python", "-m", "data", "pack", table.path, f"out={out}", *options.as_args()])

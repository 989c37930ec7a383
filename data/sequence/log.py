"""Read logs of events: which user chose which item at which time. The events of one user, by time, are a sequence.

A log is a table (such as CSV, Parquet, Arrow, JSON-lines) with a row for each event. Rows may be in any order, but with
data.sequence.time=null their order is the time. Events of one user at equal times stay in the order of the rows.

Shape letters: E events; U users; N items.
"""

import hashlib
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from dyad.data.base.errors import BadRow, ConfigError, DataError, nearest, sound
from dyad.data.base.json_text import SURROGATE
from dyad.data.config import SequenceConfig
from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.manifest import FileEntry
from dyad.data.shards.sources import unweighted_files
from dyad.data.shards.storage import scheme_of, sha256_of
from dyad.data.tables.readers import OPENERS, SEPARATOR_NAMES, Fields, Table, open_table

EXACT = 1 << 53  # from here on, floats are no longer all whole numbers
LOGS = tuple(OPENERS)  # suffixes of log files


@dataclass(frozen=True)
class Log:
    """Events of U users, sorted by user, then by time.

    item_e (E,) int64: number of each event's item. file_e (E,) int64: index in `files` of each event's file. time_e
    (E,) float64: time of each event, in seconds if the log has ISO 8601 times; the number of its row, counted through
    all files, if config.time is None. starts (U + 1,) int64: index of the first event of each user, and E. users: ids
    of the users, in the order of first appearance in the rows. items: ids of the N items; an item's number is its
    index. files: the files that were read.
    """

    item_e: Int64s
    file_e: Int64s
    time_e: np.ndarray
    starts: Int64s
    users: list[str]
    items: list[str]
    files: Sequence[FileEntry]

    @property
    def fingerprint(self) -> str:
        """A hash of the sequences of items and of the ids of the items, as hexadecimal text."""
        digest = hashlib.sha256(self.item_e.tobytes() + self.starts.tobytes())
        digest.update("\n".join(self.items).encode())
        return digest.hexdigest()


def log_files(value: Any, key: str = "data.train", suffixes: Sequence[str] = LOGS) -> list[str]:
    """Return the paths of the tables that `value` names, in the syntax of data.train. key: the configuration key of
    `value`, for messages. suffixes: the ends of names of files that are logs.

    Raises ConfigError if there is none, for a sampling weight (path@2), and for a URL.
    """
    files = unweighted_files(value, key, suffixes, "the sequences of a log have no weights. Leave @ out")
    if remote := next(filter(scheme_of, files), None):
        raise ConfigError(f"{key}={remote}: a log is read from a file of this machine. Download it first")
    return files


def refuse(where: str, bad: BadRow) -> None:
    """Raise DataError for a bad row. where: its location, for the message."""
    raise DataError(f"{where}: {bad}") from bad


def read_log(
    paths: Sequence[str],
    config: SequenceConfig,
    known: Sequence[str] = (),
    on_bad: Callable[[str, BadRow], None] = refuse,
    opened: Callable[[str], Table] = open_table,
) -> Log:
    """Read the events in the tables at `paths`. known: ids of items that get the first numbers 0, 1, …, even if no
    event has them; other items get the next numbers in the order of first appearance. on_bad(location, error): called
    for each row without a valid value in a column that `config` names; if it returns, the row is left out. opened:
    opens the table at a path.

    Raises ConfigError for a table without these columns; DataError if a table cannot be read or there is no event.
    """
    rows = ((file, row) for file, path in enumerate(paths) for row in _events(opened(path), config, on_bad))
    events = (
        (user, item, float(number) if config.time is None else time, file)
        for number, (file, (user, item, time)) in enumerate(rows)
    )
    files = [FileEntry(os.path.basename(path), os.path.getsize(path), 0, sha256_of(path)) for path in paths]
    log = log_of(events, files, known)
    if not len(log.item_e):
        raise DataError(f"{paths[0]}: no event is in the log")
    return log


def log_of(
    events: Iterable[tuple[str, str, float, int]], files: Sequence[FileEntry] = (), known: Sequence[str] = ()
) -> Log:
    """Return the events (user, item, time, index of its file in `files`) as a Log. known: as of `read_log`."""
    users, items = dict[str, int](), {name: number for number, name in enumerate(known)}
    user_e, item_e, time_e, file_e = array("q"), array("q"), array("d"), array("q")  # a log has millions of events
    for user, item, time, file in events:
        user_e.append(users.setdefault(user, len(users)))
        item_e.append(items.setdefault(item, len(items)))
        time_e.append(time)
        file_e.append(file)
    order_e = np.lexsort((time_e, user_e))  # is stable
    starts = np.searchsorted(np.array(user_e)[order_e], np.arange(len(users) + 1))
    item_e, file_e, time_e = (np.array(column)[order_e] for column in (item_e, file_e, time_e))
    return Log(item_e, file_e, time_e, starts, [*users], [*items], files)


def check_columns(table: Table, config: SequenceConfig, section: str = "data.sequence.") -> None:
    """Raise ConfigError if `table` lacks a column that `config` names. `config.time` may be None; then no time is
    needed. section: what the keys of `config` begin with, for the message."""
    columns = table.columns
    for name in ("user", "item", "time"):
        if (column := getattr(config, name)) is not None and column not in columns:
            way_out = f", or {section}time=null: the rows are in order" if name == "time" else ""
            fix = f"Set {section}{name}=COLUMN{way_out}"
            if len(columns) == 1 and " " in columns[0]:
                fix = f"Put tabs or commas between names and cells: separators are {SEPARATOR_NAMES}"
            raise ConfigError(
                f"{section}{name}={column}: {table.path} has no such column.{nearest(column, columns)} It has "
                f"{', '.join(columns[:10]) or 'no rows'}. {fix}. If the first line is an event, name the columns: "
                "python -m data sequences FILE columns=[user,item,time]"
            )


def _events(
    table: Table, config: SequenceConfig, on_bad: Callable[[str, BadRow], None]
) -> Iterator[tuple[str, str, float]]:
    """Yield (user, item, time) of each row of `table`; the time is 0 if config.time is None. Raises
    ConfigError if the table lacks a column. on_bad: as of `read_log`."""
    check_columns(table, config)
    for where, row in table.rows():
        try:
            row = sound(row)
            time = 0.0 if config.time is None else _time(row.get(config.time), config.time)
            yield id_of(row, config.user), id_of(row, config.item), time
        except BadRow as bad:
            on_bad(f"{table.path}: {where}", bad)


def id_of(row: Fields, column: str) -> str:
    """Return the id in a cell of a row as text. A whole number is written without a fraction also if it is a float, as
    a column of Parquet is that lacks a value in some row. Raises BadRow for a value that is neither a text nor a whole
    number, for a blank text, and for one with a line break or half of a surrogate pair."""
    value = row.get(column)
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip() or "\n" in str(value):
        raise BadRow("no id", f"{column} is {value!r:.80}")
    if SURROGATE.search(str(value)):  # from a CSV that is not UTF-8, or from an escape in JSON
        raise BadRow("no Unicode", f"{column} is {value!r:.80}")
    return str(value)


def _time(value: Any, column: str) -> float:
    """Return the time in a cell: a number unchanged, or an ISO 8601 time, a datetime or a date (its midnight) as
    seconds since 1970 (UTC if no time zone is given). Raises BadRow for any other value."""
    try:
        text = value.isoformat() if isinstance(value, date) else value  # a datetime is a date too
        try:
            number = float(text)
        except ValueError:
            found = datetime.fromisoformat(text)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        if isinstance(text, bool) or not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRow("no time", f"{column} is {value!r:.80}, neither a number nor ISO 8601") from error

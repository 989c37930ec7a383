"""Show the progress of a long pass over many items: a bar on a terminal, elsewhere a line every EVERY seconds."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, TextIO, TypeVar

from dyad.data.base.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 30.0  # seconds between two lines

T = TypeVar("T")


@contextmanager
def progress(
    what: str, total: int, done: int = 0, log: Callable[[str], None] | None = None, stream: TextIO | None = None
) -> Iterator[Callable[[int], None]]:
    """Context manager that shows the progress of a long pass. It yields a function that updates the display.

    Call it with the number of items finished so far, `done` included. On a terminal the display is a bar, elsewhere a
    line at most every EVERY seconds. what: the label. total: number of all items. done: number of items that an
    earlier, interrupted process finished. log: a function that prints one line, for a caller with a console of its own;
    with `log` there is no bar. stream: where the bar or the lines are printed if `log` is None; None: standard output.
    """
    began = last_line = time.monotonic()
    output = stream or sys.stdout
    write = log or partial(print_line, stream=output)

    def facts(now: int) -> str:
        rate = (now - done) / max(time.monotonic() - began, 1e-9)
        return f"{rate:.1f}/s ETA {timedelta(seconds=round((total - now) / rate)) if rate else '?'}"

    def print_progress(now: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= EVERY:
            last_line = time.monotonic()
            write(f"{what} [{now:>{len(str(total))}}/{total} ({100 * now // total}%)] {facts(now)}")

    if log or not on_terminal(output):
        yield print_progress
        return
    with progress_bar(output) as bar:
        task = bar.add_task(what, total=total, completed=done, facts="")
        yield lambda now: bar.update(task, completed=now, facts=facts(now))


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items unchanged, and show on standard error how many are finished. what: the label; total: their
    number.

    An item counts as finished when the next one is taken.
    """
    with progress(what, total, stream=sys.stderr) as on_progress:
        for done, item in enumerate(items, start=1):
            yield item
            on_progress(done)


def progress_bar(stream: TextIO) -> "Progress":
    """Return a progress bar of the library rich that prints on `stream`, not started.

    The caller must start it, and give each of its tasks a field `facts`: the text behind the task's bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[facts]}")
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)


def on_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_on_rank_0(line: str) -> None:
    """Print a line on standard error, as `print_line` does, in the process of rank 0 alone (environment variable RANK).

    A process without a rank prints it too.
    """
    if os.environ.get("RANK", "0") == "0":
        print_line(line, sys.stderr)


@cache
def print_once(line: str) -> None:
    """Print a line as `print_on_rank_0` does, unless this process has printed it: files are looked up several times."""
    print_on_rank_0(line)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line on `stream` (None: standard output) and flush it. Credentials are removed and control characters
    escaped."""
    print(printable(line), file=stream, flush=True)

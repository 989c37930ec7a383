"""Progress of a long pass over many items: a bar on a terminal, a line now and then elsewhere. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from dyad.data.base.errors import printable

EVERY = 30.0  # seconds between two lines


@contextmanager
def progress(
    what: str, total: int, done: int, log: Callable[[str], None] | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items that are done.

    done: items that an earlier start has finished. log: for a caller with a console of its own; without it, lines go to
    standard output.
    """
    began = last_line = time.monotonic()

    def facts(now: int) -> str:
        rate = (now - done) / max(time.monotonic() - began, 1e-9)
        return f"{rate:.1f}/s ETA {timedelta(seconds=round((total - now) / rate)) if rate else '?'}"

    def line(now: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= EVERY:
            last_line = time.monotonic()
            (log or print_line)(f"{what} [{now:>{len(str(total))}}/{total} ({100 * now // total}%)] {facts(now)}")

    if log is not None or not on_terminal():
        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total, completed=done, facts="")
        yield lambda now: bar.update(task, completed=now, facts=facts(now))


def on_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def print_line(line: str) -> None:
    """Print a line on standard output, with control characters printable."""
    print(printable(line), flush=True)

"""How far a long pass over many items is: a bar on a terminal, a line now and then elsewhere. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from data.errors import printable
from train.tracking.progress import on_terminal

EVERY = 30.0  # seconds between two lines


@contextmanager
def progress(
    what: str, total: int, done: int, say: Callable[[str], None] | None = None
) -> Iterator[Callable[[int], None]]:
    """A function that hears how many items are done. `done`: those that an earlier start has left.

    say: where lines go, for a caller who has a console of its own; without it, standard output.
    """
    began, spoke = time.monotonic(), time.monotonic()

    def facts(now: int) -> str:
        rate = (now - done) / max(time.monotonic() - began, 1e-9)
        return f"{rate:.1f}/s ETA {timedelta(seconds=round((total - now) / rate)) if rate else '?'}"

    def line(now: int) -> None:
        nonlocal spoke
        if time.monotonic() - spoke >= EVERY:
            spoke = time.monotonic()
            (say or printed)(f"{what} [{now:>{len(str(total))}}/{total} ({100 * now // total}%)] {facts(now)}")

    if say is not None or not on_terminal():
        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total, completed=done, facts="")
        yield lambda now: bar.update(task, completed=now, facts=facts(now))


def printed(line: str) -> None:
    print(printable(line), flush=True)

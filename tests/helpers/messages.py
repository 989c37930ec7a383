"""What errors say. A test names the type of an error, and the keys, values and files that its message must contain:

    with raises(ConfigError, "optim.patience", "optim.max_skipped"):

The words between them stand in one place, tests/messages.txt: below the name of a test the messages that it may meet,
with … for what varies. Any other message fails the test. `bash launch/test.sh --messages PATH …` runs tests and writes
down what they met; a person then reads the change of that file.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest

from helpers.cli import ROOT

E = TypeVar("E", bound=BaseException)
TABLE = ROOT / "tests" / "messages.txt"
MET = "DYAD_MESSAGES_MET"  # a file: messages that the table lacks are added to it, instead of failing
# absolute paths; numbers of a process; numbers with a fraction or of four digits; digests
VARIES = re.compile(
    r"""(?<![\w.])/[^\s'"`,;:)\]]+ | (?<=process\ )\d+ |
    (?<![\w.])\d+(?:\.\d+|\d{3})[\d.]*(?!\w) | \b[0-9a-f]{12,}\b""",
    re.VERBOSE,
)


def raises(kind: type[E] | tuple[type[E], ...], *named: object) -> AbstractContextManager[pytest.ExceptionInfo[E]]:
    """As pytest.raises; the message contains all that is named, and the table has its words."""
    return _raises(kind, _place(), *named)


@contextmanager
def _raises(kind: type[E] | tuple[type[E], ...], place: str, *named: object) -> Iterator[pytest.ExceptionInfo[E]]:
    with pytest.raises(kind) as caught:
        yield caught
    _check(str(caught.value), place, *named)


def check(message: str, *named: object) -> None:
    """Fail unless the message contains all that is named, and the table has its words."""
    _check(message, _place(), *named)


def _check(message: str, place: str, *named: object) -> None:
    missing = [value for value in map(str, named) if value not in message]
    assert not missing, f"{missing} not in {message!r}"
    if any(pattern(line).fullmatch(message) for line in _table()[place]):
        return
    line = template(message, *map(str, named))
    assert MET in os.environ, (
        f"tests/messages.txt has not for {place}:\n{line}\nIs it right? bash launch/test.sh --messages"
    )
    with Path(os.environ[MET]).open("a") as met:
        met.write(f"{place}\t{line}\n")


def template(message: str, *named: str) -> str:
    """A message as the table has it: … in place of what the test names, of paths and of numbers."""
    for value in sorted(filter(None, named), key=len, reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "…", message)
    return re.sub(r"…(?:, …)+", "…", VARIES.sub("…", message)).replace("\n", r"\n")


@cache
def pattern(line: str) -> re.Pattern[str]:
    """What fits a line of the table."""
    return re.compile(".*".join(re.escape(piece) for piece in line.replace(r"\n", "\n").split("…")), re.DOTALL)


def _place() -> str:
    """The test, or the function of a job, that asks: the nearest caller outside this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame = frame.f_back
    assert frame
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT / 'tests')}::{frame.f_code.co_name}"


@cache
def _table() -> Mapping[str, list[str]]:
    found, place = defaultdict[str, list[str]](list), ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("    "):
            found[place].append(line[4:])
        else:
            place = line
    return found


def add(met: Path) -> None:
    """Write what tests met into the table, which is sorted."""
    table = {place: set(lines) for place, lines in _table().items()}
    for place, _, line in (row.partition("\t") for row in met.read_text().splitlines()):
        table.setdefault(place, set()).add(line)
    TABLE.write_text(
        "".join(f"{place}\n" + "".join(f"    {x}\n" for x in sorted(table[place])) for place in sorted(table))
    )


if __name__ == "__main__":
    add(Path(sys.argv[1]))

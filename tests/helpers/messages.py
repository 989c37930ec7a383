"""What errors say. A test names the type of an error, and the keys, values and files that its message must contain:

    with raises(ConfigError, "optim.patience", "optim.max_skipped"):

The words between them stand in one place, tests/messages.txt: below the name of a test the messages that it may meet.
Any other message fails the test. `bash launch/test.sh --messages PATH` runs tests and adds what they met; a person then
reads the change of that file.

In a line of it, … stands for any text: for what the test names, for paths and large numbers. What differs on another
machine or with another version of a library, a person replaces by … too. Lines of tests that no longer meet them are
taken out by hand.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import pytest

from helpers.cli import ROOT

E = TypeVar("E", bound=BaseException)
TABLE = ROOT / "tests" / "messages.txt"
MET = "DYAD_MESSAGES_MET"  # a file: messages that the table lacks are added to it, instead of failing
# absolute paths; numbers of a process and of an OSError; numbers with a fraction or of four digits; digests; lists of
# choices and of formats, which grow
VARIES = re.compile(
    r"""(?<![\w.])/[^\s'"`,;:)\]]+ | (?<=process\ )\d+ | (?<=Errno\ )\d+ |
    (?<![\w.])\d+(?:\.\d+|\d{3})[\d.]*(?!\w) | \b[0-9a-f]{12,}\b |
    (?<=Choices:\ )[^.]+ | (?<=must\ be\ one\ of\ )[^.]+ | (?<=take\ one\ of\ )[^.]+ |
    (?<=Known\ are\ ).+?(?=;\ others\ by)""",
    re.VERBOSE,
)


class raises(Generic[E]):
    """As pytest.raises; the message contains all that is named, and the table has its words.

    A class: the frame of a generator would be part of the traceback and hold the error, and files with it, for long.
    """

    def __init__(self, kind: type[E] | tuple[type[E], ...], *named: object) -> None:
        self._expected, self._named, self._place = pytest.raises(kind), named, _place()

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._caught = self._expected.__enter__()
        return self._caught

    def __exit__(self, *raised: Any) -> bool:
        expected = self._expected.__exit__(*raised)
        if expected:
            _check(str(self._caught.value), self._place, *self._named)
        return expected


def check(message: str, *named: object) -> None:
    """Fail unless the message contains all that is named, and the table has its words."""
    _check(message, _place(), *named)


def _check(message: str, place: str, *named: object) -> None:
    missing = [value for value in map(str, named) if not re.search(_whole(value), message)]
    assert not missing, f"{missing} not in {message!r}"
    if any(pattern(line).fullmatch(message.replace("\n", r"\n")) for line in table(TABLE).get(place, [])):
        return
    line = template(message, *map(str, named))
    assert MET in os.environ, f"not in tests/messages.txt below {place}; see helpers/messages.py:\n    {line}"
    with Path(os.environ[MET]).open("a") as met:
        met.write(f"{place}\t{line}\n")


def template(message: str, *named: str) -> str:
    """A message as the table has it: … in place of what the test names, of paths and of numbers."""
    for value in sorted(filter(None, named), key=len, reverse=True):
        message = re.sub(_whole(value), "…", message)
    return re.sub(r"…(?:(?:, )?…)+", "…", VARIES.sub("…", message)).replace("\n", r"\n")


def _whole(value: str) -> str:
    """A pattern of the value where it is no part of a longer word: 'line 2' is not in 'line 20'."""
    return rf"(?:(?<!\w)|(?!\w)){re.escape(value)}(?:(?!\w)|(?<!\w))"


def pattern(line: str) -> re.Pattern[str]:
    """What fits a line of the table, which has \\n for the end of a line."""
    return re.compile(".*".join(map(re.escape, line.split("…"))))


def _place() -> str:
    """The test, or the function of a job, that asks: the nearest caller outside this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame = frame.f_back
    assert frame
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT / 'tests')}::{frame.f_code.co_name}"


def table(path: Path) -> Mapping[str, list[str]]:
    """The messages of each place."""
    found, place = dict[str, list[str]](), ""
    for line in path.read_text().splitlines():
        if line.startswith("    "):
            found.setdefault(place, []).append(line[4:])
        else:
            place = line
    return found


def add(met: Path, path: Path) -> None:
    """Write what tests met into the table, which is sorted."""
    lines = {(place, line) for place, found in table(path).items() for line in found}
    lines |= {(place, line) for place, _, line in (row.partition("\t") for row in met.read_text().splitlines())}
    by_place = groupby(sorted(lines), key=itemgetter(0))
    path.write_text("".join(f"{p}\n" + "".join(f"    {line}\n" for _, line in found) for p, found in by_place))


if __name__ == "__main__":
    add(Path(sys.argv[1]), TABLE)

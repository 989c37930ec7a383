"""Exit codes, the errors that a user can cause, and functions for their messages."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import NoReturn, TypeVar

from dyad.data.base.secrets import without_credentials

T = TypeVar("T")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # characters, and half surrogate pairs


class ExitCode(IntEnum):
    """The exit codes of commands, except that of Ctrl-C (130). REQUEUE: a stop signal, such as SIGTERM from a
    scheduler, stopped the run."""

    OK = 0
    BUG = 1
    CONFIG = 2
    DATA = 3
    HARDWARE = 4
    REQUEUE = 75


class UserError(Exception):
    """An error that the user can fix. A command prints only its message, without a traceback.

    The message should name the file, key or value at fault, the allowed choices and the fix. An empty message is not
    printed. exit_code: exit code of the command that ends with this error. printed_elsewhere: whether another process
    of the run prints the message, so that this one does not. everywhere: whether all processes of the run stop with
    this error.
    """

    exit_code = ExitCode.CONFIG
    everywhere = False
    printed_elsewhere = False


class ConfigError(UserError):
    """An error in what the user wrote: an invalid key, value or combination, or a path that matches nothing."""


def raise_broken(messages: Iterable[str]) -> None:
    """Raise ConfigError with the first five different messages, a line each; return if there are none."""
    if broken := [*islice(dict.fromkeys(messages), 5)]:
        raise ConfigError("\n".join(broken))


class DataError(UserError):
    """An error for damaged or inconsistent data. The message should name the file and, where known, the offset or
    line."""

    exit_code = ExitCode.DATA


class SampleError(DataError):
    """An error for one sample that cannot be used, while the other samples of its shard can be used."""


class BadRow(Exception):
    """Raised for a row of a file that cannot become a sample. Its text is "reason: detail", or "reason" alone.

    It is no UserError: who reads the file turns it into a DataError or counts it. reason: the fault, as a text that is
    equal for all rows with this fault. detail: a text about this row only.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class BadFormat(BadRow):
    """Raised for a row without the fields that are read, or with others. Most rows of its file are then bad alike, so
    where the first row is, messages do not advise to leave out bad rows."""


def sound(row: T | BadRow) -> T:
    """Return `row`, what a reader of a file yields for a row; raise it if it is a BadRow."""
    if isinstance(row, BadRow):
        raise row
    return row


class HardwareError(UserError):
    """An error for a fault of a device, a process group or another part of a machine. The message should name the rank
    or file.

    ranks: the ranks that failed; None: the rank that raises the error.
    """

    exit_code = ExitCode.HARDWARE
    ranks: Sequence[int] | None = None


class Preempted(UserError):
    """Raised, with an empty message, when a stop signal such as SIGTERM from a scheduler has stopped the run.

    The same command resumes the run.
    """

    exit_code = ExitCode.REQUEUE
    everywhere = True


def nearest(word: str, choices: Iterable[str], within: str = "") -> str:
    """Return a hint to append to a message: " Did you mean 'x'?" if a choice x is spelled like `word`, else "".

    within: put before x, such as the folder of names of files.
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{within}{close[0]}'?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop; the name of its type if this line is empty.

    What gloo advises behind a lost connection is left out: it ends with a greeting and an emoji.
    """
    line = (str(error).splitlines() or [""])[0].partition(" This is typically caused by a remote worker")[0]
    return line.rstrip(".") or type(error).__name__


def printable(text: str) -> str:
    """Return `text` for a terminal: known credentials removed, control characters and lone surrogates escaped.

    Tabs and newlines are kept. Names in untrusted data may hold control characters, which could change what the
    terminal shows.
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], without_credentials(text))


def exit_with(code: int, everywhere: bool = False) -> NoReturn:
    """End this process with an exit code (sys.exit), and write the code to the file that DYAD_EXIT_CODE names.

    torchrun turns each code into 1, so launch/torchrun.sh sets this environment variable and reads the file. The file
    keeps the least code of all processes: an error on one rank makes the other ranks lose a peer, and they then end
    with the higher code 4 (HARDWARE). everywhere: whether all processes of the run end with this error. If so, and if
    the variable is set, the process exits with 0, which torchrun takes for success; the code is then only in the file.
    """
    if name := os.environ.get("DYAD_EXIT_CODE"):
        file = Path(name)
        others = file.read_text() if file.exists() else ""
        file.write_text(str(min(code, int(others or code))))
        code = 0 if everywhere else code
    sys.exit(code)

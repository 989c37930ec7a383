"""What every command shares: the exit codes, the errors a user can cause, and "did you mean"."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from data.parents import end_with_parent
from data.secrets import without_credentials


class ExitCode(IntEnum):
    OK = 0
    BUG = 1
    CONFIG = 2
    DATA = 3
    HARDWARE = 4
    REQUEUE = 75


class UserError(Exception):
    """Something the user can mend. The message is the whole output: the file, key or value, the choices, the fix.

    Without a message nothing is printed, nor if it is told: by another process. everywhere: every process of the run
    stops with it.
    """

    exit_code = ExitCode.CONFIG
    everywhere = False
    told = False


class ConfigError(UserError):
    """A key, value or combination that cannot work; also a path that matches nothing."""


class DataError(UserError):
    """Damaged or inconsistent data; the message names the shard and the offset or line."""

    exit_code = ExitCode.DATA


class SampleError(DataError):
    """One sample that cannot be used; the rest of its shard can."""


class BadRow(Exception):
    """A row of a file that cannot become a sample. reason: a few words, the same for all rows with this fault."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class HardwareError(UserError):
    """A device, process group or other machine fault; the message names the rank."""

    exit_code = ExitCode.HARDWARE


class Preempted(UserError):
    """Stopped on request with everything saved: the same command goes on. Raised without a message, by all ranks."""

    exit_code = ExitCode.REQUEUE
    everywhere = True


def nearest(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean 'x'?" when a choice is close to `word`, else "". Starts with a space: append it to a sentence."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def first_line(error: BaseException) -> str:
    """What an error of a library says, to go on after it: its first line without the full stop, else its name."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


def run(main: Callable[[], None]) -> None:
    """Run a command: a UserError becomes one message on stderr and its exit code, Ctrl-C becomes 130.

    What it writes is for the user and the group: at most 0640 and 0750. A trainer ends with torchrun's agent. A thread
    of OpenMP that waits for others spins for 30,000 rounds instead of 300,000: beside other processes each of those
    milliseconds takes a core from the thread that is waited for. The setting is read once, when torch is loaded; what
    the user has set is left.
    """
    os.umask(os.umask(0o077) | 0o027)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it; a plain command outlives its shell, as nohup expects
        end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        if str(error) and not error.told:
            print(f"error: {shown(str(error))}", file=sys.stderr)
        leave(int(error.exit_code), error.everywhere)
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:  # the reader of our output has seen enough: … --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter can still flush
    except Exception:
        print(shown(traceback.format_exc()), file=sys.stderr, end="")
        leave(ExitCode.BUG)


def shown(text: str) -> str:
    """`text` for a terminal: no credentials of URLs, no control characters and no halves of a pair, which names in data
    may hold."""
    return re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], without_credentials(text)
    )


def leave(code: int, everywhere: bool = False) -> NoReturn:
    """End this process. torchrun turns every code into 1, with a traceback: launch/torchrun.sh names a file for it.

    The least code of several processes stays, since losing contact (4) follows from what went wrong elsewhere.
    """
    if name := os.environ.get("DYAD_EXIT_CODE"):
        note = Path(name)
        others = note.read_text() if note.exists() else ""
        note.write_text(str(min(code, int(others or code))))
        code = 0 if everywhere else code
    sys.exit(code)

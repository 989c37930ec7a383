"""What every command shares: the exit codes, the errors a user can cause, and "did you mean"."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    CONFIG = 2
    DATA = 3
    HARDWARE = 4
    REQUEUE = 75


class UserError(Exception):
    """Something the user can mend. The message is the whole output: the file, key or value, the choices, the fix."""

    exit_code = ExitCode.CONFIG


class ConfigError(UserError):
    """A key, value or combination that cannot work; also a path that matches nothing."""


class DataError(UserError):
    """Damaged or inconsistent data; the message names the shard and the offset or line."""

    exit_code = ExitCode.DATA


class HardwareError(UserError):
    """A device, process group or other machine fault; the message names the rank."""

    exit_code = ExitCode.HARDWARE


def nearest(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean 'x'?" when a choice is close to `word`, else "". Starts with a space: append it to a sentence."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def run(main: Callable[[], None]) -> None:
    """Run a command: a UserError becomes one message on stderr and its exit code, Ctrl-C becomes 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)

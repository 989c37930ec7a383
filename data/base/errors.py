"""Exit codes, the errors that a user can cause, and `run`, which turns them into messages and exit codes."""

import difflib
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from dyad.data.base.child_processes import end_with_parent
from dyad.data.base.secrets import without_credentials

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # characters, and half surrogate pairs


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    BUG = 1
    CONFIG = 2
    DATA = 3
    HARDWARE = 4
    REQUEUE = 75


class UserError(Exception):
    """An error that the user can fix. Only its message is printed: the file, key or value, the choices, the fix.

    An empty message is not printed. exit_code: exit code of the command that raises the error. printed_elsewhere:
    whether another process prints the message. everywhere: whether all processes of the run stop with this error.
    """

    exit_code = ExitCode.CONFIG
    everywhere = False
    printed_elsewhere = False


class ConfigError(UserError):
    """An error in what the user wrote: an invalid key, value or combination, or a path that matches nothing."""


class DataError(UserError):
    """An error for damaged or inconsistent data. The message names the shard and the offset or line."""

    exit_code = ExitCode.DATA


class SampleError(DataError):
    """An error for one sample that cannot be used, while the other samples of its shard can be used."""


class BadRow(Exception):
    """Raised for a row of a file that cannot become a sample. reason: the fault, as a text that is equal for all rows
    with this fault; detail: a text about this row only."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class HardwareError(UserError):
    """An error for a fault of a device, a process group or another part of a machine. The message names the rank.

    ranks: the ranks that failed; None: the rank that raises the error.
    """

    exit_code = ExitCode.HARDWARE
    ranks: Sequence[int] | None = None


class Preempted(UserError):
    """Raised when a stop signal, such as SIGTERM from a scheduler, has stopped the run. All ranks raise this error,
    with an empty message. The same command resumes the run."""

    exit_code = ExitCode.REQUEUE
    everywhere = True


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint to append to a message: " Did you mean 'x'?" if a choice x is spelled like `word`, else ""."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without the full stop. Without a message, return the name of its
    type."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


def run(main: Callable[[], None]) -> None:
    """Run a command and exit. A UserError becomes one message on stderr and its exit code, Ctrl-C becomes code 130, a
    file or folder to which the user has no right one message and code 3.

    First it imports the plugins of the command line, and sets up the process. The garbage collector looks at new
    objects less often: the imports of torch and open_clip make so many that it would take a fifth of their time. New
    files get at most mode 0640, and new folders 0750. A process that torchrun started ends together with torchrun's
    agent, its parent. A waiting OpenMP thread spins for 1,000 rounds instead of 300,000 (GOMP_SPINCOUNT), because on a
    shared core the spinning delays the thread that it waits for. torch's warnings in C++, 20 lines for each
    connection to a rank that is gone, are left out (TORCH_CPP_LOG_LEVEL). torch reads these variables once, when it is
    loaded; a value that the user has set stays.
    """
    gc.set_threshold(100_000, 20, 10)
    os.umask(os.umask(0o077) | 0o027)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it; a plain command outlives its shell, as nohup expects
        end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dyad.data.base.plugins import import_typed_plugins

    try:
        import_typed_plugins(sys.argv[1:])
        main()
        sys.stdout.flush()
    except UserError as error:
        if str(error) and not error.printed_elsewhere:
            _say(f"error: {printable(str(error))}")
        exit_with(int(error.exit_code), error.everywhere)
    except KeyboardInterrupt:
        exit_with(130)
    except BrokenPipeError:  # the reader of the output has closed it: … --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at exit
    except Exception as error:
        if isinstance(error, PermissionError) and error.filename:
            _say(printable(f"error: {error.filename}: this user has no right to it ({error.strerror})"))
            exit_with(ExitCode.DATA)
        _say(printable(traceback.format_exc()).rstrip("\n"))
        exit_with(ExitCode.BUG)


def _say(text: str) -> None:
    """Print `text` on stderr after all that was printed before it: a file that takes both has them in this order."""
    with suppress(OSError):  # the reader of the output has closed it
        sys.stdout.flush()
    print(text, file=sys.stderr)


def printable(text: str) -> str:
    """Return `text` in a form for a terminal: without credentials, with control characters and lone surrogates escaped.

    Names in untrusted data may hold control characters, which could change what the terminal shows.
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], without_credentials(text))


def exit_with(code: int, everywhere: bool = False) -> NoReturn:
    """End this process with an exit code. torchrun turns each code into 1, so the code is also written to a file.

    The environment variable DYAD_EXIT_CODE, which launch/torchrun.sh sets, names the file. The file keeps the least
    code of all processes, because an error on one rank makes the other ranks lose a peer, and they then end with the
    high code 4. everywhere: whether all processes of the run end with this error. If so, and if the variable is set,
    the process exits with 0, which torchrun takes for success; the code is then only in the file.
    """
    if name := os.environ.get("DYAD_EXIT_CODE"):
        file = Path(name)
        others = file.read_text() if file.exists() else ""
        file.write_text(str(min(code, int(others or code))))
        code = 0 if everywhere else code
    sys.exit(code)

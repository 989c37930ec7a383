"""Set up the process of a command, import its plugins, run it, and turn its errors into a message and an exit code."""

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from dyad.data.base.child_processes import end_with_parent
from dyad.data.base.errors import ExitCode, UserError, exit_with, printable
from dyad.data.base.plugins import import_typed_plugins


def run(main: Callable[[], None]) -> None:
    """Set up the process, import the plugins of the command line, run `main`, and handle its errors.

    Returns if `main` returns. For a UserError the process exits (`exit_with`) with the exit code of the error; its
    message is printed on stderr, unless another process prints it. Ctrl-C exits with code 130. A PermissionError for a
    file or folder gives one line and code 3. A BrokenPipeError is ignored: the reader of the output, such as head, has
    closed it. Any other exception gives its traceback and ExitCode.BUG.

    Set-up: The garbage collector runs less often, because otherwise it takes a fifth of the time of importing torch and
    open_clip. New files get at most mode 0640, new folders at most 0750. A process that torchrun started ends together
    with its parent, torchrun's agent. GOMP_SPINCOUNT makes a waiting OpenMP thread spin for 1,000 rounds instead of
    300,000, because on a shared core it delays the thread that it waits for. TORCH_CPP_LOG_LEVEL turns off torch's C++
    warnings, 20 lines for each connection to a lost rank. Variables that the user has set stay, and with
    OMP_WAIT_POLICY the first is not set.
    """
    gc.set_threshold(100_000, 20, 10)
    atexit.register(_skip_last_collections)
    os.umask(os.umask(0o077) | 0o027)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it; a plain command outlives its shell, as nohup expects
        end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import_typed_plugins(sys.argv[1:])
        main()
        sys.stdout.flush()
    except UserError as error:
        print_error(error)
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


def print_error(error: UserError) -> None:
    """Print the message of `error` on stderr, unless it is empty or another process prints it."""
    if str(error) and not error.printed_elsewhere:
        _say(f"error: {printable(str(error))}")


def _skip_last_collections() -> None:
    """Freeze the garbage collector at exit; its last passes over a million objects would take a second.

    If Triton is loaded, nothing is frozen: its library prints a page about each object of its own that has not been
    collected.
    """
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def _say(text: str) -> None:
    """Flush stdout, then print `text` on stderr, so that the lines are in order if both streams go to one file."""
    with suppress(OSError):  # the reader of the output has closed it
        sys.stdout.flush()
    print(text, file=sys.stderr)

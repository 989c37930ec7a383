"""The process of a command: its set-up, its plugins, and what an error becomes: a message and an exit code."""

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

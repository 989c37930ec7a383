"""Stop requests: SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag, which is read between two steps and during encoding.

`fit` of train/step/loop.py then saves the last checkpoint. Encoding, for an evaluation or for mining, raises Stopped.
Before the training loop there is nothing to save, and StartupStop handles the signals, except SIGINT.

SIGHUP (sent when a terminal is closed) is left alone if it is ignored at the start, as `nohup` sets it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any, NoReturn

from dyad.data.base.errors import ExitCode, exit_with

STARTUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGINT (Ctrl-C) still ends a run that starts
STOP_SIGNALS = (*STARTUP_SIGNALS, signal.SIGINT)
GRACE_SECONDS = 10.0  # how long a process that is asked to stop during startup waits for the other ranks to agree


class Stopped(Exception):
    """Raised on all ranks at the same point when a stop request ends work early; no file is left half written."""


def _handle(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Install `handler` for the signals `numbers` and unblock them; return signal → the handler that it had before.

    SIGHUP is skipped if the process ignores it. launch/torchrun.sh starts trainers with these signals blocked, so that
    none is lost before a handler is installed; signals that arrived meanwhile are handled once they are unblocked.
    """
    wanted = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    return before


def _leave_dead_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if the terminal is closed: every later write to it would fail."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError as error:
            if error.errno != errno.EIO:  # not a closed terminal
                continue
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)


def leave_now(code: ExitCode) -> NoReturn:
    """End this process at once with exit code `code`, from any of its threads.

    No further `finally` block, exit handler or other thread runs any more. The code is also written to the file named
    by DYAD_EXIT_CODE, if that is set and holds no lower code: launch/torchrun.sh reads it.
    """
    try:
        exit_with(code)
    except SystemExit:  # it would only end this thread
        _leave_dead_terminal()
        sys.stdout.flush()
    finally:
        os._exit(code)


class StopRequest:
    """Catches stop signals during a block: `with StopRequest() as stop:` sets `stop.requested` when one arrives.

    The signals are SIGTERM, SIGINT, SIGUSR1 and SIGHUP; only the main thread may enter the block. A stop requested
    during startup sets `requested` too. A second signal changes nothing. The end of the block restores the old
    handlers; a stop that was requested is kept, so that the next run of a sweep stops too. Ranks may get the signal at
    different times, or only one rank gets it: combine `requested` over all ranks before acting on it.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._before = _handle(STOP_SIGNALS, self._on_signal)
        # No plain assignment: a signal that arrived after the line above has set `requested` already.
        if STARTUP.end():
            self.requested = True
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.requested:
            STARTUP.ask()  # the next run of a sweep stops too

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        _leave_dead_terminal()


class StartupStop:
    """Handles stop signals (SIGTERM, SIGUSR1, SIGHUP) before the training loop, while there is nothing to save yet.

    A process uses one object, STARTUP. All ranks stop together at their next `raise_on_all`. If a rank does not reach
    one within GRACE_SECONDS, for example because it reads a large index or waits for another rank, its process exits by
    itself. The main thread may be inside C code then and run no Python handler, so a second thread is woken through a
    socket (signal.set_wakeup_fd). A stop request is never taken back.
    """

    def __init__(self) -> None:
        self._asked, self._over = False, Event()
        self._over.set()

    def begin(self) -> None:
        """Listen for stop signals (SIGTERM, SIGUSR1, SIGHUP) until training begins; does nothing if already listening.

        After a stop signal, a process that has not stopped within GRACE_SECONDS exits by itself. Called again for each
        run of a sweep; if a stop was requested in an earlier run, the GRACE_SECONDS begin at once.
        """
        if not self._over.is_set():
            return
        self._over = Event()
        woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        _handle(STARTUP_SIGNALS, self.ask)
        if self._asked:
            self._waking.send(bytes(STARTUP_SIGNALS[:1]))
        Thread(target=self._watch, args=(woken, self._over), daemon=True).start()

    def ask(self, *_: object) -> None:
        """Request that this process stops: `raise_on_all` raises Preempted while this object listens, now or later.

        Also used as the handler of stop signals, whose arguments are ignored.
        """
        self._asked = True
        _leave_dead_terminal()

    def stop_requested(self) -> bool:
        """Whether a stop was requested and this object still handles signals, as the training loop has not begun."""
        return self._asked and not self._over.is_set()

    def end(self) -> bool:
        """Stop listening for stop signals, as the training loop now handles them; return whether a stop was requested.

        Returns False if this object was not listening. Signal handlers stay set until the caller sets its own.
        """
        if self._over.is_set():
            return False
        signal.set_wakeup_fd(-1)
        self._waking.close()
        self._over.set()
        return self._asked

    @staticmethod
    def _watch(woken: socket.socket, over: Event) -> None:
        """Wait for a stop signal, then exit the process unless `over` (the end of startup) is set within GRACE_SECONDS.

        Runs in a thread. woken: the socket to which Python writes the number of every signal; an empty read means that
        `end` has closed the socket.
        """
        with woken:
            while (number := woken.recv(1)) and number[0] not in STARTUP_SIGNALS:
                pass
            # the socket stays open meanwhile: Python would print an error for each further signal
            if number and not over.wait(GRACE_SECONDS):
                leave_now(ExitCode.HARDWARE if _sibling_was_killed() else ExitCode.REQUEUE)


def _sibling_was_killed() -> bool:
    """Whether a training process of this machine was killed: fewer than LOCAL_WORLD_SIZE run, and none wrote a code.

    torchrun then sends the other processes SIGTERM, as a scheduler would. They must exit with HARDWARE instead of
    REQUEUE, as running the command again may not help. Returns False if launch/torchrun.sh did not start this process.
    """
    try:
        code = Path(os.environ["DYAD_EXIT_CODE"]).read_text()
        alive = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        return not code and len(alive) < int(os.environ["LOCAL_WORLD_SIZE"])
    except (OSError, KeyError):
        return False


STARTUP = StartupStop()

"""Stop requests: SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag, which is read between two steps and while encoding.

SIGHUP (sent when a terminal is closed) is left alone if it is ignored at the start, as `nohup` sets it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from threading import Event, Thread
from types import FrameType
from typing import Any

from dyad.data.base.errors import ExitCode, exit_with

STARTUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGINT (Ctrl-C) still ends a run that starts
STOP_SIGNALS = (*STARTUP_SIGNALS, signal.SIGINT)
GRACE_SECONDS = 10.0  # how long a process that is asked to stop during startup waits for the other ranks to agree


class Stopped(Exception):
    """Work was abandoned because of a stop request, on all ranks at the same point, with nothing half written."""


def _handle(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Install `handler` for these signals; returns the handlers that they had before.

    launch/torchrun.sh starts trainers with these signals blocked, so that none is lost before there is a handler. They
    are unblocked here, and pending ones arrive now.
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


class StopRequest:
    """`with StopRequest() as stop: … if stop.requested: …`: stop signals of the block set `requested`.

    A second signal changes nothing. The old handlers come back at the end. Ranks may get the signal at different times,
    or only one of them gets it: reduce `requested` over all ranks before acting on it.
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
    """Stop requests until the training loop takes over with StopRequest, when there is nothing to save yet.

    All ranks stop together at their next agreement (`raise_on_all`). If none follows within GRACE_SECONDS, because the
    rank reads a large index or waits for another rank, the process ends by itself. The main thread may be inside C code
    then and run no Python handler, so a second thread is woken through a socket (signal.set_wakeup_fd). A request stays
    for good.
    """

    def __init__(self) -> None:
        self._asked, self._over = False, Event()
        self._over.set()

    def begin(self) -> None:
        """Start listening; called again for each run of a sweep. An earlier request starts the grace period at once."""
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
        """Request a stop; also the signal handler."""
        self._asked = True
        _leave_dead_terminal()

    def stop_requested(self) -> bool:
        return self._asked and not self._over.is_set()

    def end(self) -> bool:
        """Stop listening, as the training loop takes over; returns whether a stop was requested."""
        if self._over.is_set():
            return False
        signal.set_wakeup_fd(-1)
        self._waking.close()
        self._over.set()
        return self._asked

    @staticmethod
    def _watch(woken: socket.socket, over: Event) -> None:
        """Wait for a startup signal; end the process if startup is not over GRACE_SECONDS later.

        Python writes the number of every signal to the socket. An empty read means that `end` has closed it.
        """
        with woken:
            while (number := woken.recv(1)) and number[0] not in STARTUP_SIGNALS:
                pass
        if number and not over.wait(GRACE_SECONDS):
            try:
                exit_with(ExitCode.REQUEUE)
            except SystemExit:  # it would only end this thread
                _leave_dead_terminal()
                sys.stdout.flush()
            finally:
                os._exit(ExitCode.REQUEUE)


STARTUP = StartupStop()

"""Being asked to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag, seen between two steps and while encoding.

SIGHUP, which a closed terminal sends, is left alone when it is ignored from the start: `nohup` does that.
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

from data.errors import ExitCode, leave

STARTUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # Ctrl-C ends what has not begun
STOP_SIGNALS = (*STARTUP_SIGNALS, signal.SIGINT)
GRACE_SECONDS = 10.0  # seconds that a process which is asked to stop while it starts waits for the others to agree


class Stopped(Exception):
    """Something was given up because the run is to stop: on all ranks at the same place, with nothing half done."""


Handler = Callable[[int, FrameType | None], None]


def _handle(numbers: tuple[signal.Signals, ...], handler: Handler) -> dict[signal.Signals, Any]:
    """Handle these signals from now on. The handlers that they had before.

    launch/torchrun.sh starts trainers with all of them blocked: what came before this moment comes now.
    """
    wanted = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    return before


def _leave_dead_terminal() -> None:
    """Output goes nowhere once the terminal is closed: every later write, and Python's own at the end, would fail."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError as error:
            if error.errno != errno.EIO:
                continue
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)


class StopRequest:
    """`with StopRequest() as stop: … if stop.requested: …`. A second signal changes nothing; old handlers come back.

    Ranks may be told at different moments, or one alone: agree on `requested` over all of them before acting.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._before = _handle(STOP_SIGNALS, self._note)
        if STARTUP.end():  # not an assignment: one that came since the line above is noted already
            self.requested = True
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.requested:
            STARTUP.ask()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        _leave_dead_terminal()


class StartupStop:
    """What stands for StopRequest until the loop is there: nothing is to be saved yet. A request stays for good.

    All ranks leave together at their next agreement; a rank leaves alone when none comes in time, because it reads a
    large index or waits for another rank. Nothing of Python runs on its main thread then: signals wake another one.
    """

    def __init__(self) -> None:
        self._asked, self._over = False, Event()
        self._over.set()

    def begin(self) -> None:
        """Again for each run of a sweep; one that was asked to stop before it begins waits for the others at once."""
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
        self._asked = True
        _leave_dead_terminal()

    def stop_requested(self) -> bool:
        return self._asked and not self._over.is_set()

    def end(self) -> bool:
        """The loop takes over; whether the run was asked to stop."""
        if self._over.is_set():
            return False
        signal.set_wakeup_fd(-1)
        self._waking.close()
        self._over.set()
        return self._asked

    @staticmethod
    def _watch(woken: socket.socket, over: Event) -> None:
        with woken:
            while (number := woken.recv(1)) and number[0] not in STARTUP_SIGNALS:
                pass
        if number and not over.wait(GRACE_SECONDS):
            try:
                leave(ExitCode.REQUEUE)
            except SystemExit:
                _leave_dead_terminal()
                sys.stdout.flush()
            finally:
                os._exit(ExitCode.REQUEUE)


STARTUP = StartupStop()

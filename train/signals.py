"""Being asked to stop: SIGTERM, SIGINT and SIGUSR1 set a flag, and the loop acts on it between two steps."""

from __future__ import annotations

import signal
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """`with StopRequest() as stop: … if stop.requested: …`. A second signal changes nothing; old handlers come back.

    Ranks may be told at different moments, or one alone: agree on `requested` over all of them before acting.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in ASKING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

"""A process that ends with the one that started it, even when that one is killed by kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. On Linux; elsewhere nothing.

    A process whose parent has ended already leaves at once, where the parent is known: multiprocessing knows it, and
    launch/torchrun.sh puts that of a trainer into DYAD_AGENT.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    agent = os.environ.pop("DYAD_AGENT", None)  # not for what this process starts
    starter = parent_process()
    parent = starter.pid if starter else int(agent or 0)
    if parent and os.getppid() != parent:
        os._exit(1)

"""A process that ends with the one that started it, even when that one is killed by kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. On Linux; elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    parent = parent_process()  # None unless multiprocessing started this process
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before the kernel was told
        os._exit(1)

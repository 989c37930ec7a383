"""Make child processes end together with their parent, even when SIGKILL ends the parent."""

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Does nothing except on Linux.

    If the parent process has already ended, this process exits at once with code 1. To notice this, the parent's
    process id is taken from multiprocessing or, in a training process, from the environment variable DYAD_AGENT (the
    process id of torchrun, set by launch/torchrun.sh). The variable is deleted. Without either there is no such check.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    agent = os.environ.pop("DYAD_AGENT", None)  # child processes must not inherit it
    starter = parent_process()
    parent = starter.pid if starter else int(agent or 0)
    if parent and os.getppid() != parent:
        os._exit(1)

"""Memory that nobody needs any more, given back: otherwise it counts as this process's."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import numpy as np


def forget_pages(array: np.ndarray) -> None:
    """Pages of a mapped file that were read; they are read again when asked for. Any other array stays as it is."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap) and not array.flags.writeable:  # own changes would be lost
        base.madvise(mmap.MADV_DONTNEED)


def trim() -> None:
    """What was freed between things that are still in use: glibc keeps it, after some thousand texts of different
    lengths hundreds of megabytes. Milliseconds; nothing where the C library is another.
    """
    if release := _malloc_trim():
        release(0)


@cache
def _malloc_trim() -> ctypes._FuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)

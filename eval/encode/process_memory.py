"""Return memory that is no longer needed to the operating system."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


def drop_pages(array: np.ndarray) -> None:
    """Drop the pages of a memory-mapped file that were read; they are read again on the next access. No-op for other
    arrays."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap) and not array.flags.writeable:  # changes that are not yet in the file would be lost
        base.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """malloc_trim(0): return the free parts of a fragmented heap to the system. It takes milliseconds.

    Without it, some thousand texts of different lengths leave hundreds of megabytes. No-op without glibc.
    """
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)

"""Give memory that is no longer needed back to the operating system."""

import ctypes
import mmap

import numpy as np


def drop_pages(array: np.ndarray) -> None:
    """Release the RAM of a memory-mapped, read-only array; its values are read from the file again on the next access.

    Of a part of such an array, the pages of the whole file are released. Does nothing for other arrays.
    """
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap) and not array.flags.writeable:  # changes that are not yet in the file would be lost
        base.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Give the free parts of the C heap back to the operating system (malloc_trim); without glibc do nothing.

    Without this call, some thousand texts of different lengths leave hundreds of megabytes unused.
    """
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)

"""Open arrays in untrusted .npy files, which another user may have made; evenly spaced indices."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import numpy as np

from dyad.data.base.files import checked_path


@contextmanager
def header_errors() -> Iterator[None]:
    """Context manager that raises ValueError in place of the various exceptions of numpy for a damaged .npy header.

    OSError and ValueError pass unchanged.
    """
    try:
        with np.errstate(over="raise"):  # overflow in the product of a shape
            yield
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TokenError, TypeError) as error:
        raise ValueError(f"its head is damaged: {error or type(error).__name__}") from error


def map_array(path: Path | str, folder: Path | None = None) -> np.ndarray:
    """Memory-map the array in a .npy file and return it, read-only, with the dtype and shape of its header.

    folder: where the file must lie after symbolic links are resolved; None: anywhere. Raises OSError for a file that
    cannot be opened, is no regular file or lies outside `folder`; ValueError for another format, such as a .npz, for an
    array of Python objects (pickle), and for a file that is shorter than its header says.
    """
    with header_errors():
        return np.lib.format.open_memmap(checked_path(path, folder=folder), "r")


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` indices of 0 … count − 1, evenly spaced and ascending, each once; int64.

    The first is 0 and, if there are at least two, the last is count − 1. With count ≤ most all indices are returned.
    """
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)

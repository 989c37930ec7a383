"""Arrays in .npy files that another user may have made."""

from pathlib import Path

import numpy as np

from dyad.data.base.files import checked_path


def map_array(path: Path | str, folder: Path | None = None) -> np.ndarray:
    """Memory-map the array in a .npy file, to be read alone.

    Raises OSError for a file that cannot be opened, is no regular file or leads out of `folder` (None: anywhere),
    ValueError for a file of another format, such as a pickle or a .npz, and for one that is shorter than its head says.
    """
    try:
        with np.errstate(over="raise"):  # of the numbers of a shape
            return np.lib.format.open_memmap(checked_path(path, folder=folder), "r")
    except (ArithmeticError, MemoryError, RecursionError, TypeError) as error:  # of a head with absurd numbers
        raise ValueError(f"its head is damaged: {error or type(error).__name__}") from error

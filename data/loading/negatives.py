"""Draws hard negatives from a list, and finds out whether the data have any."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from dyad.data.base.errors import ConfigError, SampleError

LOOKED_AT = 100  # rows


def distinct(keys: Sequence[int], excluded: set[int]) -> list[int]:
    """Return the positions in `keys`, ascending, at which a key occurs for the first time. Keys in `excluded` are left
    out."""
    first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in excluded}
    return sorted(first.values())


def sample(pool: Sequence[int], draws: Sequence[float] | np.ndarray) -> list[int]:
    """Draw entries of `pool` without replacement (Fisher-Yates shuffle), one for each random number in `draws`. The
    numbers are in [0, 1). If `pool` has fewer entries than `draws`, all entries are drawn."""
    left = list(pool)
    for i, draw in enumerate(draws[: len(left)]):
        other = i + int(draw * (len(left) - i))
        left[i], left[other] = left[other], left[i]
    return left[: len(draws)]


def check_negatives(rows: int, has_any: Callable[[int], object], where: str) -> None:
    """Raise ConfigError if none of LOOKED_AT rows, evenly spaced, has hard negatives: a run would train without them.

    rows: how many there are. has_any(i): whether row i has hard negatives; it may raise SampleError. where: the keys
    that say where they are, for the message.
    """
    looked = np.unique(np.linspace(0, rows - 1, LOOKED_AT).astype(np.int64)).tolist()
    for i in looked:
        with suppress(SampleError):  # bad samples are replaced
            if has_any(i):
                return
    raise ConfigError(
        f"data.negatives.per_row: none of {len(looked):,} rows of data.train, evenly spaced, has hard negatives. "
        f"{where} says where they are; data.negatives.per_row=0 trains without them"
    )

"""Draws hard negatives from a list of candidates."""

from collections.abc import Sequence

import numpy as np


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

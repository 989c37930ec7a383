"""Draws hard negatives from a list of candidates, opens a file of mined ones, and says where to look for any."""

import re
from collections.abc import Sequence

import numpy as np

from dyad.data.base.errors import ConfigError
from dyad.data.shards.rows import Rows, open_rows
from dyad.data.shards.sources import parse_sources

LOOKED_AT = 100  # samples, for hard negatives


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


def looked_at(count: int) -> list[int]:
    """Return at most LOOKED_AT positions, evenly spaced over `count` samples, that show whether data have negatives."""
    return np.unique(np.linspace(0, count - 1, min(LOOKED_AT, count)).astype(np.int64)).tolist()


def open_mined(path: str, key: str = "data.negatives.file") -> Rows:
    """Open the one file that the configuration key `key` names. Raises ConfigError for several, or one with a
    weight."""
    source, *others = parse_sources([path], key)
    if others or source.weight != 1:
        raise ConfigError(f"{key}={path}: write one file, without a weight.")
    return open_rows(source.shards)


def is_text(value: object) -> bool:
    """Whether a value of a mined file is a text, one that UTF-8 can hold: it cannot hold half a surrogate pair."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)

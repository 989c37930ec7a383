"""Functions for hard negatives of any task: draw from a list of candidates, open a file of mined negatives."""

import re
from collections.abc import Sequence

import numpy as np

from dyad.data.base.errors import ConfigError
from dyad.data.shards.rows import Rows, open_rows
from dyad.data.shards.sources import parse_sources

LOOKED_AT = 100  # the most samples that are checked for hard negatives


def first_indices(keys: Sequence[int], excluded: set[int]) -> list[int]:
    """Return the indices, ascending, at which a key occurs in `keys` for the first time, except keys in `excluded`."""
    first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in excluded}
    return sorted(first.values())


def draw_entries(pool: Sequence[int], draws: Sequence[float] | np.ndarray) -> list[int]:
    """Draw entries of `pool` without replacement, one for each of `draws`, random numbers in [0, 1) (Fisher-Yates).

    If `pool` has fewer entries than `draws`, all entries are drawn. `pool` is not changed.
    """
    left = list(pool)
    for i, draw in enumerate(draws[: len(left)]):
        other = i + int(draw * (len(left) - i))
        left[i], left[other] = left[other], left[i]
    return left[: len(draws)]


def open_mined(path: str, key: str = "data.negatives.file") -> Rows:
    """Open the file of mined negatives at `path`, the value of the configuration key `key`, as rows.

    A folder or glob gives the rows of all its files. Raises ConfigError for a path that matches no .jsonl or .tar file,
    for paths joined by '::', and for a sampling weight (path@2); DataError for a damaged file. What the rows hold is
    not checked.
    """
    source, *others = parse_sources([path], key)
    if others or source.weight != 1:
        raise ConfigError(f"{key}={path}: write one file, without a weight.")
    return open_rows(source.shards)


def is_text(value: object) -> bool:
    """Whether `value`, from a file of mined negatives, is a str that UTF-8 can encode (without lone surrogates)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)

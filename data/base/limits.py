"""Check the numbers of a configuration dataclass: the limits in the metadata of its fields, and MOST for all."""

import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, cast

from dyad.data.base.errors import raise_broken

# Name of a limit in the metadata of a field → comparison(value, limit) that a legal value passes, words of the message
LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {"least": (operator.ge, "{:,} or more")}
LIMITS |= {"most": (operator.le, "{:,} or less")}
LIMITS |= {"above": (operator.gt, "above {:,}"), "below": (operator.lt, "below {:,}")}
MOST = 10**12  # the largest number: a larger one is a typing error, and would overflow or take all memory somewhere


def whole_number(name: str, value: Any) -> int:
    """Return `value`, read from an untrusted file, if it is an int in 0 … MOST (no bool); else raise ValueError.

    name: what the number is, for the message.
    """
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{name} is {value!r:.40}, no whole number from 0 to {MOST:,}")
    return value


def number_in(value: Any) -> int | float | None:
    """Return `value`, read from an untrusted file, if it is a number (no bool); the number in a text; else None."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_limits(config: Any, prefix: str = "") -> None:
    """Raise ConfigError if numbers of the dataclass `config` break limits, with a line for each of the first five.

    Arguments and limits as of `broken_limits`.
    """
    raise_broken(broken_limits(config, prefix))


def broken_limits(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield messages about the numbers in the fields of a dataclass that break a limit.

    The metadata of a field may have "least" (value ≥ limit), "most" (≤), "above" (>) or "below" (<). They hold for a
    number and for each number of a list; numbers in a dict are not checked. Every number must also be finite and at
    most MOST in size. A value that is no number (None, "auto") breaks no limit. The fields of nested dataclasses are
    checked too. prefix: dotted path of `config` in the whole configuration, such as "data.", for the message.
    """
    for f in fields(cast(Any, config)):
        key, value = f"{prefix}{f.name}", getattr(config, f.name)
        if is_dataclass(value):
            yield from broken_limits(value, f"{key}.")
        numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
        limits = [(holds, f.metadata[name], words) for name, (holds, words) in LIMITS.items() if name in f.metadata]
        if not all(abs(each) <= MOST for each in numbers):  # also not for nan
            yield f"{key}={value!s:.80}: must be a number of at most {MOST:,}"
            continue
        for holds, limit, words in limits:
            if not all(holds(each, limit) for each in numbers):
                yield f"{key}={value!s:.80}: must be {words.format(limit)}"

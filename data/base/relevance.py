"""The relevance of a positive pair: how much it counts in a loss, a weight above 0 and at most 1."""

from contextlib import suppress
from typing import Any

from dyad.data.base.errors import BadRow

SMALLEST = 2.0**-126  # the smallest normal number of float32: a smaller weight could become 0


class IfGiven(str):
    """A setting data.relevance for data that are evaluated on. Their rows need no relevance. A pair with a score is
    taken if the score is its relevance, as in training."""


def if_given(name: str | None) -> IfGiven | None:
    """Return the setting data.relevance of training for data that are evaluated on."""
    return None if name is None else IfGiven(name)


def relevance_of(value: Any, where: str) -> float:
    """Return the relevance that a file gives a positive pair: `value`, a number, or a text with one, as tables have.

    where: its location, for the message. Raises BadRow for anything else, and for a number that is not in (0, 1].
    """
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not SMALLEST <= number <= 1:
        raise BadRow("no relevance", f"{where} is {value!r:.80}, and must be a number above 0 and at most 1")
    return float(number)

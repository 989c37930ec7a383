"""Read the relevance of a positive pair: the weight in (0, 1] with which the pair counts in a loss."""

from typing import Any

from dyad.data.base.errors import BadRow
from dyad.data.base.limits import number_in

SMALLEST = 2.0**-126  # the smallest normal number of float32: a smaller weight could become 0


class IfGiven(str):
    """The setting data.relevance or data.teacher, the name of a field, in the form for evaluation data.

    By this type instead of str, `record_of` (data/question_passage/formats.py) knows that rows may lack the field. It
    then reads a relevance only in rows of sentence-transformers' columns that have the field, and never a teacher's
    score. Rows of pairs with a score in another field are still refused.
    """


def if_given(name: str | None) -> IfGiven | None:
    """Convert `name`, the setting data.relevance or data.teacher of training, to IfGiven for evaluation data; None to
    None."""
    return None if name is None else IfGiven(name)


def relevance_of(value: Any, where: str) -> float:
    """Convert `value`, which a file gives as the relevance of a positive pair, to a float in (0, 1].

    value: a number, or text that holds one. where: the name of the field or column, for the message. Raises BadRow for
    a value that is no number, and for a number above 1 or below SMALLEST.
    """
    number = number_in(value)
    if number is None or not SMALLEST <= number <= 1:
        raise BadRow("no relevance", f"{where} is {value!r:.80}, and must be a number above 0 and at most 1")
    return float(number)

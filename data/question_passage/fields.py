"""Read the fields of a row: texts, lists, ids and numbers. A value of another kind raises BadRow."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from dyad.data.base.errors import BadFormat, BadRow, nearest
from dyad.data.base.limits import number_in

Fields = Mapping[str, Any]
NAMED = 20  # fields that a message lists
CHATS = ("messages", "conversations")  # fields of rows with the turns of a chat


def named(fields: Iterable[str]) -> str:
    """Join the first NAMED field names as text for a message, with … for further ones; "none" if there is no name.
    Names with control characters are escaped, and long ones cut."""
    names = [short_name(name) for name in islice(fields, NAMED + 1)]
    return ", ".join([*names[:NAMED], *(["…"] if len(names) > NAMED else [])]) or "none"


def short_name(name: str) -> str:
    """Return a field name for a message: escaped if it has control characters, cut to 80 characters."""
    return f"{name if name.isprintable() else repr(name):.80}"


def text_of(value: Any, where: str) -> str:
    """Return `value`, the content of a field, which must be a text. Raises BadRow when it is no str or no valid
    Unicode. where: location of the field, for the message."""
    if not isinstance(value, str):
        raise BadRow("no text", f"{where} is {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow("no Unicode text", f"{where} has half a surrogate pair at {error.start}") from None
    return value


def list_of(fields: Fields, name: str) -> list[Any]:
    """Return the list in the field `name`; an empty one when the field is missing or null. Raises BadRow for any other
    value."""
    value = fields.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        raise BadRow("a text where a list belongs", f"{name} is {value!r:.80}; write [{value!r:.20}…]")
    if not isinstance(value, list):
        raise BadRow("no list", f"{name} is {value!r:.80}")
    return value


def texts_of(fields: Fields, name: str) -> list[str]:
    """Return the list of texts in the field `name`; an empty one when the field is missing or null. Raises BadRow when
    the value is no list, and for an entry that is no text or no valid Unicode."""
    return [text_of(value, f"{name}[{i}]") for i, value in enumerate(list_of(fields, name))]


def id_of(fields: Fields, names: Sequence[str], where: str) -> str | None:
    """Return the id in a row as text: the value of the first field of `names` that is neither missing nor null; None
    when all these fields are missing or null.

    where: location of the row, for the message. Raises BadRow when the value is neither a whole number nor a non-empty
    text of valid Unicode.
    """
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        return None
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("no id", f"{name} of {where} is {value!r:.80}, neither a text nor a whole number")
    return text_of(str(value), f"{name} of {where}")


def required_value(fields: Fields, name: str, where: str, kind: str) -> Any:
    """Return the value of the field `name`, which may be null. where: location of the fields, for the message. Raises
    BadFormat of the kind `kind`, such as "no score", if there is no such field."""
    if name not in fields:
        raise BadFormat(kind, f"{where} has no '{name}'.{nearest(name, fields)} Its fields are {named(fields)}")
    return fields[name]


def finite(value: Any, where: str, most: float = sys.float_info.max) -> float:
    """Convert `value`, a number or the text of one, to a finite float. Raises BadRow of the kind "no score" for any
    other value and for an absolute value above `most`. where: location of the value, for the message."""
    number = number_in(value)
    # the comparison is also exact for whole numbers that are too large for a float, and False for NaN
    if number is None or not abs(number) <= most:
        raise BadRow("no score", f"{where} is {value!r:.80}, no finite number")
    return float(number)


def chat_error(fields: Fields) -> BadFormat | None:
    """Return the error for a row with the turns of a chat; None for any other row."""
    if name := next((name for name in CHATS if isinstance(fields.get(name), list)), None):
        row = 'a row {"query": PROMPT, "pos": [ANSWER]} of each answer, whose prompt is the text of the turns before it'
        return BadFormat("chat", f"{name} has turns. For task=language_model make {row}; see docs/language_models.md")
    return None


def label_of(fields: Fields, name: str) -> str:
    """Return the class label of a row, the value of its field `name`, as text. Raises BadRow if the field is missing or
    null."""
    if fields.get(name) is None:
        raise BadRow("no label", f"it has no '{name}'; its fields are {named(fields)}.{nearest(name, fields)}")
    return str(fields[name])

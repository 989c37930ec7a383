"""JSON that a stranger may have written, parsed within bounds: some megabytes of brackets can take a hundred times the
memory, and what is nested deep breaks whatever walks through it."""

from __future__ import annotations

import json
from typing import Any

MOST = 1 << 19  # commas and opening brackets, those in texts too
DEEPEST = 100  # lists and objects inside each other


def parsed(content: str | bytes) -> Any:
    """The value; ValueError with the reason when it is no JSON, or out of bounds."""
    text = content if isinstance(content, str) else str(content, "utf-8-sig")
    refuse_crowded(text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} times") from None
    refuse_deep(value)
    return value


def refuse_crowded(text: str) -> None:
    """Raise ValueError for JSON of more than MOST values; nothing is parsed."""
    if len(text) > MOST and sum(map(text.count, ",[{")) > MOST:
        raise ValueError(f"more than {MOST:,} commas and opening brackets")


def refuse_deep(value: Any) -> None:
    """Raise ValueError for a value that is nested more than DEEPEST times."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [each for one in level if type(one) is dict for each in one.values()]
        level = inner + [each for one in level if type(one) is list for each in one]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} times")

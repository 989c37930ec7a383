"""JSON that a stranger may have written, parsed within bounds: some megabytes of brackets can take a hundred times the
memory, and what is nested deep breaks whatever walks through it. Torch-free."""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

MOST = 1 << 19  # commas and opening brackets outside texts
DEEPEST = 100  # lists and objects inside each other
LARGEST = 1 << 26  # bytes of a file
SEPARATORS = ",[{"
TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # never goes back, so that it takes linear time


def read_json(path: Path, largest: int = LARGEST, most: int = MOST) -> Any:
    """The value in a file of at most `largest` bytes; raises OSError, or ValueError as `parsed`."""
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise ValueError(f"more than {largest:,} bytes")
        content = file.read(size)  # memory for so many bytes is taken at once
    return parsed(content, most)


def parsed(content: str | bytes, most: int = MOST) -> Any:
    """The value; ValueError with the reason when it is no JSON, or out of bounds."""
    text = content if isinstance(content, str) else str(content, "utf-8-sig")
    refuse_crowded(text, most)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} times") from None
    refuse_deep(value)
    return value


def refuse_crowded(text: str, most: int = MOST) -> None:
    """Raise ValueError for JSON of more than `most` commas and opening brackets outside texts; nothing is parsed."""
    if len(text) <= most or (count := _separators(text)) <= most:
        return
    texts = islice(TEXT.finditer(text), 2 * most + 2)  # valid JSON of more has too many separators between them
    if count - sum(_separators(found[0]) for found in texts) > most:
        raise ValueError(f"more than {most:,} commas and opening brackets")


def _separators(text: str) -> int:
    return sum(map(text.count, SEPARATORS))


def refuse_deep(value: Any) -> None:
    """Raise ValueError for a value that is nested more than DEEPEST times."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [each for one in level if type(one) is dict for each in one.values()]
        level = inner + [each for one in level if type(one) is list for each in one]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} times")

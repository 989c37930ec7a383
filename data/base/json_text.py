"""Parse JSON of untrusted origin within limits on its size, its count of commas and brackets, and its depth. Does not
import torch.

Without limits, a few megabytes of brackets could take a hundred times the memory, and deep nesting breaks recursive
code.
"""

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

from dyad.data.base.files import open_foreign

MOST = 1 << 19  # commas and opening brackets outside texts
DEEPEST = 100  # lists and objects inside each other
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair: JSON can write it, UTF-8 cannot
LARGEST = 1 << 26  # bytes of a file
SEPARATORS = ",[{"
TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # possessive, so that matching takes linear time


def read_json(path: Path, largest: int = LARGEST, most: int = MOST, folder: Path | None = None) -> Any:
    """Parse a JSON file of at most `largest` bytes that lies in `folder` (None: anywhere) and return its value.

    Raises OSError when the file cannot be read, is no regular file or lies elsewhere; ValueError when it is too large,
    is no UTF-8 JSON, has more than `most` commas and opening brackets outside strings, or is nested more than DEEPEST
    times.
    """
    with open_foreign(path, largest, folder) as file:
        content = file.read(os.fstat(file.fileno()).st_size)  # read(largest) would allocate so many bytes
    return parse_json(content, most)


def parse_json(content: str | bytes, most: int = MOST) -> Any:
    """Parse JSON text and return its value. Bytes must be UTF-8; their byte-order mark is skipped.

    Raises ValueError when it is not JSON, has more than `most` commas and opening brackets outside strings, or is
    nested more than DEEPEST times.
    """
    text = content if isinstance(content, str) else str(content, "utf-8-sig")
    check_value_count(text, most)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} times") from None
    check_depth(value)
    return value


def check_value_count(text: str, most: int = MOST) -> None:
    """Raise ValueError for JSON text with more than `most` commas and opening brackets outside strings.

    The text is not parsed, because the parsed value could take a hundred times the memory of the text. Whether it is
    JSON is not checked.
    """
    if len(text) <= most or (count := _separators(text)) <= most:
        return
    texts = islice(TEXT.finditer(text), 2 * most + 2)  # valid JSON of more texts has too many separators between them
    if count - sum(_separators(found[0]) for found in texts) > most:
        raise ValueError(f"more than {most:,} commas and opening brackets")


def _separators(text: str) -> int:
    return sum(map(text.count, SEPARATORS))


def check_depth(value: Any) -> None:
    """Raise ValueError for a parsed JSON value that is nested more than DEEPEST times."""
    level = [value]
    for _ in range(DEEPEST + 1):
        if not (level := [one for one in level if type(one) in (dict, list)]):
            return
        level = [each for one in level for each in (one.values() if type(one) is dict else one)]
    raise ValueError(f"nested more than {DEEPEST} times")

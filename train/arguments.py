"""Values of a configuration as arguments of the command line. Imports neither torch nor Hydra."""

import re
from collections.abc import Mapping
from typing import Any

# Texts that Hydra's grammar reads literally: no number, no bool, not null
UNQUOTED = re.compile(r"(?!([+-]?(\.?\d[\d._]*(e[+-]?\d+)?|nan|inf)|true|false|null)$)[\w./:@+-]+", re.ASCII | re.I)


def as_argument(value: Any) -> str:
    """Return a value as the text that Hydra parses to it, in quotes where needed: True → true, None → null."""
    if isinstance(value, list):
        return f"[{','.join(map(as_argument, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{as_argument(item)}' for name, item in value.items())}}}"
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    return text if not isinstance(value, str) or UNQUOTED.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """Return `text` in double quotes. Hydra takes a backslash literally, except before a quote."""
    doubled = re.sub(r'\\+(?="|\Z)', lambda found: 2 * found[0], text)
    return '"{}"'.format(doubled.replace('"', r"\""))

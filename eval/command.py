"""key=value arguments of a small command, from a dataclass: `python -m eval`, `python -m train.export`. Torch-free.

A value is taken as it stands, so braces need no quotes of their own here; one pair of quotes around it is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, nearest

T = TypeVar("T")


def parse(arguments: Sequence[str], schema: type[T], command: str) -> T:
    """The schema filled from `key=value` words.

    Raises ConfigError for a word that is not key=value, an unknown or repeated key, a value of the wrong type, a
    missing key.
    """
    hints = get_type_hints(schema)
    given: dict[str, Any] = {}
    for word in arguments:
        key, separator, value = word.partition("=")
        if not separator or word.startswith("-"):
            wanted = nearest(key.lstrip("-").replace("-", "_"), hints)
            raise ConfigError(f"'{word}': options are written key=value here.{wanted} See: {command} --help")
        if key not in hints:
            raise ConfigError(f"unknown key '{key}'.{nearest(key, hints)} Keys: {', '.join(hints)}")
        if key in given:
            raise ConfigError(
                f"{key} is given twice. If the shell expanded braces, quote the word: '{key}=d/{{0..9}}.tar'"
            )
        given[key] = _value(value, "list" in str(hints[key]))
    return _filled(schema, given, command)


def help_text(purpose: str, examples: Mapping[str, str], schema: type, notes: str = "") -> str:
    """The help page: purpose, commands to copy, keys with default and meaning."""
    width = max(len(f.name) for f in fields(schema))
    rows = [f"  {f.name:<{width}}  {_shown(f.default):<8}  {f.metadata['help']}" for f in fields(schema)]
    commands = [f"  {command}\n      {what}" for what, command in examples.items()]
    codes = "Exit codes: 0 ok, 2 configuration, 3 damaged data or checkpoint, 4 hardware"
    blocks = [purpose, "", "Commands to copy:", *commands, "", "Keys (key, default, meaning):", *rows, "", notes, codes]
    return "\n".join(line for i, line in enumerate(blocks) if line or blocks[i - 1])


def _filled(schema: type[T], given: Mapping[str, Any], command: str) -> T:
    config = OmegaConf.structured(schema)
    for key, value in given.items():
        try:
            config[key] = value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}") from error
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]}= is missing. See: {command} --help")
    result = OmegaConf.to_object(config)
    assert isinstance(result, schema)
    return result


def _value(text: str, is_list: bool) -> Any:
    if text == "null":
        return None
    if not is_list:
        return _unquoted(text)
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [_unquoted(part.strip()) for part in _split(inner) if part.strip()]


def _split(text: str) -> list[str]:
    """At commas that stand outside braces and quotes."""
    return re.findall(r"""(?:\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)


def _unquoted(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _shown(default: Any) -> str:
    if default is NO_DEFAULT:
        return "[]"
    if default == MISSING:
        return "(needed)"
    if isinstance(default, Enum):
        return default.name
    return "null" if default is None else str(default)

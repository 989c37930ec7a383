"""key=value command lines from dataclasses of options: parsing, and the help. Imports nothing heavy.

A value is taken as it stands, so braces need no quotes of their own here; one pair of quotes around it is dropped.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from data.errors import ConfigError, nearest

HELP = ("--help", "-h", "help")
NEEDED = "???"  # omegaconf's mark of a value that must be given

T = TypeVar("T")


@dataclass(frozen=True)
class Verb:
    """One command. run(arguments, options) gets the plain arguments and an instance of `options`."""

    name: str
    argument: str
    purpose: str
    examples: tuple[str, ...]
    options: type
    run: Callable[[list[str], Any], None]
    several: bool = False  # takes more than one argument, as a shell's braces and globs make them


def dispatch(program: str, purpose: str, verbs: Sequence[Verb], arguments: Sequence[str], closing: str = "") -> None:
    """Run the verb that the arguments name, or print help. Raises ConfigError for what cannot be understood."""
    if not arguments or arguments[0] in HELP:
        print(_overview(program, purpose, verbs, closing))
        return
    named = {verb.name: verb for verb in verbs}
    name, *rest = arguments
    if name not in named:
        raise ConfigError(f"unknown verb '{name}'.{nearest(name, named)} There is: {', '.join(named)}.")
    verb = named[name]
    if any(argument in HELP for argument in rest):
        print(_verb_help(program, verb))
    else:
        verb.run(*parse_verb(program, verb, rest))


def parse_verb(program: str, verb: Verb, arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Plain arguments and options; raises ConfigError as parse_options, and for a wrong number of arguments."""
    words = [word for word in arguments if word.startswith("-") or re.match(r"[A-Za-z_]\w*=", word)]
    options = parse_options(verb.options, words, f"python -m {program} {verb.name}")
    plain = [word for word in arguments if word not in words]
    if not plain or (len(plain) > 1 and not verb.several):
        got = "is missing" if not plain else f"is one, not {len(plain)}: {' '.join(plain)}"
        raise ConfigError(f"{verb.argument} {got}. For example: {_line(program, verb.examples[0])}")
    return plain, options


def parse_options(schema: type[T], words: Iterable[str], command: str) -> T:
    """The schema filled from key=value words.

    Raises ConfigError for a word that is not key=value, an unknown, repeated or missing key, a value that does not fit.
    """
    types_of = get_type_hints(schema)
    given: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.lstrip("-").partition("=")
        if word.startswith("-") or not separator:
            wanted = nearest(key.replace("-", "_"), types_of)
            raise ConfigError(f"'{word}': options are written key=value here.{wanted} See: {command} --help")
        if key not in types_of:
            raise ConfigError(f"unknown key '{key}'.{nearest(key, types_of)} Keys: {', '.join(types_of)}")
        if key in given:
            raise ConfigError(f"{key} is given twice. If the shell expanded braces, quote: '{key}=d/{{0..9}}.tar'")
        given[key] = _converted(key, text, types_of[key])
    missing = next((f.name for f in _fields(schema) if f.default == NEEDED and f.name not in given), None)
    if missing:
        raise ConfigError(f"{missing}= is missing. See: {command} --help")
    return schema(**given)


def _converted(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if text in ("null", "none", ""):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is list:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [_converted(key, part.strip(), get_args(kind)[0]) for part in _split(inner) if part.strip()]
    if issubclass(kind, Enum) or kind is bool:
        choices = {"true": True, "false": False} if kind is bool else {choice.name: choice for choice in kind}
        if text not in choices:
            raise ConfigError(f"{key}={text} is not one of {', '.join(choices)}.{nearest(text, choices)}")
        return choices[text]
    if kind is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted else text
    try:
        return kind(float(text)) if kind is int and float(text).is_integer() else kind(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{key}={text} is not a {'whole ' if kind is int else ''}number.") from None


def _split(text: str) -> list[str]:
    """At commas that stand outside braces and quotes."""
    return re.findall(r"""(?:\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)


# Help ---------------------------------------------------------------------------------------------------------------


def help_text(purpose: str, examples: Mapping[str, str], schema: type, notes: str = "") -> str:
    """The page of a command without verbs: purpose, commands to copy, keys with default and meaning."""
    commands = [f"  {command}\n      {what}" for what, command in examples.items()]
    codes = "Exit codes: 0 ok, 2 configuration, 3 damaged data or checkpoint, 4 hardware"
    closing = [notes, codes] if notes else [codes]
    return "\n".join([purpose, "", "Commands to copy:", *commands, "", "Keys:", *_table(schema), "", *closing])


def _line(program: str, example: str) -> str:
    return f"python -m {program} {example}"


def _overview(program: str, purpose: str, verbs: Sequence[Verb], closing: str) -> str:
    lines = [purpose, ""]
    lines += [f"  {_line(program, verb.examples[0]):58} {verb.purpose}" for verb in verbs]
    lines += ["", f"Keys and more examples: python -m {program} VERB --help", closing]
    return "\n".join(lines).rstrip()


def _verb_help(program: str, verb: Verb) -> str:
    argument = f"{verb.argument}{'...' if verb.several else ''}"
    lines = [f"{verb.name}: {verb.purpose}", "", f"usage: {_line(program, verb.name)} {argument} [key=value ...]", ""]
    lines += [f"  {_line(program, example)}" for example in verb.examples]
    return "\n".join([*lines, "", *_table(verb.options)])


def _table(options: type) -> list[str]:
    """Key, default, meaning: one line each."""
    width = max(len(option.name) for option in _fields(options))
    return [
        f"  {option.name:<{width}}  {_default(option):26} {option.metadata['help']}{_choices(option.default)}"
        for option in _fields(options)
    ]


def _fields(schema: Any) -> tuple[Field[Any], ...]:
    return fields(schema)


def _default(option: Field[Any]) -> str:
    default = option.default
    if default is MISSING or default == NEEDED:
        return "[]" if default is MISSING else "(needed)"
    shown = (
        default.name if isinstance(default, Enum) else f"{default:g}" if isinstance(default, float) else str(default)
    )
    return {"None": "null", "True": "true", "False": "false"}.get(shown, shown)


def _choices(default: Any) -> str:
    return f" ({'|'.join(choice.name for choice in type(default))})" if isinstance(default, Enum) else ""

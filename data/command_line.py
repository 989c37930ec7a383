"""`VERB ARGUMENT... key=value` command lines: parsing against a dataclass of options, and the help from it."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from data.errors import ConfigError, nearest

HELP = ("--help", "-h", "help")


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
        print(_help(program, verb))
    else:
        verb.run(*parse(program, verb, rest))


def parse(program: str, verb: Verb, arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Plain arguments and options. Raises ConfigError naming the key, its legal values and the nearest name."""
    types_of = get_type_hints(verb.options)
    options, plain = verb.options(), []
    for argument in arguments:
        if not _is_option(argument):
            plain.append(argument)
            continue
        key, _, text = argument.lstrip("-").partition("=")
        if key not in types_of or "=" not in argument or argument.startswith("-"):
            raise ConfigError(_unknown_key(argument, key, verb, types_of))
        setattr(options, key, _converted(key, text, types_of[key]))
    if not plain or (len(plain) > 1 and not verb.several):
        got = "is missing" if not plain else f"is one, not {len(plain)}: {' '.join(plain)}"
        raise ConfigError(f"{verb.argument} {got}. For example: {_line(program, verb.examples[0])}")
    return plain, options


def _is_option(argument: str) -> bool:
    return argument.startswith("-") or re.match(r"[A-Za-z_]\w*=", argument) is not None


def _unknown_key(argument: str, key: str, verb: Verb, known: dict[str, Any]) -> str:
    if key in known:
        return f"'{argument}': keys are written {key}=VALUE."
    return f"{verb.name} has no key '{key}'.{nearest(key, known)} There is: {', '.join(known)}."


def _converted(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if text in ("null", "none", ""):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if issubclass(kind, Enum) or kind is bool:
        choices = {"true": True, "false": False} if kind is bool else {choice.name: choice for choice in kind}
        if text not in choices:
            raise ConfigError(f"{key}={text} is not one of {', '.join(choices)}.{nearest(text, choices)}")
        return choices[text]
    try:
        return kind(float(text)) if kind is int and float(text).is_integer() else kind(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{key}={text} is not a {'whole ' if kind is int else ''}number.") from None


# ---- help ----------------------------------------------------------------------------------------------------------


def _line(program: str, example: str) -> str:
    return f"python -m {program} {example}"


def _overview(program: str, purpose: str, verbs: Sequence[Verb], closing: str) -> str:
    lines = [purpose, ""]
    lines += [f"  {_line(program, verb.examples[0]):58} {verb.purpose}" for verb in verbs]
    lines += ["", f"Keys and more examples: python -m {program} VERB --help", closing]
    return "\n".join(lines).rstrip()


def _help(program: str, verb: Verb) -> str:
    argument = f"{verb.argument}{'...' if verb.several else ''}"
    lines = [f"{verb.name}: {verb.purpose}", "", f"usage: {_line(program, verb.name)} {argument} [key=value ...]", ""]
    lines += [f"  {_line(program, example)}" for example in verb.examples]
    lines += ["", *(f"  {key:18} {default:26} {meaning}" for key, default, meaning in _table(verb.options))]
    return "\n".join(lines)


def _table(options: type) -> list[tuple[str, str, str]]:
    rows = []
    for option in fields(options):
        assert option.default is not MISSING, "options are plain values"
        default = option.default.name if isinstance(option.default, Enum) else option.default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)
        choices = (
            f" ({'|'.join(choice.name for choice in type(option.default))})" if isinstance(option.default, Enum) else ""
        )
        rows.append((option.name, shown, option.metadata["help"] + choices))
    return rows

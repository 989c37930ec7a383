"""Command lines of key=value words for the commands other than training: reading them, and their help.

A dataclass describes the keys of a command: names, types, defaults and meanings (`data.config.described`). A value is
taken as it stands, so braces need no quotes; one pair of quotes around it is dropped. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from math import inf
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING as NEEDED
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from dyad.data.base.errors import ConfigError, nearest

HELP = ("--help", "-h", "help")
AT_COMMAS = re.compile(r"""(?:\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")  # commas outside braces and quotes
WANTED = {  # messages of OmegaConf about a value → what must stand there instead
    r"Value '(.*)' of type .* could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type .* could not be converted to Float": "a number",
    r"Value '(.*)' is not a valid bool": "one of true, false",
    r"Invalid value '(.*)', expected one of \[(.*)\]": r"one of \2",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Verb:
    """One of several commands of a program. `run` gets the plain arguments and an instance of `options`."""

    name: str
    argument: str
    purpose: str
    examples: tuple[str, ...]
    options: type
    run: Callable[[list[str], Any], None]
    several: bool = False  # takes more than one argument: a shell expands braces and globs to many


def dispatch(program: str, purpose: str, verbs: Sequence[Verb], arguments: Sequence[str], closing: str = "") -> None:
    """Run the verb that the arguments name, or print help. Raises ConfigError as `parse_verb`, and for another verb."""
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
    """The plain arguments and the options. Raises ConfigError as `parse_options`, and for too few or many arguments."""
    words = [word for word in arguments if word.startswith("-") or re.match(r"[A-Za-z_]\w*=", word)]
    options = parse_options(verb.options, words, f"python -m {program} {verb.name}")
    plain = [word for word in arguments if word not in words]
    if not plain or (len(plain) > 1 and not verb.several):
        got = "is missing" if not plain else f"is one, not {len(plain)}: {' '.join(plain)}"
        raise ConfigError(f"{verb.argument} {got}. For example: python -m {program} {verb.examples[0]}")
    return plain, options


def parse_options(schema: type[T], words: Iterable[str], command: str) -> T:
    """The dataclass `schema` filled from key=value words; OmegaConf converts the values to the types of its fields.

    Raises ConfigError for a word that is not key=value, an unknown, repeated or missing key, a value that does not fit
    or is below the limit `least` of its field.
    """
    types_of, options = get_type_hints(schema), OmegaConf.structured(schema)
    least_of = {option.name: option.metadata.get("least", -inf) for option in fields(cast(Any, schema))}
    given: set[str] = set()
    for word in words:
        key, separator, text = word.lstrip("-").partition("=")
        if word.startswith("-") or not separator:
            wanted = nearest(key.replace("-", "_"), types_of)
            raise ConfigError(f"'{word}': options are written key=value here.{wanted} See: {command} --help")
        if key not in types_of:
            raise ConfigError(f"unknown key '{key}'.{nearest(key, types_of)} Keys: {', '.join(types_of)}")
        if key in given:
            raise ConfigError(f"{key} is given twice. If the shell expanded braces, quote: '{key}=d/{{0..9}}.tar'")
        if "${" in text:  # OmegaConf would resolve it, also to variables of the environment
            raise ConfigError(f"{key}={text}: nothing is read inside ${{…}} here. Write the value itself.")
        if text == "???":  # OmegaConf's word for a missing value
            raise ConfigError(f"{key}=???: write the value itself.")
        given.add(key)
        try:
            options[key] = _value(text, types_of[key])
        except ValidationError as error:
            raise ConfigError(f"{key}={_misfit(str(error))}") from None
        if isinstance(options[key], int | float) and options[key] < least_of[key]:
            raise ConfigError(f"{key}={options[key]}: must be {least_of[key]} or more")
    if missing := OmegaConf.missing_keys(options):
        raise ConfigError(f"{min(missing)}= is missing. See: {command} --help")
    return cast(T, OmegaConf.to_object(options))


def _value(text: str, kind: Any) -> Any:
    """The text as OmegaConf takes it for a field of the type `kind`: None, a list, a whole number, else the text."""
    if get_origin(kind) in (Union, UnionType):  # X | None
        return None if text in ("null", "none", "") else _value(text, get_args(kind)[0])
    if get_origin(kind) is list:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [_value(part.strip(), get_args(kind)[0]) for part in AT_COMMAS.findall(inner) if part.strip()]
    if kind is bool and text not in ("true", "false"):  # OmegaConf takes more words
        raise ValidationError(f"Value '{text}' is not a valid bool")
    if kind is int:
        with suppress(ValueError, OverflowError):  # 1e4 is a whole number here
            return int(float(text)) if float(text).is_integer() else text
    quoted = kind is str and len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _misfit(message: str) -> str:
    """OmegaConf's message about a value that does not fit its field, in our words: the value and what is wanted."""
    for pattern, wanted in WANTED.items():
        if found := re.match(pattern, message):
            choices = found[2].split(", ") if found.re.groups > 1 else ()
            return f"{found[1]} is not {found.expand(wanted)}.{nearest(found[1], choices)}"
    return message.splitlines()[0]


def overridden(config: T, command: Any) -> T:
    """The dataclass `config` with the value of each field of the same name that `command` has and that is not None."""
    names = {option.name for option in fields(cast(Any, config))} & vars(command).keys()
    given = {name: value for name in names if (value := getattr(command, name)) is not None}
    return replace(cast(Any, config), **given)


def config_option(config: type, name: str) -> Any:
    """A field of a command that has the default and the meaning of the key `name` of a section of the configuration."""
    (known,) = (option for option in fields(cast(Any, config)) if option.name == name)
    return field(default=known.default, metadata=known.metadata)


def run_option(config: type, name: str) -> Any:
    """The same for a command that reads a run. The default is None, which keeps the run's value."""
    known = config_option(config, name).metadata
    return field(default=None, metadata={**known, "help": f"{known['help']}; null: the run's"})


# Help ---------------------------------------------------------------------------------------------------------------


def help_text(purpose: str, examples: Mapping[str, str], schema: type, notes: str = "") -> str:
    """The page of a command without verbs: purpose, commands to copy, keys with default and meaning."""
    commands = [f"  {command}\n      {what}" for what, command in examples.items()]
    codes = "Exit codes: 0 ok, 2 configuration, 3 damaged data or checkpoint, 4 hardware"
    closing = [notes, codes] if notes else [codes]
    return "\n".join([purpose, "", "Commands to copy:", *commands, "", "Keys:", *_table(schema), "", *closing])


def _overview(program: str, purpose: str, verbs: Sequence[Verb], closing: str) -> str:
    lines = [purpose, ""]
    lines += [f"  {f'python -m {program} {verb.examples[0]}':58} {verb.purpose}" for verb in verbs]
    lines += ["", f"Keys and more examples: python -m {program} VERB --help", closing]
    return "\n".join(lines).rstrip()


def _verb_help(program: str, verb: Verb) -> str:
    usage = f"python -m {program} {verb.name} {verb.argument}{'...' if verb.several else ''} [key=value ...]"
    lines = [f"{verb.name}: {verb.purpose}", "", f"usage: {usage}", ""]
    lines += [f"  python -m {program} {example}" for example in verb.examples]
    return "\n".join([*lines, "", *_table(verb.options)])


def _table(schema: Any) -> list[str]:
    """Key, default, meaning and choices: one line for each key."""
    options = fields(schema)
    width = max(len(option.name) for option in options)
    choices = [f" ({'|'.join(type(o.default).__members__)})" if isinstance(o.default, Enum) else "" for o in options]
    return [
        f"  {option.name:<{width}}  {_default(option):26} {option.metadata['help']}{known}"
        for option, known in zip(options, choices, strict=True)
    ]


def _default(option: Field[Any]) -> str:
    default = option.default
    if default is MISSING or default == NEEDED:
        return "[]" if default is MISSING else "(needed)"
    shown = (
        default.name if isinstance(default, Enum) else f"{default:g}" if isinstance(default, float) else str(default)
    )
    return {"None": "null", "True": "true", "False": "false"}.get(shown, shown)

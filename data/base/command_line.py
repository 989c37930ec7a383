"""Parse key=value command lines and print their help, for the commands of data and eval, and for train.export.

A dataclass describes the keys of a command: their names, types, defaults and help lines. A value is taken literally, so
braces need no quotes; one pair of quotes around a text is dropped. Imports nothing heavy, such as torch.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import Field, field, fields, replace
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ValidationError

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.limits import check_limits
from dyad.data.base.plugins import PLUGINS, PLUGINS_HELP

HELP = ("--help", "-h", "help")
OPTION = re.compile(r"-|[A-Za-z_]\w*(\.\w+)*=")  # how an argument begins that is no path and no URL
AT_COMMAS = re.compile(r"""(?:\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")  # commas outside braces and quotes
EXPECTED = {  # message of OmegaConf about a value → what the value must be
    r"Value '(.*)' of type .* could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type .* could not be converted to Float": "a number",
    r"Value '(.*)' is not a valid bool": "one of true, false",
    r"Invalid value '(.*)', expected one of \[(.*)\]": r"one of \2",
}

T = TypeVar("T")


class RunOptions:
    """Base of a dataclass of options that replace those of a run; `overridden` applies them.

    nulls: the names of the options that were typed as null, set by `parse_options`. Any other option that is None was
    not typed.
    """

    nulls = frozenset[str]()


def command_options(
    schema: type[T], command: str, purpose: str, examples: Mapping[str, str], notes: Callable[[], str] = str
) -> T:
    """Return the options on the command line of this process as an object of the dataclass `schema`.

    With -h or --help, print the help of the command and exit with 0 instead. schema: its fields are the command's keys.
    command: the command's name, for messages. purpose, examples: as in `help_text`. notes: returns the text that the
    help has after the keys. Raises ConfigError as `parse_options` does.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(purpose, examples, schema, notes()))
        sys.exit(0)
    return parse_options(schema, sys.argv[1:], command)


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into plain ones, such as paths and URLs, and options (key=value or -…).

    Both lists keep the order of the arguments.
    """
    found: tuple[list[str], list[str]] = ([], [])
    for argument in arguments:
        found[OPTION.match(argument) is not None].append(argument)
    return found


def parse_options(schema: type[T], arguments: Iterable[str], command: str) -> T:
    """Fill the dataclass `schema` from key=value arguments and return it. OmegaConf converts values to the field types.

    command: the command's name, for messages. The argument plugins=[…] is ignored. Raises ConfigError for an argument
    that is not key=value, for an unknown or repeated key, for a needed key that is missing, and for a value that has
    the wrong type, breaks a limit of its field or contains "${"; and as the constructor of `schema` does.
    """
    types_of, options = get_type_hints(schema), OmegaConf.structured(schema)
    given: set[str] = set()
    for argument in arguments:
        if argument.startswith(f"{PLUGINS}="):  # dyad/process.py has imported the plugins
            continue
        key, separator, text = argument.lstrip("-").partition("=")
        if argument.startswith("-") or not separator:
            near = nearest(key.replace("-", "_"), (*types_of, PLUGINS))
            raise ConfigError(f"'{argument}': options are written key=value here.{near} See: {command} --help")
        key = _option_of(key, schema)
        if key not in types_of:
            raise ConfigError(f"unknown key '{key}'.{nearest(key, types_of)} Keys: {', '.join(types_of)}")
        if key in given:
            raise ConfigError(f"{key} is given twice. If the shell expanded braces, quote: '{key}=d/{{0..9}}.tar'")
        if "${" in text:  # OmegaConf would resolve it, also to variables of the environment
            raise ConfigError(f"{key}={text}: nothing is read inside ${{…}} here. Write the value itself.")
        given.add(key)
        try:
            options[key] = _value(text, types_of[key])
        except ValidationError as error:
            meaning = cast(Any, schema).__dataclass_fields__[key].metadata["help"]
            raise ConfigError(f"{key}={_mismatch(str(error))} Meaning of {key}: {meaning}") from None
    if missing := OmegaConf.missing_keys(options):
        raise ConfigError(f"{min(missing)}= is missing. See: {command} --help")
    found = cast(T, OmegaConf.to_object(options))
    check_limits(found)
    if isinstance(found, RunOptions):
        found.nulls = frozenset(name for name in given if options[name] is None)
    return found


def _option_of(key: str, schema: Any) -> str:
    """Return the name of the option that the typed `key` means: columns for data.columns, else `key` itself.

    The dotted key of a training configuration means the option of `schema` that `config_option` or `run_option` made
    from it. Messages about data name the keys of training, so users type them for the other commands too.
    """
    *section, name = key.split(".")
    own = {option.name: option.metadata.get("section") for option in fields(schema)}
    return name if section and own.get(name) == section[-1] else key


def _value(text: str, kind: Any) -> Any:
    """Convert the text of a command-line value to a form that OmegaConf accepts for a field of the type `kind`: None, a
    list, an int, or else the text, without a pair of quotes around it if `kind` is str. Raises ValidationError for a
    bool other than true and false."""
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


def _mismatch(message: str) -> str:
    """Convert OmegaConf's message about a wrong value to the part of our own message after "KEY=".

    This part has the value, and what it must be. For a message of an unknown form, return its first line.
    """
    for pattern, expected in EXPECTED.items():
        if found := re.match(pattern, message):
            choices = found[2].split(", ") if found.re.groups > 1 else ()
            return f"{found[1]} is not {found.expand(expected)}.{nearest(found[1], choices)}"
    return message.splitlines()[0]


def overridden(config: T, command: RunOptions) -> T:
    """Return a copy of the dataclass `config` with the options of a command in place of its own values.

    A field of `config` gets the value of the option of the same name. It keeps its own value if there is no such option
    or if the option is None; but an option that was typed as null sets a field whose default is None to None.
    """
    defaults = {option.name: option.default for option in fields(cast(Any, config))}
    unset = {name: None for name in command.nulls if defaults.get(name, MISSING) is None}
    given = {name: value for name, value in vars(command).items() if name in defaults and value is not None}
    return replace(cast(Any, config), **unset, **given)


def config_option(config: type, name: str) -> Any:
    """Return a dataclass field for an option of a command, with default and help line of a configuration key.

    config: a section of the configuration (a dataclass, such as DataConfig). name: the key in this section. On the
    command line, the option may also be written as the key of the configuration, such as data.columns.
    """
    option = copy(cast(Any, config).__dataclass_fields__[name])
    option.metadata = {**option.metadata, "section": config.__name__.removesuffix("Config").lower()}
    return option


def run_option(config: type, name: str) -> Any:
    """Return a dataclass field for an option of a command that reads a run folder, None by default.

    None keeps the value of the run's own configuration (`overridden`). The help line is that of the key `name` of
    `config`, a section of the configuration (a dataclass).
    """
    return field(default=None, metadata={**config_option(config, name).metadata, "default": "(the run's)"})


# Help ---------------------------------------------------------------------------------------------------------------


def help_text(purpose: str, examples: Mapping[str, str], schema: type, notes: str = "") -> str:
    """Return the help text of a command: its purpose, example command lines, its keys and the exit codes.

    examples: what an example does -> its command line. schema: the dataclass of the keys. notes: text after the keys.
    """
    commands = [f"  {command}\n      {what}" for what, command in examples.items()]
    codes = "Exit codes: 0 ok, 2 configuration, 3 damaged data or checkpoint, 4 hardware"
    closing = [notes, codes] if notes else [codes]
    return "\n".join([purpose, "", "Commands to copy:", *commands, "", "Keys:", *key_table(schema), "", *closing])


def key_table(schema: Any) -> list[str]:
    """Return the help lines of the keys of a command: one for each field of the dataclass `schema`, one for `plugins`.

    A line has key, default, meaning and, if the default is an Enum, the choices. Each field must have its meaning in
    metadata["help"], as `described` gives it.
    """
    width = max(len(PLUGINS), *(len(option.name) for option in fields(schema)))
    lines = []
    for option in fields(schema):
        kind = type(option.default)
        choices = f" ({'|'.join(kind.__members__)})" if issubclass(kind, Enum) else ""
        lines.append(f"  {option.name:<{width}}  {_default(option):26} {option.metadata['help']}{choices}")
    return [*lines, f"  {PLUGINS:<{width}}  {'[]':26} {PLUGINS_HELP}"]


def _default(option: Field[Any]) -> str:
    """Convert the default of a dataclass field to its text in the help: "(needed)" for MISSING, "[a,b]" for a list."""
    default = option.default
    if shown := option.metadata.get("default"):
        return shown
    if callable(option.default_factory):
        return f"[{','.join(map(str, option.default_factory()))}]"
    if default == MISSING:
        return "(needed)"
    if default is None or isinstance(default, bool):
        return json.dumps(default)
    return f"{default:g}" if isinstance(default, float) else str(default)

"""From the command line to a TrainConfig, or to one clear error. Torch-free: every mistake is answered in a second.

Hydra composes; this file only checks the words before Hydra sees them, since its own messages send people to `+key`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, nearest
from data.secrets import without_credentials
from train.command.synonyms import ADVICE, SYNONYMS
from train.config import TrainConfig
from train.losses.config import CONFIGS as OBJECTIVES
from train.towers.sentence_folder import fill, schema

OWN = {"model": "model.name", "data": "data.train", "tracking": "tracking.wandb", "optim": "optim.schedule"}
SHORT = {"resume": "resume.mode"}  # what is typed → the key it stands for
CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
HYDRA_FLAGS = """--help -h --hydra-help --cfg -c --resolve --package -p --run -r --multirun -m --info -i
--shell-completion""".split()
SWEEP_KEYS = ("hydra.sweep.", "hydra.sweeper.", "hydra.launcher.")  # others name code to run


def register() -> None:
    """Put the schema and the objectives where Hydra looks for them."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema(TrainConfig))
    for name, config in OBJECTIVES.items():
        store.store(group="objective", name=name, node=schema(config, "objective."))


def groups() -> dict[str, list[str]]:
    """The configuration groups and the choices of each."""
    found = {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(CONFIG_DIR.iterdir()) if d.is_dir()}
    found["objective"] = sorted([*OBJECTIVES, *found["objective"]])
    return {name: found[name] for name in sorted(found) if name != "local"}


def keys(config: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every key of the schema; under `objective.`, those of every objective."""
    for f in fields(config or TrainConfig):
        if f.name == "objective" and not prefix:
            for entry in OBJECTIVES.values():
                yield from keys(entry, "objective.")
        elif is_dataclass(f.default_factory):
            yield from keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            default = f.default if f.default_factory is NO_DEFAULT else f.default_factory()
            yield f"{prefix}{f.name}", default, f.metadata.get("help", "")


def in_full(arguments: Iterable[str]) -> list[str]:
    """Arguments with short names of keys written out."""
    split = (argument.partition("=") for argument in arguments)
    return [f"{SHORT.get(key, key)}{equals}{value}" for key, equals, value in split]


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """The typed configuration of these overrides.

    Raises ConfigError for an unknown key, group choice or value, with the nearest valid name.
    """
    overrides = in_full(overrides)
    check_words(overrides)
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return typed(compose("train", list(overrides)), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_cause(error, overrides)) from error


def typed(config: Any, overrides: Sequence[str] = ()) -> TrainConfig:
    """The dataclasses of a composed configuration; raises ConfigError when a value does not fit its type.

    Keys that nobody chose get what the text tower's folder says of them, or their defaults.

    overrides: where a message finds a value as it was typed.
    """
    try:
        _refuse_resolvers(config)
        fill(config)
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_cause(error, overrides)) from error
    assert isinstance(result, TrainConfig)
    return result


def _refuse_resolvers(config: Any) -> None:
    """${another.key} is read; ${oc.env:NAME} and the like are not: they would write what they find to files."""
    for key, value in _texts(OmegaConf.to_container(config)):
        if "${" in re.sub(r"\$\{[\w.]+\}", "", value):
            raise ConfigError(f"{key}={value}: only keys are read inside ${{…}}. Write the value itself")


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in a plain tree."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, Mapping | list):
        branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, branch in branches:
            yield from _texts(branch, f"{key}.{name}".lstrip("."))


def check_words(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an argument that Hydra would misread or answer badly."""
    words = [a for a in arguments if not _is_hydra_flag(a, arguments)]
    known = {key for key, _, _ in keys()}
    seen: dict[str, str] = {}
    for word in words:
        if word.startswith("-"):
            raise ConfigError(_not_a_flag(word, arguments, known))
        if "=" not in word and not word.startswith("~"):
            hint = f" Write {word}=VALUE, without spaces" if word in known else nearest(word, known)
            raise ConfigError(f"'{word}' is not key=value.{hint} See: python -m train --help")
        key, _, value = word.partition("=")
        if key in seen and value != seen[key]:
            expanded = f"\nIf the shell expanded braces, quote them:  '{key}=\"dir/{{00..99}}.tar\"'"
            hint = expanded if "/" in value or ".tar" in value else " Say it once"
            raise ConfigError(f"{key} is given twice: {seen[key]} and {value}.{hint}")
        seen[key] = value
        if {"-m", "--multirun"} & set(arguments) and without_credentials(word) != word:
            raise ConfigError(f"{key}: a sweep leaves its command line in a file; without -m the credentials stay out")
        _check_override(word, key.lstrip("+~"), value, known)


def _check_override(word: str, key: str, value: str, known: Iterable[str]) -> None:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException as error:
        fixed = f"{word.partition('=')[0]}=" + '"' + value.strip("'\"") + '"'
        raise ConfigError(f"{key}: cannot read {value!r} unquoted. Write:  {shlex.quote(fixed)}") from error
    choices = groups()
    if key.split(".")[0].split("/")[0] == "hydra":
        if not key.startswith(SWEEP_KEYS) or "_target_" in word:
            raise ConfigError(f"'{word}': of Hydra's keys only {'… '.join(SWEEP_KEYS)}… can be set, and no _target_")
        return
    if key in choices:
        if value not in [*choices[key], "null"] and "," not in value:
            own = f". A name or file of your own: {OWN[key]}={value}" if key in OWN else ""
            hint = nearest(value, choices[key])
            raise ConfigError(f"{key}={value}: no such choice.{hint} Choices: {', '.join(choices[key])}{own}")
    elif key not in known and not any(k.startswith(key + ".") for k in known):
        nearest_key = _nearest_key(key, [*choices, *known])
        raise ConfigError(f"unknown key '{key}'.{nearest_key} All keys: python -m train --cfg job")
    elif word.startswith("+"):
        raise ConfigError(f"'{word}': write it without '+'; every key already exists")


def _nearest_key(word: str, known: Iterable[str]) -> str:
    """What the word is here: a key that ends so (people forget the section more often than the name), a name that
    other trainers have for a key, or what is spelled nearly so."""
    own = word.rpartition(".")[2].lower().replace("-", "_")
    if own in ADVICE:
        return f" {ADVICE[own]}"
    leaves = {k.rpartition(".")[2]: k for k in sorted(known, reverse=True)}
    leaf = word.rpartition(".")[2]
    if leaf in leaves:
        return f" Did you mean '{leaves[leaf]}'?"
    if own in SYNONYMS:
        return f" Did you mean '{SYNONYMS[own]}'?"
    return nearest(word, known) or (nearest(leaf, leaves) and f" Did you mean '{leaves[_closest(leaf, leaves)]}'?")


def _closest(word: str, choices: Iterable[str]) -> str:
    match = re.search(r"'(.*)'", nearest(word, choices))
    assert match
    return match[1]


def _is_hydra_flag(word: str, arguments: Sequence[str]) -> bool:
    """A flag of Hydra's, or the value that belongs to one (--cfg job)."""
    position = list(arguments).index(word)
    takes_value = {"--cfg", "-c", "--package", "-p", "--info", "-i"}
    return word.split("=")[0] in HYDRA_FLAGS or (position > 0 and arguments[position - 1] in takes_value)


def _not_a_flag(word: str, arguments: Sequence[str], known: Iterable[str]) -> str:
    name, _, value = word.lstrip("-").partition("=")
    following = list(arguments)[list(arguments).index(word) + 1 :]
    value = value or next((a for a in following[:1] if not a.startswith("-") and "=" not in a), "VALUE")
    hint = _nearest_key(name.replace("-", "_"), known)
    if suggestion := re.search(r"Did you mean '(.*)'", hint):
        typed_out = suggestion[1] if "=" in suggestion[1] else f"{suggestion[1]}={value}"
        hint = f" Did you mean '{typed_out}'?"
    return f"'{word}': options are written key=value here, without dashes.{hint} See: python -m train --help"


# How OmegaConf says that a value does not fit → what it must be
MUST_BE = {
    r"Value '(.*)' of type .* could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type .* could not be converted to Float": "a number",
    r"Value '(.*)' is not a valid bool": "true or false",
    r"Invalid value assigned: \w+ is not a ListConfig": "a list, written like [1,2] or [a,b]",
}


def _first_cause(error: BaseException, overrides: Sequence[str]) -> str:
    """Hydra wraps the reason; OmegaConf's message, else the innermost, says it: here on one line, in our words."""
    while error.__cause__ is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    typed_out = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in overrides}
    for pattern, wanted in MUST_BE.items():
        if key and (found := re.match(pattern, lines[0])):
            return f"{key}={typed_out.get(key, found[found.re.groups])}: must be {wanted}"
    if key and (found := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", lines[0])):
        value = typed_out.get(key, found[1])
        return f"{key}={value}: must be one of {found[2]}.{nearest(value, found[2].split(', '))}"
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]

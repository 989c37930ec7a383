"""From the command line to a TrainConfig, or to one clear error. Torch-free: every mistake is answered in a second.

This file reads the command line and checks each word; Hydra only composes what is left. Its own command line is never
used: it has flags that run code, and its messages send people to `+key`.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, nearest
from train.command.synonyms import ADVICE, SYNONYMS
from train.config import TrainConfig
from train.losses import OBJECTIVES
from train.runs.folder import all_keys
from train.towers.sentence_folder import fill_defaults, open_schema

OWN = {"model": "model.name", "data": "data.train", "tracking": "tracking.wandb", "optim": "optim.schedule"}
SHORT = {"resume": "resume.mode"}  # what is typed → the key it stands for
BREAKS = ("data.question.prefix", "data.passage.prefix")  # no shell passes a line break on easily
ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}  # as they are typed for BREAKS
UNQUOTED = re.compile(r"[\w./:@+-]+|\[[\w.,+-]*\]")  # what Hydra reads as it stands
CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"


def register() -> None:
    """Put the schema and the objectives where Hydra looks for them."""
    store = ConfigStore.instance()
    store.store(name="open_schema", node=open_schema(TrainConfig))
    for name, row in OBJECTIVES.items():
        store.store(group="objective", name=name, node=open_schema(row.options, "objective."))


def groups() -> dict[str, list[str]]:
    """The configuration groups and the choices of each."""
    found = {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(CONFIG_DIR.iterdir()) if d.is_dir()}
    found["objective"] = sorted([*OBJECTIVES, *found["objective"]])
    return {name: found[name] for name in sorted(found) if name != "local"}


def keys(config: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every key of the schema; under `objective.`, those of every objective."""
    for f in fields(config or TrainConfig):
        if f.name == "objective" and not prefix:
            for row in OBJECTIVES.values():
                yield from keys(row.options, "objective.")
        elif is_dataclass(f.default_factory):
            yield from keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            default = f.default if f.default_factory is NO_DEFAULT else f.default_factory()
            yield f"{prefix}{f.name}", default, f.metadata.get("help", "")


@dataclass(frozen=True)
class Line:
    """A command line: its key=value words; sweep (-m): one run for each combination; show (--cfg job): no run."""

    words: list[str]
    sweep: bool
    show: bool

    def runs(self) -> list[list[str]]:
        """The words of each run. Raises ConfigError for a word that cannot be swept."""
        if not self.sweep:
            return [self.words]
        return [list(words) for words in itertools.product(*map(_swept, self.words))]


def read_line(arguments: Sequence[str]) -> Line:
    """Flags may stand anywhere. A flag that is none of ours stays among the words, which check_words refuses."""
    words: list[str] = []
    sweep = show = False
    rest = iter(arguments)
    for word in rest:
        flag, _, value = word.partition("=")
        if word in ("-m", "--multirun"):
            sweep = True
        elif flag in ("-c", "--cfg"):
            value = value or next(rest, "")
            if value != "job":
                raise ConfigError(
                    f"'{flag} {value}': there is --cfg job, which prints the configuration and trains nothing"
                )
            show = True
        elif word != "--resolve":  # of --cfg job; it always does
            words.append(word)
    return Line(in_full(words), sweep, show)


def _swept(word: str) -> list[str]:
    """key=a,b,c as key=a, key=b, key=c."""
    if word.startswith("-") or "=" not in word:
        return [word]
    override = _parsed(word)
    if not override.is_sweep_override():
        return [word]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, AssertionError) as error:
        raise ConfigError(f"'{word}': a sweep is written key=a,b,c or key=range(1,4)") from error


def in_full(arguments: Iterable[str]) -> list[str]:
    """Arguments with short names of keys written out."""
    split = (argument.partition("=") for argument in arguments)
    return [f"{SHORT.get(key, key)}{equals}{value}" for key, equals, value in split]


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """The typed configuration of these overrides.

    Raises ConfigError for an unknown key, group choice or value, with the nearest valid name.
    """
    return typed(_composed(overrides), overrides)


def words_for(config: TrainConfig) -> list[str]:
    """The shortest key=value words that compose to this configuration: its recipe, and what differs from that."""
    recipe = config.experiment if config.experiment in groups()["experiment"] else None
    words = [f"experiment={recipe}" if recipe else f"task={config.task.value}"]
    if compose_config(words).objective.name != config.objective.name:
        words.append(f"objective={config.objective.name}")
    there = {**all_keys(compose_config(words)), "experiment": config.experiment}
    changed = {key: value for key, value in all_keys(config).items() if there.get(key) != value}
    changed |= {key: _escaped(changed[key]) for key in BREAKS if key in changed}
    return [*words, *(f"{key}={written(value)}" for key, value in changed.items())]


def written(value: Any) -> str:
    """A value as Hydra's grammar takes it for what it is."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    if UNQUOTED.fullmatch(text):
        return text
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), text)
    return f'"{escaped}"'  # a backslash means itself, except before a quote


def _escaped(text: str) -> str:
    """What _unescaped makes `text` of. A backslash before other letters means itself."""
    doubled = re.sub(r"\\(?=[\\nt\n\t])", r"\\\\", text)
    return doubled.replace("\n", r"\n").replace("\t", r"\t")


def _unescaped(word: str) -> str:
    """The word for Hydra, where what was typed for a key of BREAKS has ESCAPES."""
    key, _, value = word.partition("=")
    if key not in BREAKS:
        return word
    quoted = value.startswith(("'", '"'))  # else Hydra takes two backslashes for one
    typed_out = _parsed(word if quoted else word.replace("\\\\", "\\" * 4)).value()
    if not isinstance(typed_out, str):
        return word
    text = re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], typed_out)
    return word if text == typed_out else f"{key}={written(text)}"


def preview(overrides: Sequence[str]) -> str:
    """What `--cfg job` prints: the configuration as YAML. Raises as compose_config; a needed value may be missing."""
    config = _composed(overrides)
    _refuse_resolvers(config)
    with _explained(overrides):
        fill_defaults(config)
        if not OmegaConf.missing_keys(config):
            typed(config, overrides)
        return OmegaConf.to_yaml(config, resolve=True)


def _composed(overrides: Sequence[str]) -> DictConfig:
    overrides = in_full(overrides)
    check_words(overrides)
    register()
    GlobalHydra.instance().clear()
    with _explained(overrides), initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("train", [_unescaped(word) for word in overrides])


def typed(config: Any, overrides: Sequence[str] = ()) -> TrainConfig:
    """The dataclasses of a composed configuration; raises ConfigError when a value does not fit its type.

    Keys that nobody chose get what the text tower's folder says of them, or their defaults.

    overrides: where a message finds a value as it was typed.
    """
    _refuse_resolvers(config)
    with _explained(overrides):
        fill_defaults(config)
        result = OmegaConf.to_object(config)
    assert isinstance(result, TrainConfig)
    return result


@contextmanager
def _explained(overrides: Sequence[str]) -> Iterator[None]:
    """What Hydra and OmegaConf raise leaves as a ConfigError in our words."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_cause(error, in_full(overrides))) from error


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
    """Raise ConfigError for an argument that is no key=value of a known key, or that Hydra would misread."""
    known = {key for key, _, _ in keys()}
    seen: dict[str, str] = {}
    for word in arguments:
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
        _check_override(word, key.lstrip("+~"), value, known)


def _check_override(word: str, key: str, value: str, known: Iterable[str]) -> None:
    choices = groups()
    if re.split(r"[./]", key)[0] == "hydra":
        raise ConfigError(f"'{word}': Hydra's own keys cannot be set. See: python -m train --help")
    if _parsed(word).is_sweep_override():
        raise ConfigError(
            f"{key}={value}: several values are several runs, with -m before them. A list is written [a,b]"
        )
    if key in choices:
        if value not in [*choices[key], "null"]:
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


def _parsed(word: str) -> Override:
    """Raises ConfigError for what Hydra's grammar cannot read, with quotes that help."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        fixed = f"{key}=" + '"' + value.strip("'\"") + '"'
        known = key.lstrip("+~")
        raise ConfigError(f"{known}: cannot read {value!r} unquoted. Write:  {shlex.quote(fixed)}") from error


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

"""Turn the command line into a TrainConfig, or raise one clear error. Imports no torch: an error shows in a second.

This module checks each argument of the command line (called a word, mostly key=value); Hydra only composes the
configuration. Hydra's own command line is not used: it has flags that run code, and its messages recommend `+key`.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.limits import MOST, check_limits
from dyad.data.base.plugins import imported_plugins
from dyad.train.arguments import as_argument
from dyad.train.cli.command_line import expand_short_keys, parse_argument
from dyad.train.cli.presets import (
    CONFIG_DIR,
    OWN,
    SUFFIXES,
    groups,
    recipe_of,
    refuse_resolvers,
    store_recipe,
    typed_keys,
)
from dyad.train.cli.start_defaults import take_start_defaults
from dyad.train.cli.synonyms import ADVICE, SYNONYMS
from dyad.train.config import TrainConfig
from dyad.train.config_rules import check_values
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import as_tree, flat
from dyad.train.run_folder.older_runs import RENAMED
from dyad.train.towers.libraries.sentence_transformers import fill_defaults, open_schema

# Group → what to write for a name or file which is none of the group's choices
KEY_OF_GROUP = {"model": "model.name={}", "data": "data.train={}", "experiment": "experiment=PATH.yaml"}
KEY_OF_GROUP |= {"objective": "plugins=[MODULE]", "optim": "optim.name={}"}
OPEN_SECTIONS = ("optim.options.", "data.augment_y.", "also.")  # mappings with any keys
# Keys, also of a source of data.train, whose values may have line breaks and tabs
WITH_ESCAPES = ("data.question.prefix", "data.passage.prefix", "question_prefix", "passage_prefix")
ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}  # how these characters are typed: few shells pass a line break on


@cache
def register_schemas(objectives: tuple[str, ...]) -> None:
    """Store the schemas of TrainConfig and of the options of `objectives`, names of OBJECTIVES, in Hydra's ConfigStore.

    Also makes Hydra share this store in place of copying it. A second call with the same names does nothing.
    """
    store = ConfigStore.instance()
    # Hydra copies its sources for each configuration, and with them all schemas: an eighth of the time
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
    store.store(name="schema", node=open_schema(TrainConfig))
    for name in objectives:
        store.store(group="objective", name=name, node=open_schema(OBJECTIVES[name], "objective."))


def keys(config: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, default, help text) of every field of the dataclass `config`, TrainConfig if None.

    config: a class. Nested dataclasses are included, and in TrainConfig the options of every objective, so a key that
    several objectives have comes several times. prefix: put before every key, e.g. "objective.".
    """
    for f in fields(config or TrainConfig):
        if f.name == "objective" and not prefix:
            for options in OBJECTIVES.values():
                yield from keys(options, "objective.")
        elif is_dataclass(f.default_factory):
            yield from keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            default = f.default if f.default_factory is NO_DEFAULT else f.default_factory()
            yield f"{prefix}{f.name}", default, f.metadata.get("help", "")


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """Compose the configuration from its defaults and `overrides`, the key=value arguments of the command line.

    Import plugins before. May download files of a published text model (`take_start_defaults`). Raises ConfigError for
    an unknown key or group choice, and for a value of the wrong type or outside its limits; the message suggests the
    nearest valid name. Combinations of values are checked only as far as the constructors of sections do so, such as
    DataConfig; `validate` (config_rules.py) checks the others.
    """
    return to_train_config(_composed(overrides), overrides)


def words_for(config: TrainConfig) -> list[str]:
    """Return a short list of key=value arguments that compose to `config`, its credentials included: redact to print.

    First comes experiment=NAME, or task=NAME if `config` has no experiment that is a preset or a file. Then
    objective=NAME, if the first argument alone would choose another objective. Then key=value for each key that these
    arguments do not set to its value in `config`, and for each key that such a key=value changes in turn: a
    model.name, for example, sets defaults of other keys.
    """
    named = config.experiment or ""
    is_there = named in groups()["experiment"] or (named.endswith(SUFFIXES) and Path(named).expanduser().is_file())
    recipe = as_argument(named) if is_there else None
    words = [f"experiment={recipe}" if recipe else f"task={config.task.value}"]
    composed = compose_config(words)
    if composed.objective.name != config.objective.name:
        words.append(f"objective={config.objective.name}")
        composed = compose_config(words)
    words += _changed_words(config, composed)
    words += _changed_words(config, compose_config(words))
    return list(dict.fromkeys(words))


def _changed_words(config: TrainConfig, composed: TrainConfig) -> list[str]:
    """Return key=value, with the value in `config`, for each key but experiment whose value differs in `composed`."""
    there = {**flat(as_tree(composed)), "experiment": config.experiment}
    changed = {key: value for key, value in flat(as_tree(config)).items() if there.get(key) != value}
    return [f"{key}={as_argument(_change_prefixes(key, value, _escaped))}" for key, value in changed.items()]


def _change_prefixes(key: str, value: Any, change: Callable[[str], str]) -> Any:
    """Return `value`, the value of the dotted `key`, with `change` applied to each text whose key is in WITH_ESCAPES.

    Texts inside lists and mappings are changed too: the key of a text in a list is that of the list, the key of a text
    in a mapping is its name in the mapping.
    """
    if isinstance(value, Mapping):
        return {name: _change_prefixes(name, item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_change_prefixes(key, item, change) for item in value]
    return change(value) if key in WITH_ESCAPES and isinstance(value, str) else value


def _escaped(text: str) -> str:
    """Return `text` with line breaks and tabs written as \\n and \\t, the inverse of _unescaped.

    A backslash is doubled only where it would else be read as part of such an escape.
    """
    return re.sub(r"\\(?=[\\nt\n\t])", r"\\\\", text).replace("\n", r"\n").replace("\t", r"\t")


def _unescaped(word: str) -> str:
    """Return a key=value argument with typed escapes replaced by their characters, e.g. \\n by a line break.

    The table ESCAPES lists the escapes; only values of the keys in WITH_ESCAPES are changed.
    """
    key, _, value = word.partition("=")
    if key not in (*WITH_ESCAPES, "data.train"):
        return word
    quoted = value.startswith(("'", '"', "[", "{"))  # else Hydra takes two backslashes for one
    typed_out = parse_argument(word if quoted else word.replace("\\\\", "\\" * 4)).value()
    text = _change_prefixes(key, typed_out, lambda text: re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], text))
    return word if text == typed_out else f"{key}={as_argument(text)}"


def preview(overrides: Sequence[str]) -> str:
    """Return the configuration as YAML, which `--cfg job` prints. data.train, steps and epochs may be missing.

    overrides: key=value arguments. May download files of a published text model, as `compose_config`. Raises
    ConfigError for an unknown key, group choice or value, and for values that a run would refuse (`check_values`); the
    latter not if a key is ???, OmegaConf's mark of a missing value.
    """
    config = _composed(overrides)
    refuse_resolvers(OmegaConf.to_container(config))
    with _explain_errors(overrides):
        fill_defaults(config)
        if not OmegaConf.missing_keys(config):
            check_values(to_train_config(config, overrides))
        return OmegaConf.to_yaml(config, resolve=True)


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Check the key=value arguments and let Hydra compose the configuration; ${…} in its values is not yet resolved.

    Start defaults (`take_start_defaults`) are taken already; keys of SentenceTransformer folders may have no value yet.
    Clears Hydra's global state. Raises ConfigError for an argument that is refused, for plugins that a file names, and
    for any error of Hydra.
    """
    overrides = expand_short_keys(overrides)
    recipe = recipe_of(overrides)
    _check_words(overrides, groups(recipe))
    register_schemas(tuple(OBJECTIVES))
    if recipe is not None:
        store_recipe(recipe, overrides)
    GlobalHydra.instance().clear()
    is_open = [word.replace("=", ".", 1).startswith(OPEN_SECTIONS) for word in overrides]  # also SECTION={KEY:VALUE}
    words = [_unescaped(f"++{word}" if own else word) for word, own in zip(overrides, is_open, strict=True)]
    words = [f"experiment={OWN}" if recipe and word.startswith("experiment=") else word for word in words]
    with _explain_errors(overrides), initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose("train", words)
    _keep_texts(config, overrides)
    if config.plugins and not any(word.startswith("plugins=") for word in overrides):
        raise ConfigError(f"plugins={config.plugins}: a file names no code. Type it, if you trust these modules")
    with _explain_errors(overrides):
        take_start_defaults(config, typed_keys(overrides, recipe))
    return config


def _keep_texts(config: DictConfig, words: Sequence[str]) -> None:
    """Set, in place, keys whose value is a text to what was typed, where Hydra has read a number: 1e3, 2024_01_01.

    words: the key=value arguments of the command line. Elements of lists stay the texts of these numbers.
    """
    for word in words:
        key, _, text = word.partition("=")
        number = parse_argument(word).value() if text else None
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and isinstance(OmegaConf.select(config, key.lstrip("+")), str):
            OmegaConf.update(config, key.lstrip("+"), text.strip())


def to_train_config(config: Any, overrides: Sequence[str] = ()) -> TrainConfig:
    """Convert a composed OmegaConf configuration to a TrainConfig.

    First sets, in place, the keys that have no value yet (`fill_defaults`): to the value of the text tower's
    SentenceTransformer folder, or to their default. overrides: the arguments of the command line, so that a message
    shows a value as it was typed. Raises ConfigError for a value that is missing, has the wrong type, is outside its
    limits or contains a resolver.
    """
    refuse_resolvers(OmegaConf.to_container(config))
    with _explain_errors(overrides):
        fill_defaults(config)
        _check_lists(config)
        result = OmegaConf.to_object(config)
    assert isinstance(result, TrainConfig)
    check_limits(result)
    return result


def _check_lists(config: DictConfig) -> None:
    """Raise ConfigError for a list or a mapping that ${…} sets to a value of another type, which OmegaConf accepts."""
    for key, default, _ in keys():
        if isinstance(default, list | dict):
            value = OmegaConf.select(config, key, default=default)
            if isinstance(value, str | int | float):  # also true and false
                wanted = "a list, written like [a,b]" if isinstance(default, list) else "a mapping, written like {a: 1}"
                raise ConfigError(f"{key}={value}: must be {wanted}")


@contextmanager
def _explain_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf inside the with block into ConfigErrors with clearer messages.

    overrides: the arguments of the command line, so that a message shows a value as it was typed.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, OverflowError) as error:
        cause = _first_cause(error, expand_short_keys(overrides))
        raise ConfigError(cause.replace(f"experiment/{OWN}", str(recipe_of(expand_short_keys(overrides))))) from error


def _check_words(words: Sequence[str], choices: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for an argument that is neither key=value nor ~key, sets a key to a second value or is a sweep.

    Also raises it for unknown keys and the other arguments that `_check_override` refuses. words: the arguments.
    choices: group → the names of its presets.
    """
    known = {key for key, _, _ in keys()}
    given: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("-"):
            raise ConfigError(_not_a_flag(word, following, known))
        if "=" not in word and not word.startswith("~"):
            hint = f" Write {word}=VALUE, without spaces." if word in known else nearest(word, known)
            raise ConfigError(f"'{word}' is not key=value.{hint} See: python -m train --help")
        key, _, value = word.partition("=")
        if value != given.setdefault(key, value):
            expanded = f"\nIf the shell expanded braces, quote them:  '{key}=\"dir/{{00..99}}.tar\"'"
            hint = expanded if "/" in value or ".tar" in value else " Say it once"
            raise ConfigError(f"{key} is given twice: {given[key]} and {value}.{hint}")
        if parse_argument(word).is_sweep_override():
            several = f"{word}: several values are several runs, after -m. A list is written [a,b]. Write"
            raise ConfigError(f"{several}:  python -m train -m {shlex.join(words)}")
        _check_override(word, known, choices)


def _check_override(word: str, known: Iterable[str], choices: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for an unknown key or group choice, one of Hydra's keys, or a `+` before a key.

    A `+` may stand before a group, and before a key of OPEN_SECTIONS, where any key is known. word: the argument as
    typed. known: all keys of the configuration. choices: group → the names of its presets.
    """
    key, _, value = word.lstrip("+~").partition("=")
    if re.match(r"hydra([./]|$)", key):
        raise ConfigError(f"'{word}': Hydra's own keys cannot be set. See: python -m train --help")
    if key in choices and value not in choices[key] and not (key == "experiment" and recipe_of([word])):
        own = f". Of your own: {KEY_OF_GROUP[key].format(value)}" if key in KEY_OF_GROUP else ""
        if key == "objective" and (plugins := imported_plugins()):
            own = f". plugins=[{','.join(plugins)}] registered no objective of this name"
        hint = nearest(value, choices[key])
        raise ConfigError(f"{key}={value}: no such choice.{hint} Choices: {', '.join(choices[key])}{own}")
    if key.startswith(OPEN_SECTIONS):
        return
    if key not in choices and key not in known and not any(k.startswith(key + ".") for k in known):
        hint = _nearest_key(key, [*choices, *known])
        raise ConfigError(f"unknown key '{key}'.{hint} All keys: python -m train --cfg job")
    if key not in choices and word.startswith("+"):
        raise ConfigError(f"'{word}': write it without '+'; every key already exists")


def _nearest_key(word: str, known: Iterable[str]) -> str:
    """Return a hint for the unknown key `word`, to append to a message; "" if nothing helps.

    The hint is the first of these that exists: advice (ADVICE), the present name of an older key (RENAMED), a known key
    with the same last part, our key for a name that other trainers use (SYNONYMS), a known key with a similar spelling.
    People forget the section of a key more often than its name.
    """
    leaf = word.rpartition(".")[2]
    name = leaf.lower().replace("-", "_")
    if name in ADVICE:
        return f" {ADVICE[name]}"
    leaves = {k.rpartition(".")[2]: k for k in sorted(known, reverse=True)}
    if key := RENAMED.get(word) or leaves.get(leaf) or SYNONYMS.get(name):
        return f" Did you mean '{key}'?"
    return nearest(word, known) or re.sub("(?<=').+(?=')", lambda found: leaves[found[0]], nearest(leaf, leaves))


def _not_a_flag(word: str, following: str, known: Iterable[str]) -> str:
    """Return the error message for `word`, which begins with a dash, with a hint to the key that may be meant.

    following: the next word of the command, perhaps the value of the supposed flag. known: all keys.
    """
    name, _, value = word.lstrip("-").partition("=")
    if not value:
        value = "VALUE" if not following or following.startswith("-") or "=" in following else following
    hint = _nearest_key(name.replace("-", "_"), known)
    if suggestion := re.search(r"Did you mean '(.*)'", hint):
        setting = suggestion[1] if "=" in suggestion[1] else f"{suggestion[1]}={value}"
        hint = f" Did you mean '{setting}'?"
    return f"'{word}': options are written key=value here, without dashes.{hint} See: python -m train --help"


# OmegaConf's message for a value of the wrong type → the type in our words
MUST_BE = {
    r"Value '(.*)' of type .* is incompatible with type hint 'Union\[int, float\]'": "a number",
    r"Value '(.*)' of type .* could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type .* could not be converted to Float": "a number",
    r"int too large to convert to float": f"a number of at most {MOST:,}",
    r"Value '(.*)' is not a valid bool": "true or false",
    r"field '.*' is not Optional()": "a value, not null",
    r"Invalid value assigned: \w+ is not a ListConfig": "a list, written like [1,2] or [a,b]",
}


def _first_cause(error: BaseException, overrides: Sequence[str]) -> str:
    """Return the reason of an error of Hydra or OmegaConf as one line; common mistakes get a message of our own.

    Otherwise the line is OmegaConf's message, or the message of the innermost error that Hydra wraps. overrides: the
    key=value arguments of the command line.
    """
    while error.__cause__ is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    typed_out = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in overrides}
    where = ""
    if found := re.fullmatch(r"In ('.*'): .* raised while composing config:", lines[0]):  # of a file, not of a word
        where, typed_out, lines = f" in the preset {found[1]}", {}, lines[1:]
    for pattern, wanted in MUST_BE.items():
        if key and (found := re.match(pattern, lines[0])):
            return f"{key}={typed_out.get(key, found[found.re.groups])}{where}: must be {wanted}"
    if key and (found := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", lines[0])):
        value = typed_out.get(key, found[1])
        hint = nearest(value, found[2].split(", "))
        return f"{key}={value}{where}: must be one of {found[2]}{hint and f'.{hint}'}"
    if key and lines[0].startswith(f"Key '{key.rpartition('.')[2]}' not in"):
        known = {name for name, _, _ in keys()}
        having = [name for name, options in OBJECTIVES.items() if key in {k for k, _, _ in keys(options, "objective.")}]
        hint = f" It is of objective={', '.join(having)}" if having else _nearest_key(key, known)
        if where and key.startswith("objective."):
            hint += ". Options of one objective belong in a preset, objective/NAME.yaml beside the recipe"
        return f"unknown key '{key}'{where}.{hint}"
    if found := re.fullmatch(r"In .* Could not find '\w+/(.*)'", lines[0]):
        return f"{lines[0]}.{nearest(found[1], ' '.join(lines[1:]).split())} See: python -m train --help"
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]

"""Every key that a message advises is one of the command that prints the message."""

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import pytest
from helpers.messages import TABLE, table

from dyad.data.base.command_line import parse_options
from dyad.data.base.errors import ConfigError
from dyad.data.base.plugins import PLUGINS
from dyad.data.cli.main import VERBS
from dyad.eval.config import EvalCommand, MineCommand
from dyad.export.main import ExportCommand
from dyad.train.cli.compose import keys
from dyad.train.cli.presets import groups
from dyad.train.losses import OBJECTIVES

ADVICE = re.compile(
    r"\b(?:[Ss]et|[Gg]ive|[Aa]dd|[Tt]ake|[Ww]rite|[Cc]hoose|[Oo]r|[Tt]hen|them:|use) ([a-z_]+(?:\.[a-z_]+)*)="
)


def of_command(*schemas: type) -> Callable[[str], bool]:
    """Whether one of these commands takes a key, also as training writes it."""

    def takes(key: str) -> bool:
        def known(schema: Any) -> bool:
            try:
                parse_options(schema, [f"{key}=1"], "x")
            except ConfigError as error:
                return not str(error).startswith("unknown key")
            return True

        return key == PLUGINS or any(map(known, schemas))

    return takes


def of_training() -> Collection[str]:
    options = {f"objective.{option.name}" for options in OBJECTIVES.values() for option in fields(options)}
    return {*(key for key, _, _ in keys()), *options, *groups()}


TRAINING, EVAL, MINE = of_training().__contains__, of_command(EvalCommand), of_command(MineCommand)
DATA, EXPORT = of_command(*(verb.options for verb in VERBS)), of_command(ExportCommand)
# start of the name of a test → the commands that print its messages; each takes the keys, or one of those in a tuple
COMMANDS = {
    "data/cli/test_counts.py": [(TRAINING,)],
    "data/cli": [(DATA,)],
    "data/build": [(DATA,)],
    "data/tables": [(TRAINING, DATA), (EVAL, DATA)],
    "data/question_passage": [(TRAINING, DATA)],
    "eval/mine": [(MINE,)],
    "dyad/evaluation": [(EVAL,)],
    "eval/tasks": [(EVAL,)],
    "dyad/export": [(EXPORT, TRAINING)],
    "": [(TRAINING, EVAL, MINE, EXPORT)],
}
ADVISED = sorted({(place, key) for place, lines in table(TABLE).items() for key in ADVICE.findall(" ".join(lines))})


@pytest.mark.parametrize(("place", "key"), ADVISED, ids=lambda value: value)
def test_the_command_that_advises_a_key_takes_it(place: str, key: str) -> None:
    commands = next(commands for start, commands in COMMANDS.items() if place.startswith(start))
    assert all(any(takes(key) for takes in some) for some in commands), f"{key}= is no key of the command"

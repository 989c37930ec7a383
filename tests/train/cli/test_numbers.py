"""Absurd numbers: every numeric key of every command answers them in one line, before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest
from helpers.messages import raises

from dyad.data.base.command_line import parse_options
from dyad.data.base.errors import ConfigError
from dyad.data.base.limits import MOST, check_limits
from dyad.data.cli.options import CheckOptions, IndexOptions, PackOptions, SplitOptions
from dyad.data.shards.sources import parse_sources
from dyad.eval.config import EvalCommand, MineCommand, ReportCommand
from dyad.export.main import ExportCommand
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from dyad.train.losses import OBJECTIVES

SLIPS = (1e30, -1e30, 10**18, 2**63, float("nan"), float("inf"), float("-inf"), MOST + 1)
SMALL = (0, -1, 0.5, 1e-300)  # some keys may have them
COMMANDS = (
    CheckOptions,
    IndexOptions,
    PackOptions,
    SplitOptions,
    EvalCommand,
    MineCommand,
    ReportCommand,
    ExportCommand,
)
NEEDED = {"run": "x", "width": 8}


def numeric(section: type, prefix: str = "") -> Iterator[tuple[type, str, str]]:
    """The numeric keys of a dataclass and of those in it: (dataclass, prefix, name)."""
    kinds = get_type_hints(section)
    for f in fields(section):
        if is_dataclass(kinds[f.name]):
            yield from numeric(kinds[f.name], f"{prefix}{f.name}.")  # type: ignore[arg-type]
        elif {"int", "float"} & {*str(kinds[f.name]).replace("'", " ").replace("[", " ").replace("]", " ").split()}:
            yield section, prefix, f.name


KEYS = [*numeric(TrainConfig), (TrainConfig.__dataclass_fields__["data"].default_factory, "data.", "workers")]
KEYS += [key for options in OBJECTIVES.values() for key in numeric(options, "objective.")]


def refused(make: Any, *names: str) -> bool:
    try:
        make()
    except ConfigError as error:
        assert any(name in str(error) for name in names) and "\n" not in str(error) and len(str(error)) < 300, str(
            error
        )
        return True
    return False


@pytest.mark.parametrize("value", [*SLIPS, *SMALL])
def test_every_key_of_training(value: float) -> None:
    assert len(KEYS) > 150
    for section, prefix, name in KEYS:
        given = {f.name: NEEDED[f.name] for f in fields(section) if f.name in NEEDED} | {name: value}
        is_list = "list" in str(get_type_hints(section)[name])
        given[name] = [value] if is_list else value

        def make(section: Any = section, prefix: str = prefix, given: dict[str, Any] = given) -> None:
            check_limits(section(**given), prefix)

        others = ["temperature"] * (name == "init_scale")  # which is 1/τ
        assert refused(make, name, *others) or value in SMALL, f"{prefix}{name}={value}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_of_the_other_commands(command: type) -> None:
    needed = [f"{f.name}=x" for f in fields(command) if f.name == "run"]
    for _, _, name in numeric(command):
        for value in (*SLIPS, *SMALL, ""):
            make = lambda word=f"{name}={value}": parse_options(command, [*needed, word], "dyad x")  # noqa: E731
            assert refused(make, name) or value in (*SMALL, ""), f"{name}={value}"


@pytest.mark.parametrize("key", ["steps", "optim.lr"])
def test_whole_numbers_that_no_float_holds(key: str) -> None:
    with raises(ConfigError, f"{key}=", "1,000,000,000,000"):
        compose_config([f"{key}={10**309}"])


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e30"])
def test_weights_of_sources(weight: str) -> None:
    with raises(ConfigError, "data.train", weight):
        parse_sources(f"a.tar@{weight}", "data.train")
    with raises(ConfigError, "data.train", f"{float(weight):g}"):
        parse_sources([{"path": "a.tar", "weight": float(weight)}], "data.train")


@pytest.mark.parametrize("value", ["{}", "[1,{}]", "{{a:{}}}", "1,{}", "range(1,{})"])
def test_a_number_that_python_does_not_read_is_one_line(value: str) -> None:
    with raises(ConfigError, "optim.lr"):
        compose_config(["data.train=x", "steps=1", f"optim.lr={value.format('9' * 5000)}"])

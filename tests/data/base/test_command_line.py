"""Options of commands, written key=value: what is read and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from helpers.messages import raises

from dyad.data.base.command_line import key_table, parse_options, split_arguments
from dyad.data.base.errors import ConfigError
from dyad.data.config import described


@dataclass
class Options:
    count: int = described(3, "how many")
    names: list[str] = field(default_factory=list)
    out: str | None = None


def test_values_are_of_the_types_of_their_fields() -> None:
    words = ["count=7", "names=[a,b]", "out=d=e", "plugins=[x]"]
    assert parse_options(Options, words, "python -m x") == Options(7, ["a", "b"], "d=e")
    assert split_arguments(["d/a.tar", "count=7", "s3://b/c=d", "-h"]) == (["d/a.tar", "s3://b/c=d"], ["count=7", "-h"])


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--count=7", ("--count=7", "key=value", "python -m x")),
        ("--plugins=[nowhere]", ("--plugins=[nowhere]", "key=value", "python -m x")),
        ("count", ("count", "key=value", "python -m x")),
        ("conut=7", ("conut", "count")),
        ("count=many", ("count=many",)),
        ("out=${oc.env:HOME}", ("out=${oc.env:HOME}",)),
    ],
)
def test_what_is_no_option_is_refused(word: str, named: tuple[str, ...]) -> None:
    with raises(ConfigError, *named):
        parse_options(Options, [word], "python -m x")


def test_a_key_has_one_value() -> None:
    with raises(ConfigError, "count"):
        parse_options(Options, ["count=1", "count=2"], "python -m x")


def test_the_help_has_the_defaults_that_lists_have() -> None:
    @dataclass
    class Lists:
        none: list[str] = described([], "")
        two: list[str] = described(["a", "b"], "")

    assert [line.split()[:2] for line in key_table(Lists)] == [["none", "[]"], ["two", "[a,b]"], ["plugins", "[]"]]

"""Messages of errors: their words are matched in tests/messages.txt alone, and the table is one of tests that exist."""

import ast
from functools import cache
from pathlib import Path

import pytest
from helpers.messages import MET, TABLE, add, check, raises, table, template

TESTS = Path(__file__).parents[1]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def test_words_of_messages_stand_in_the_table_alone() -> None:
    calls = ((path, node) for path in TESTS.rglob("*.py") for node in nodes(path) if isinstance(node, ast.Call))
    found = [
        f"{path.relative_to(TESTS)}:{call.lineno}"
        for path, call in calls
        if ast.unparse(call.func).endswith("raises") and any(keyword.arg == "match" for keyword in call.keywords)
    ]
    assert found == [], "helpers.messages.raises names keys, values and files"


def test_the_table_is_of_functions_that_exist() -> None:
    for place in table(TABLE):
        path, _, function = place.partition("::")
        assert function in {n.name for n in nodes(TESTS / path) if isinstance(n, ast.FunctionDef)}, place


def test_a_message_has_its_words_and_all_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MET, raising=False)
    with raises(ValueError, "seed=5") as caught:
        raise ValueError("seed=5: must be 9 or more")
    assert caught.type is ValueError
    for message in ("seed=5: must be 9 or less", "seed=55: must be 9 or more", "must be 9 or more"):
        with pytest.raises(AssertionError):
            check(message, "seed=5")


def test_what_was_met_is_added_to_the_table(tmp_path: Path) -> None:
    line = template("a=/tmp/x: no 'b', line 2 of process 77:\n[Errno 9] 9.5 GB", "a=", "line 2")
    assert line == r"…: no 'b', … of process …:\n[Errno …] … GB"
    (tmp_path / "met").write_text(f"b.py::test\t{line}\na.py::test\ty\nb.py::test\t{line}\n")
    (tmp_path / "table").write_text("a.py::test\n    z\n")
    add(tmp_path / "met", tmp_path / "table")
    assert table(tmp_path / "table") == {"a.py::test": ["y", "z"], "b.py::test": [line]}

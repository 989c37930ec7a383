"""DPR's tables of questions and answers."""

from pathlib import Path

from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.data.question_passage.answer_tables import parse_answers, read_answers_table


def test_a_list_in_python_is_read_and_never_run() -> None:
    assert parse_answers(""" ['a, "b"', "it's", '\\\\d+'] """, "x") == ('a, "b"', "it's", "\\d+")
    for text in (
        "",
        "[]",
        "'a'",
        "['a', 1]",
        "['a'",
        "[__import__('os').getcwd()]",
        "[f'{1}']",
        "[" * 5000,
        "-" * 9999,
        "[" + "'a'," * 300_000 + "]",
    ):
        with raises(DataError, "line 3"):
            parse_answers(text, "file, line 3")


def test_a_line_with_a_bare_carriage_return_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "dev.csv").write_bytes(b"who?\t['a']\nwho\rwas\t['b']\nwho?\t['c']\n")
    with raises(DataError, path, "line 2"):
        list(read_answers_table(path))

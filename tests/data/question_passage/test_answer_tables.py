"""DPR's tables of questions and answers."""

from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.data.question_passage.answer_tables import parse_answers


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

"""Read DPR's tables of questions with answers and without passages: rows of question <tab> ['answer', …]."""

import ast
import csv
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dyad.data.base.errors import DataError
from dyad.data.question_passage.formats import format_of
from dyad.data.question_passage.passages import Question
from dyad.data.shards.scan_tar import MAX_BYTES
from dyad.data.shards.text_files import open_text
from dyad.data.tables.readers import open_table


def is_answers_table(source: Any, columns: Sequence[str]) -> bool:
    """Whether `source` is the path of a DPR table of questions and answers, rather than of questions with passages.

    True for a .csv or .tsv file whose first line cannot be read as the names of columns, or whose columns are of no
    format in formats.FORMATS; the rows are not read. False for anything else. columns: the setting data.columns, names
    of columns to use; if it is not empty, the result is False. Raises ConfigError for a file of triples of ids without
    a file of questions beside it.
    """
    path = Path(source if isinstance(source, str) else "").expanduser()
    if columns or path.suffix not in (".csv", ".tsv") or not path.is_file():
        return False
    try:
        return format_of(dict.fromkeys(open_table(str(path)).columns)) is None
    except DataError:
        return True


def read_answers_table(path: Path) -> Iterator[Question]:
    """Yield the questions of a DPR table, whose rows are: question <tab> Python list of answers.

    The id of a question is its row index, from 0; blank lines are skipped and not counted. A typographic apostrophe of
    a question becomes '. Raises DataError, with the line, for a row of another form; ConfigError for a missing file.
    """
    with open_text(str(path)) as file:
        table = csv.reader((line.decode("utf-8") for line in file), delimiter="\t")
        try:
            for number, fields in enumerate(filter(None, table)):  # blank lines have no field
                if len(fields) != 2 or not fields[0].strip():
                    raise DataError(f"{path}, line {table.line_num}: needs a question, a tab and a list of answers")
                answers = parse_answers(fields[1], f"{path}, line {table.line_num}")
                yield Question(str(number), fields[0].strip().replace("’", "'"), answers)
        except (csv.Error, UnicodeDecodeError) as error:
            line = table.line_num + isinstance(error, UnicodeDecodeError)  # raised before csv counts the line
            raise DataError(f"{path}, line {line}: cannot be read as UTF-8 text with tabs: {error}") from error


def parse_answers(text: str, where: str) -> tuple[str, ...]:
    """Parse a Python list of strings, such as "['Paris', 'City of Light']", without executing it.

    Raises DataError for any other text, an empty list, and a text of more than 1,048,576 characters. where: the file
    and line in the message.
    """
    try:
        if len(text) > MAX_BYTES["txt"]:
            raise ValueError("parsing needs a hundred times the memory of the text")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes such as '\d', which regex answers have
            answers = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
        answers = None
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: {text[:60]!r} is no list of answers like ['Paris', 'City of Light']")
    return tuple(answers)

"""Read the relevance judgements (qrels) of a BEIR or MS MARCO folder: which passages answer which question.

Shape letter: n questions.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, nearest
from dyad.data.question_passage.corpus import Corpus
from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.sources import local_path
from dyad.data.shards.text_files import open_text

BLOCK = 65_536  # judgements looked up at a time
MAX_LINE = 1 << 20  # bytes of a line of judgements
SIDES = ("question", "passage")  # names of the two ids of a judgement

Judgement = tuple[int, tuple[str, str], int]  # line, ids of question and passage, grade
Unknown = tuple[Judgement, int]  # a judgement, and the index in SIDES of an id that is missing
Found = tuple[tuple[int, int], Int64s, Int64s, Int64s, Int64s]  # explained by find_judged, which returns it


def queries_of(qrels: str) -> str:
    """Return the path of the questions that the file of judgements `qrels` is about: FOLDER/queries.jsonl for BEIR's
    FOLDER/qrels/SPLIT.tsv, FOLDER/queries.SPLIT.tsv for MS MARCO's FOLDER/qrels.SPLIT.tsv."""
    path = Path(qrels)
    beir = path.parent.name == "qrels"
    return str(path.parent.parent / "queries.jsonl" if beir else path.with_name(path.name.replace("qrels", "queries")))


def is_qrels(path: str) -> bool:
    """Whether `path` has the form of a file of judgements in a BEIR or MS MARCO folder, as `qrels_file` returns it."""
    return Path(path).parent.name == "qrels" or (Path(path).name.startswith("qrels.") and path.endswith(".tsv"))


def qrels_file(folder: str, split: str, setting: str) -> str:
    """Return the path of the judgements of one split, such as test, of a BEIR or MS MARCO folder.

    setting: the name of the setting that gives the split; the error message begins with "<setting>=<split>". Raises
    ConfigError for a split that the folder lacks.
    """
    path = Path(local_path(folder), "qrels", f"{split}.tsv")
    if Path(local_path(folder), "collection.tsv").is_file():
        path = Path(local_path(folder), f"qrels.{split}.tsv")
    if not path.is_file():
        splits = sorted(file.stem.removeprefix("qrels.") for file in path.parent.glob(path.name.replace(split, "*")))
        known = ", ".join(splits) or "none"
        triples = next(path.parent.glob("*triples*.tsv"), None)  # MS MARCO's rows of ids
        rows = f" Rows are in {triples}: name it and the corpus {path.parent}/collection.tsv" if triples else ""
        raise ConfigError(f"{setting}={split}: there is no {path}. Splits are {known}.{nearest(split, splits)}{rows}")
    return str(path)


def judgements(path: str) -> Iterator[Judgement]:
    """Yield (line number, (question id, passage id), grade) for each judgement in a file, whatever its grade.

    The columns are query-id, corpus-id and score (BEIR), or question, 0, passage and grade (TREC). Blank lines, and a
    first line with the names of the columns, are left out. The first line determines for the whole file how many
    columns there are, and whether tabs (ids may then hold spaces) or spaces separate columns. Raises DataError, naming
    the line, when a line cannot be read; ConfigError for a missing file.
    """
    form: tuple[str | None, int] | None = None
    with open_text(path) as file:
        for line, content in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if not content.strip():
                continue
            where, is_first = f"{path}: line {line}", form is None
            if len(content) == MAX_LINE:
                raise DataError(f"{where} is longer than {MAX_LINE - 1} bytes: no judgement")
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from None
            form = form or _form(text)
            question, passage, grade = _cells(text, form, where)
            if whole := re.fullmatch(r"(-?[0-9]{1,9})(\.0+)?", grade):
                yield line, (question, passage), int(whole[1])
            elif not is_first or re.match(r"[-+]?[0-9]", grade):  # otherwise the first line names the columns
                raise DataError(f"{where}: the grade {grade!r:.40} is no whole number")


def _form(text: str) -> tuple[str | None, int]:
    """Return the form of the first line `text` of a file of judgements: the separator of its columns (a tab; None:
    spaces), and the number of columns, 3 or 4."""
    separator = "\t" if "\t" in text else None
    return separator, 4 if len(text.split(separator)) == 4 else 3


def _cells(text: str, form: tuple[str | None, int], where: str) -> tuple[str, str, str]:
    """Return the question id, the passage id and the grade in a line of judgements. form: (separator, number of
    columns) of the first line, see `_form`. where: location of the line, for messages. Raises DataError for a line of
    another form."""
    separator, columns = form
    cells = text.split(separator)
    if len(cells) != columns or not all(cells):
        between, zero = "spaces" if separator is None else "tabs", " 0," * (columns == 4)
        raise DataError(
            f"{where} is {text!r:.80}, not question id,{zero} passage id and grade with {between} between, as the "
            "first line"
        )
    return cells[0], cells[-2], cells[-1]  # the second of TREC's four columns has no meaning


def find_judged(qrels: str, corpora: tuple[Corpus, Corpus]) -> Found:
    """Look up question and passage of each judgement in the file `qrels`, and group the passages by question.

    corpora: the questions (as a corpus of texts) and the passages. Equal pairs count once, with their largest grade. A
    question without a grade above 0 is left out. Returns first the two counts of `count_left_out`, of grades above 0.
    Then four int64 arrays: the positions of the n questions, ascending; n + 1 indices, where the passages of each
    question begin and end in the two last arrays; the positions of the passages; their grades. Raises DataError and
    ConfigError as `judgements` and `count_left_out` do.
    """
    rest, unknown, found = judgements(qrels), list[Unknown](), (array("q"), array("q"), array("q"))
    while block := list(islice(rest, BLOCK)):
        positions = np.stack([side.positions([ids[i] for _, ids, _ in block]) for i, side in enumerate(corpora)])
        known = (positions >= 0).all(axis=0)
        grades = np.array([grade for _, _, grade in block])
        for column, values in zip(found, (*positions, grades), strict=True):
            column.extend(values[known].tolist())
        unknown += [(block[i], int(positions[0, i] >= 0)) for i in np.flatnonzero(~known & (grades > 0)).tolist()]
    columns = np.asarray(found, np.int64)
    columns = columns[:, np.lexsort(columns[::-1])]
    is_last = np.ones(columns.shape[1], bool)  # last of equal pairs, which has the largest grade
    is_last[:-1] = (columns[:2, 1:] != columns[:2, :-1]).any(axis=0)
    columns = columns[:, is_last]
    questions, passages, grades = columns[:, np.isin(columns[0], columns[0, columns[2] > 0])]
    left_out = count_left_out(qrels, unknown, int((grades > 0).sum()))
    rows, counts = np.unique(questions, return_counts=True)
    return left_out, rows, np.concatenate([[0], np.cumsum(counts)]), passages, grades


def count_left_out(qrels: str, unknown: Sequence[Unknown], known: int) -> tuple[int, int]:
    """Count the `unknown` judgements: those of an unknown question, and those of an unknown passage only. Return both
    counts.

    A few such judgements are left out, as some published data sets have them. known: number of the others. Raises
    DataError when it is less than the number of unknown ones, because the files then do not belong together. qrels:
    path of the judgements, for the message.
    """
    if len(unknown) > known:
        (line, ids, _), side = unknown[0]
        raise DataError(
            f"{qrels}: {len(unknown):,} of {len(unknown) + known:,} judgements name an unknown question or passage, "
            f"first line {line}: {SIDES[side]} id '{ids[side]}'. Use the questions and passages that were judged"
        )
    passages = sum(side for _, side in unknown)
    return len(unknown) - passages, passages


def left_out_line(qrels: str, counts: Iterable[int]) -> str:
    """Return a message that says how many judgements of the file `qrels` are left out; "" if none is. counts: the two
    numbers that `count_left_out` returns."""
    words = (SIDES[0], f"{SIDES[1]} (an evaluation counts it as not found, as trec_eval does)")
    named = [f"{count:,} of an unknown {side}" for side, count in zip(words, counts, strict=True) if count]
    return f"{qrels}: judgements left out: {' and '.join(named)}" if named else ""

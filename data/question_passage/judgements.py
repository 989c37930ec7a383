"""Relevance judgements of a folder of BEIR or MS MARCO: which passages answer which question.

Shape letter: n questions.
"""

import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, nearest
from dyad.data.question_passage.corpus import Corpus
from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.sources import local_path

BLOCK = 65_536  # judgements looked up at a time
MAX_LINE = 1 << 20  # bytes of a line of judgements
SIDES = ("question", "passage")  # of a judgement

Judgement = tuple[int, tuple[str, str], int]  # line, ids of question and passage, grade
Unknown = tuple[Judgement, int]  # a judgement, and the index in SIDES of an id that is missing
Found = tuple[list[Unknown], Int64s, Int64s, Int64s]  # as find_judged returns it


def queries_of(qrels: str) -> str:
    """Return the file with the questions that the judgements `qrels` are about: FOLDER/queries.jsonl for BEIR's
    FOLDER/qrels/SPLIT.tsv, FOLDER/queries.SPLIT.tsv for MS MARCO's FOLDER/qrels.SPLIT.tsv."""
    path = Path(qrels)
    beir = path.parent.name == "qrels"
    return str(path.parent.parent / "queries.jsonl" if beir else path.with_name(path.name.replace("qrels", "queries")))


def qrels_file(folder: str, split: str, setting: str) -> str:
    """Return the path of the judgements of one split of a BEIR folder. Raises ConfigError for a split that the folder
    lacks.

    setting: the name of the setting that gives the split; the error message begins with "<setting>=<split>".
    """
    path = Path(local_path(folder), "qrels", f"{split}.tsv")
    if Path(local_path(folder), "collection.tsv").is_file():
        path = Path(local_path(folder), f"qrels.{split}.tsv")
    if not path.is_file():
        splits = sorted(file.stem.removeprefix("qrels.") for file in path.parent.glob(path.name.replace(split, "*")))
        known = ", ".join(splits) or "none"
        raise ConfigError(f"{setting}={split}: there is no {path}. Splits are {known}.{nearest(split, splits)}")
    return str(path)


def judgements(path: str) -> Iterator[Judgement]:
    """Yield the judgements of a .tsv file with the columns query-id, corpus-id and score, or those of TREC: the
    line number, the ids of question and passage, and the grade.

    Raises DataError, naming the line, when a line cannot be read.
    """
    with open(path, "rb") as file:
        for line, content in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if len(content) == MAX_LINE:
                raise DataError(f"{path}: line {line} is longer than {MAX_LINE - 1} bytes: no judgement")
            try:
                question, *zero, passage, grade = content.decode("utf-8").rstrip("\r\n").split("\t")
                if len(zero) > 1:  # one in the files of TREC, which nobody reads
                    raise ValueError
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: line {line} is not UTF-8: {error.reason} at byte {error.start}") from None
            except ValueError:
                wanted = "question id, passage id and grade with tabs between"
                raise DataError(f"{path}: line {line} is {content!r:.80}, not {wanted}") from None
            if re.fullmatch(r"-?[0-9]{1,9}", grade):
                yield line, (question, passage), int(grade)
            elif line > 1 or re.match(r"[-+]?[0-9]", grade):  # otherwise line 1 holds the names of the columns
                raise DataError(f"{path}: line {line}: the grade {grade!r:.40} is no whole number")


def find_judged(judged: Iterable[Judgement], corpora: tuple[Corpus, Corpus]) -> Found:
    """Look up question and passage of each judgement, and group the passages by question. Equal pairs count once.
    corpora: the questions and the passages.

    Returns the judgements with an unknown id, which are left out, each with 0 when the question is unknown and 1 when
    only the passage is. Then three arrays: the positions of the n questions, ascending; n + 1 indices, where the
    passages of each question begin and end in the third array; the positions of the passages.
    """
    rest, unknown, found = iter(judged), list[Unknown](), (array("q"), array("q"))
    while block := list(islice(rest, BLOCK)):
        positions = np.stack([side.positions([ids[i] for _, ids, _ in block]) for i, side in enumerate(corpora)])
        known = (positions >= 0).all(axis=0)
        for column, values in zip(found, positions[:, known], strict=True):
            column.extend(values.tolist())
        unknown += [(block[i], int(positions[0, i] >= 0)) for i in np.flatnonzero(~known).tolist()]
    pairs = np.unique(np.asarray(found, np.int64), axis=1)
    rows, counts = np.unique(pairs[0], return_counts=True)
    return unknown, rows, np.concatenate([[0], np.cumsum(counts)]), pairs[1]

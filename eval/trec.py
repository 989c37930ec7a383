"""Runs and judgements: files of TREC, MS MARCO, BEIR and DPR, one order of documents, measures per query.

The order is trec_eval's: scores as float32, equal ones by descending document id. `ranked` then sets equal scores
apart by the smallest step float32 has, so whatever sorts what we write or measure, by either id or by place in the
file, in either precision, sees one order. A run that is read keeps its scores; the ranks it states are not used.

A query with judgements and no results counts as zero; results without judgements for their query are left out.
nDCG's gains are the grades themselves; for all else a document is right from grade 1. A negative grade is a wrong one.
Nothing is taken from a run because its id is the query's: who makes the run does that first, for sets like ArguAna.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import ir_measures
import numpy as np

from data.errors import ConfigError, DataError
from data.files import whole_file

Run = dict[str, dict[str, float]]  # query → document → score
Qrels = dict[str, dict[str, int]]  # query → document → grade

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_LINE = 65_536  # bytes
MAX_GRADE = 10_000  # trec_eval makes a table as long as the highest grade
AT_ONCE = 1024  # queries that are measured together
CUTOFFS = (1, 3, 5, 10, 100, 1000)  # BEIR's

# All are pytrec_eval's, which is trec_eval, but MRR@k: MS MARCO's own. Both through ir_measures.
MEASURES = {
    "nDCG": ir_measures.nDCG,
    "MAP": ir_measures.AP,
    "MRR": ir_measures.RR,
    "Recall": ir_measures.R,
    "P": ir_measures.P,
    "Success": ir_measures.Success,
}
NEED_CUTOFF = ("Recall", "P", "Success")
_BEIR = {"ndcg": ("NDCG", "nDCG"), "map": ("MAP", "MAP"), "recall": ("Recall", "Recall")}
_BEIR |= {"precision": ("P", "P"), "mrr": ("MRR", "MRR")}


# ---- order and measures --------------------------------------------------------------------------------------------


def ranked(scores: Mapping[str, float], depth: int | None = None) -> list[tuple[str, float]]:
    """(document, score) best first, at most `depth`: the scores as float32, each below the one before.

    Raises ValueError for a score that is not finite as float32.
    """
    documents = list(scores)
    with np.errstate(over="ignore"):
        score = np.fromiter(scores.values(), np.float64, len(scores)).astype(np.float32)
    if not np.isfinite(score).all():
        worst = int(np.flatnonzero(~np.isfinite(score))[0])
        raise ValueError(
            f"the score of document {documents[worst]!r} is {scores[documents[worst]]}: not a finite float32"
        )
    pairs = sorted(zip(score.tolist(), documents, strict=True), reverse=True)[:depth]
    apart = _apart(np.array([s for s, _ in pairs], np.float32))
    return [(document, s) for (_, document), s in zip(pairs, apart.tolist(), strict=True)]


def _apart(score_n: np.ndarray) -> np.ndarray:
    """Descending float32 scores, made strictly so with as few steps as can be: s'_i = min(s_i, one below s'_i-1)."""
    bits = score_n.view(np.int32).astype(np.int64)
    steps = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # order-preserving whole numbers; 0.0 and -0.0 are one
    place = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + place) - place
    bits = np.where(steps < 0, -steps | 0x80000000, steps)
    return bits.astype(np.uint32).view(np.float32)


def measures(qrels: Qrels, run: Run, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """{name: {query: value}} for all queries of `qrels`. Names: nDCG@10, MAP, MRR@10, Recall@100, P@5, Success@1.

    Raises ConfigError for other names, ValueError for a score that is not finite.
    """
    wanted = {_measure(name): name for name in names}
    found = {name: dict.fromkeys(qrels, 0.0) for name in wanted.values()}
    queries = [query for query in run if query in qrels]
    for start in range(0, len(queries) if wanted else 0, AT_ONCE):
        some = queries[start : start + AT_ONCE]  # a run may be larger than what is left of memory for a second one
        strict = {query: dict(ranked(run[query])) for query in some}
        for query, measure, value in ir_measures.iter_calc(list(wanted), {q: qrels[q] for q in some}, strict):
            found[wanted[measure]][query] = float(value)
    return found


def _measure(name: str) -> ir_measures.Measure:
    base, at, cutoff = name.partition("@")
    if base not in MEASURES or ((at or base in NEED_CUTOFF) and not re.fullmatch(r"[1-9][0-9]{0,5}", cutoff)):
        known = ", ".join(f"{m}@k" if m in NEED_CUTOFF else f"{m}[@k]" for m in MEASURES)
        raise ConfigError(f"'{name}' is no measure. Choose of {known}, with k from 1 to 999999")
    return MEASURES[base] @ int(cutoff) if at else MEASURES[base]


def mean(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """{name: mean over queries} of what `measures` gives."""
    return {name: math.fsum(of.values()) / len(of) for name, of in values.items()}


def beir_result(qrels: Qrels, run: Run, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, dict[str, float]]:
    """{"ndcg": {"NDCG@1": …}, "map", "recall", "precision", "mrr"}: the JSON of BEIR, to 5 decimals."""
    means = mean(measures(qrels, run, [f"{ours}@{k}" for _, ours in _BEIR.values() for k in cutoffs]))
    return {
        key: {f"{theirs}@{k}": round(means[f"{ours}@{k}"], 5) for k in cutoffs} for key, (theirs, ours) in _BEIR.items()
    }


# ---- files in ------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """A TREC run `query Q0 document rank score tag`, or MS MARCO's `query document rank`, whose scores become −rank.

    Raises DataError with the line of what is wrong.
    """
    return _read(path, {6: (0, 2, 4, _score), 3: (0, 1, 2, _rank)}, "6 columns (TREC run) or 3 (MS MARCO run)")


def read_qrels(path: Path) -> Qrels:
    """TREC judgements `query 0 document grade`, or BEIR's `query document grade` with or without its line of names.

    Raises DataError with the line of what is wrong.
    """
    found = _read(path, {4: (0, 2, 3, _grade), 3: (0, 1, 2, _grade)}, "4 columns (TREC qrels) or 3 (BEIR qrels)")
    if not found:
        raise DataError(f"{path}:1: no judgement in the file")
    return found


def _read(path: Path, layouts: Mapping[int, tuple[int, int, int, Callable[[str], Any]]], legal: str) -> dict:
    """{query: {document: value}}; layouts: number of columns → where query, document, value stand, and its reader."""
    found: dict[str, dict[str, Any]] = {}
    columns = 0
    for line, fields in _rows(path):
        columns = columns or len(fields)
        if len(fields) not in layouts or len(fields) != columns or "" in fields:
            told = "an empty column" if "" in fields else f"{len(fields)} columns"
            raise DataError(f"{path}:{line}: {told}; a line has {legal}, all lines the same")
        if line == 1 and columns == 3 and not re.match("[-+]?[0-9]", fields[2]):
            continue  # the names of the columns
        query, document, value = (fields[column] for column in layouts[columns][:3])
        try:
            value = layouts[columns][3](value)
        except ValueError as error:
            raise DataError(f"{path}:{line}: {value!r} is {error}") from None
        if found.setdefault(query, {}).setdefault(document, value) != value:
            raise DataError(f"{path}:{line}: query {query!r} has document {document!r} twice, with different values")
    return found


def _score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _MAX_FLOAT32:
        raise ValueError("not a score: needs a finite number")
    return value


def _rank(text: str) -> float:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", text):
        raise ValueError("not a rank: needs 1, 2, … (three columns are MS MARCO's query, document, rank)")
    return -float(text)


def _grade(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,6}", text) or abs(int(text)) > MAX_GRADE:
        raise ValueError(f"not a grade: needs a whole number of at most {MAX_GRADE}")
    return int(text)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line from 1, columns) of the lines that are not blank: cut at tabs where there are any, else at ASCII spaces."""
    line = 0
    try:
        with open(path, "rb") as file:
            while raw := file.readline(MAX_LINE):
                line += 1
                if len(raw) == MAX_LINE:
                    raise DataError(f"{path}:{line}: a line of {MAX_LINE} bytes or more: not a run or judgements")
                text = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                if text.strip():
                    fields = text.rstrip(b"\r\n").split(b"\t") if text.count(b"\t") == 2 else text.split()
                    yield line, [field.decode() for field in fields]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start} of a column)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


# ---- files out -----------------------------------------------------------------------------------------------------


def write_run(path: Path, run: Run, tag: str) -> None:
    """A TREC run, best first, scores as `ranked` gives them. Raises DataError for an id that holds a space."""
    with _whole(path) as file:
        for query, scores in run.items():
            for rank, (document, score) in enumerate(ranked(scores), 1):
                file.write(f"{_column(query, path)} Q0 {_column(document, path)} {rank} {score:.9g} {tag}\n")


def write_qrels(path: Path, qrels: Qrels) -> None:
    """BEIR judgements when the name ends in .tsv, else TREC's. Raises DataError for an id that holds a space."""
    beir = path.suffix == ".tsv"
    between = "\t" if beir else " 0 "
    with _whole(path) as file:
        file.write("query-id\tcorpus-id\tscore\n" if beir else "")
        for query, grades in qrels.items():
            for document, grade in grades.items():
                columns = (_column(query, path), between, _column(document, path), between[0], str(grade))
                file.write("".join(columns) + "\n")


class Context(NamedTuple):
    """A retrieved passage, as DPR's readers take it."""

    id: str
    title: str
    text: str
    score: float
    has_answer: bool


def write_dpr(path: Path, rows: Iterable[tuple[str, Sequence[str], Iterable[Context]]]) -> None:
    """DPR's retriever output from (question, answers, passages best first), one row in memory at a time.

    One JSON list, one question per line; scores are strings, as DPR writes them.
    """
    with _whole(path) as file:
        before = "[\n"
        for question, answers, contexts in rows:
            ctxs = [{**context._asdict(), "score": str(context.score)} for context in contexts]
            file.write(before + json.dumps({"question": question, "answers": list(answers), "ctxs": ctxs}))
            before = ",\n"
        file.write("\n]\n" if before == ",\n" else "[]\n")


def _column(name: str, path: Path) -> str:
    if not re.fullmatch(r"[^\s\ud800-\udfff]+", name, re.ASCII):
        raise DataError(f"{path}: the id {name!r} cannot be a column: it is empty, holds a space, or is not Unicode")
    return name


@contextmanager
def _whole(path: Path) -> Iterator[TextIO]:
    """As `whole_file`, for UTF-8 text."""
    with whole_file(path) as file, TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
        yield text

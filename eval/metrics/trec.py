"""Runs and judgements: the order of documents, measures for each query, and files for TREC, BEIR and DPR tools.

The order is that of trec_eval: scores as float32, equal scores by descending document id. `ranked` then separates
equal scores by the smallest step of float32. So every tool that sorts our files sees the same order, whether it breaks
ties by id or by the position in the file, in float32 or float64.

A query with judgements but without results counts as zero. Results of a query without judgements are ignored. The
gains of nDCG are the grades; for all other measures a document is right if its grade is 1 or more. A negative grade
means wrong. A document whose id is that of the query is not removed here; the caller does that for sets like ArguAna.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TextIO

import ir_measures
import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import whole_file

Run = dict[str, dict[str, float]]  # query → document → score
Qrels = dict[str, dict[str, int]]  # query → document → grade

AT_ONCE = 1024  # queries that are measured together, to bound memory
CUTOFFS = (1, 3, 5, 10, 100, 1000)  # BEIR's

# ir_measures computes all with pytrec_eval (trec_eval), but MRR@k with the script of MS MARCO.
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
    """At most `depth` pairs (document, score), best first. Scores are float32, and each is below the one before.

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
    """Make descending float32 scores strictly descending: s'_i = min(s_i, the next float below s'_i-1)."""
    bits = score_n.view(np.int32).astype(np.int64)
    steps = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # integers in the same order; 0.0 and -0.0 are equal
    position = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + position) - position
    bits = np.where(steps < 0, -steps | 0x80000000, steps)
    return bits.astype(np.uint32).view(np.float32)


def measures(qrels: Qrels, run: Run, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """{measure: {query: value}} for all queries of `qrels`. Measures: nDCG@10, MAP, MRR@10, Recall@100, P@5, Success@1.

    Raises ConfigError for other names, ValueError for a score that is not finite.
    """
    wanted = {_measure(name): name for name in names}
    found = {name: dict.fromkeys(qrels, 0.0) for name in wanted.values()}
    queries = [query for query in run if query in qrels]
    for start in range(0, len(queries) if wanted else 0, AT_ONCE):
        some = queries[start : start + AT_ONCE]  # a second copy of the whole run may not fit in memory
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
    """{measure: mean over queries} of the values that `measures` returns."""
    return {name: math.fsum(of.values()) / len(of) for name, of in values.items()}


def beir_result(qrels: Qrels, run: Run, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, dict[str, float]]:
    """BEIR's JSON of a result, with 5 decimals: {"ndcg": {"NDCG@1": …}, "map", "recall", "precision", "mrr"}."""
    means = mean(measures(qrels, run, [f"{ours}@{k}" for _, ours in _BEIR.values() for k in cutoffs]))
    return {
        key: {f"{theirs}@{k}": round(means[f"{ours}@{k}"], 5) for k in cutoffs} for key, (theirs, ours) in _BEIR.items()
    }


# ---- files -----------------------------------------------------------------------------------------------------


def write_run(path: Path, run: Run, tag: str) -> None:
    """Write a TREC run, best first, with the scores of `ranked`. Raises DataError for an id with a space."""
    with _whole(path) as file:
        for query, scores in run.items():
            for rank, (document, score) in enumerate(ranked(scores), 1):
                file.write(f"{_column(query, path)} Q0 {_column(document, path)} {rank} {score:.9g} {tag}\n")


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write BEIR judgements if the name ends in .tsv, else TREC judgements. Raises DataError for an id with a space."""
    beir = path.suffix == ".tsv"
    between = "\t" if beir else " 0 "
    with _whole(path) as file:
        file.write("query-id\tcorpus-id\tscore\n" if beir else "")
        for query, grades in qrels.items():
            for document, grade in grades.items():
                columns = (_column(query, path), between, _column(document, path), between[0], str(grade))
                file.write("".join(columns) + "\n")


class Context(NamedTuple):
    """A retrieved passage in the form that DPR's reader models take."""

    id: str
    title: str
    text: str
    score: float
    has_answer: bool


def write_dpr(path: Path, rows: Iterable[tuple[str, Sequence[str], Iterable[Context]]]) -> None:
    """Write DPR's retriever output from rows (question, answers, passages best first), one row in memory at a time.

    The file is one JSON list with one question a line. Scores are strings, as in DPR's own files.
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

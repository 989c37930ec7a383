"""The order of documents in runs, measures of runs for each query, and files for TREC, BEIR and DPR tools.

A run is query → document → score; judgements (qrels) are query → document → grade. The order is that of trec_eval:
scores as float32, equal scores by descending document id. `ranked` then separates equal scores by the smallest step of
float32. So every tool that sorts our files sees the same order, whether it breaks ties by id or by the line in the
file, in float32 or float64.

A query with judgements but without results counts as zero. Results of a query without judgements are ignored. The gains
of nDCG are the grades; for all other measures a document is right if its grade is 1 or more. A negative grade means
wrong. A document that has the id of the query is not removed here. For data sets that ask for it, like ArguAna, the
caller must remove it first.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.base.files import whole_file
from dyad.data.base.json_text import SURROGATE

Run = dict[str, dict[str, float]]  # query → document → score
Qrels = dict[str, dict[str, int]]  # query → document → grade

AT_ONCE = 1024  # queries that are measured together, to bound memory
CUTOFFS = (1, 3, 5, 10, 100, 1000)  # BEIR's

# key of BEIR's JSON → beginning of the metric names in it, which ir_measures knows too
BEIR_NAMES = {"ndcg": "NDCG", "map": "MAP", "recall": "Recall", "precision": "P", "mrr": "MRR"}


# ---- order and measures --------------------------------------------------------------------------------------------


def ranked(scores: Mapping[str, float], depth: int | None = None) -> list[tuple[str, float]]:
    """Sort document → score into at most `depth` pairs (document, score), best first; None: all pairs.

    The scores, which must be finite as float32, are converted to it, and equal ones are lowered by the smallest step so
    that each is below the one before. Equal scores are ordered by descending document id.
    """
    score = np.fromiter(scores.values(), np.float32, len(scores))
    assert np.isfinite(score).all(), "a score is not a finite float32"
    pairs = sorted(zip(score.tolist(), scores, strict=True), reverse=True)[:depth]
    apart = _apart(np.array([s for s, _ in pairs], np.float32)).tolist()
    return [(document, s) for (_, document), s in zip(pairs, apart, strict=True)]


def _apart(score_n: np.ndarray) -> np.ndarray:
    """Return descending float32 scores (n,) made strictly descending, each lowered as little as possible.

    The new score i is the smaller one of the old score i and the next float32 below the new score i − 1.
    """
    bits = score_n.view(np.int32).astype(np.int64)
    steps = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # integers in the same order; 0.0 and -0.0 are equal
    position = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + position) - position
    bits = np.where(steps < 0, -steps | 0x80000000, steps)
    return bits.astype(np.uint32).view(np.float32)


def measures(qrels: Qrels, run: Run, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Compute measures of a run for all queries of `qrels`; return measure → query → score of the measure.

    qrels: query → document → grade. run: query → document → score. names: measures such as nDCG@10, MAP, MRR@10,
    Recall@100, P@5, Success@1. ir_measures computes them with pytrec_eval (trec_eval), except MRR@K, for which it uses
    the script of MS MARCO.
    """
    wanted = {ir_measures.parse_measure(name): name for name in names}
    found = {name: dict.fromkeys(qrels, 0.0) for name in wanted.values()}
    queries = [query for query in run if query in qrels]
    for start in range(0, len(queries), AT_ONCE):
        some = queries[start : start + AT_ONCE]  # a second copy of the whole run may not fit in memory
        strict = {query: dict(ranked(run[query])) for query in some}
        for query, measure, value in ir_measures.iter_calc(list(wanted), {q: qrels[q] for q in some}, strict):
            found[wanted[measure]][query] = float(value)
    return found


def beir_result(qrels: Qrels, run: Run, cutoffs: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the result of a run in the form of BEIR's JSON: each measure as its mean over the queries of `qrels`.

    The form is {"ndcg": {"NDCG@1": …, …}, "map": …, "recall": …, "precision": …, "mrr": …}, with numbers rounded to 5
    decimals. qrels: query → document → grade, for one query at least. run: query → document → score. cutoffs: each K of
    the measures, as in NDCG@K.
    """
    values = measures(qrels, run, [f"{name}@{k}" for name in BEIR_NAMES.values() for k in cutoffs])
    means = {name: round(math.fsum(of.values()) / len(of), 5) for name, of in values.items()}
    return {key: {f"{name}@{k}": means[f"{name}@{k}"] for k in cutoffs} for key, name in BEIR_NAMES.items()}


# ---- files -----------------------------------------------------------------------------------------------------


def write_run(path: Path, run: Run, tag: str) -> None:
    """Write a run (query → document → score) as a TREC file, the best document of a query first.

    Scores are float32; equal scores are separated by the smallest step (see `ranked`), so that every tool keeps the
    order. tag: the name of the system in the last column. Raises DataError for an id that is empty, holds a space, or
    is not Unicode; an older file then stays.
    """
    with whole_file(path) as file:
        for query, scores in run.items():
            for rank, (document, score) in enumerate(ranked(scores), 1):
                file.write(f"{_column(query, path)} Q0 {_column(document, path)} {rank} {score:.9g} {tag}\n".encode())


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write judgements (query → document → grade) as a TREC file.

    Raises DataError for an id that is empty, holds a space, or is not Unicode; an older file then stays.
    """
    with whole_file(path) as file:
        for query, grades in qrels.items():
            for document, grade in grades.items():
                file.write(f"{_column(query, path)} 0 {_column(document, path)} {grade}\n".encode())


def write_dpr(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write DPR's retriever output: a JSON list with one question per line. Only one row is in memory at a time.

    rows: one for each question: {"question", "answers", "ctxs": [{"id", "title", "text", "score", "has_answer"}]}, the
    passages in "ctxs" best first.
    """
    with whole_file(path) as file:
        file.write(b"[")
        for number, row in enumerate(rows):
            file.write(f"{',' if number else ''}\n{json.dumps(row)}".encode())
        file.write(b"\n]\n")


def _column(name: str, path: Path) -> str:
    if name.split() != [name] or SURROGATE.search(name):  # readers split lines at any space of Unicode
        raise DataError(f"{path}: the id {name!r} cannot be a column: it is empty, holds a space, or is not Unicode")
    return name

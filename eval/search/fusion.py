"""Reciprocal rank fusion of several rankings (Cormack, Clarke and Buettcher, SIGIR 2009)."""

import math
from collections.abc import Sequence

from dyad.eval.metrics.trec import Run, ranked


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60, depth: int | None = None) -> Run:
    """Merge several runs (query → document → score) into one by their ranks.

    The new score of a document is the sum, over the runs that contain it, of 1 / (k + its rank in this run). Ranks
    count from 1; documents with equal scores are ordered by descending id. depth: only the first `depth` documents of
    each run count, and the best `depth` are returned; None: all. The result has the queries of all runs, and for each
    query the best document first. Its scores are converted to float32, and equal ones are made different, by `ranked`
    (eval/metrics/trec.py). Sums are rounded once (math.fsum), so the scores do not depend on the order of the runs.
    """
    fused: Run = {}
    for query in dict.fromkeys(query for run in runs for query in run):
        parts: dict[str, list[float]] = {}
        for run in runs:
            for rank, (document, _) in enumerate(ranked(run.get(query, {}), depth), 1):
                parts.setdefault(document, []).append(1 / (k + rank))
        fused[query] = dict(ranked({document: math.fsum(part) for document, part in parts.items()}, depth))
    return fused

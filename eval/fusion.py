"""One ranking out of several: reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from eval.trec import Run, ranked


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60, depth: int | None = None) -> Run:
    """score(document) = Σ 1 / (k + rank) over the runs that have it, ranks from 1 by `ranked`.

    depth: only the first `depth` of each run count, and the best `depth` are kept. Queries of any run are answered.
    The order of the runs does not matter: sums are exact.
    """
    fused: Run = {}
    for query in dict.fromkeys(query for run in runs for query in run):
        parts: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            for rank, (document, _) in enumerate(ranked(run.get(query, {}), depth), 1):
                parts[document].append(1 / (k + rank))
        fused[query] = dict(ranked({document: math.fsum(part) for document, part in parts.items()}, depth))
    return fused

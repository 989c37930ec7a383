"""The same run in several ways: numbers of processes, chunks and kinds of parallelism, with the same losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs
from helpers.tiny_runs import losses

Way = tuple[int, object, str]  # processes, chunk_size, dist.name
ALONE: Way = (1, "null", "ddp")
OTHERS: list[Way] = [(2, 3, "ddp"), (3, "null", "ddp"), (2, "null", "fsdp2")]


def in_ways(cases: Mapping[str, Any]) -> list[Any]:
    """Parameters (case, ways): each case alone and in one of the others in turn, and with --soak in every way."""
    turns = zip(cases.items(), cycle(OTHERS), strict=False)
    two = [pytest.param(case, [ALONE, other], id=name) for (name, case), other in turns]
    every = [ALONE, *OTHERS]
    soak = [pytest.param(case, every, id=f"{name}, every way", marks=pytest.mark.soak) for name, case in cases.items()]
    return [*two, *soak]


def run_in_ways(jobs: Jobs, keys: Mapping[str, Any], ways: Sequence[Way], tolerance: float = 1e-5) -> list[Path]:
    """The folders of runs whose losses agree, one for each of the ways."""
    runs = []
    for world, chunk, dist in ways:
        own = {"chunk_size": chunk, "dist.name": dist, "run.name": f"{dist}-on-{world}-by-{chunk}"}
        runs.append(jobs.run(world, {**keys, **own}))
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), abs=tolerance, rel=tolerance), run.name
    return runs

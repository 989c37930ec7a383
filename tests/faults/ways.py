"""The same run in several ways: numbers of processes, chunks and kinds of parallelism, with the same losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs
from helpers.tiny_runs import losses

Way = tuple[int, object, str]  # processes, chunk_size, dist.name
TWO_WAYS: list[Way] = [(1, "null", "ddp"), (2, 3, "ddp")]
EVERY_WAY: list[Way] = [*TWO_WAYS, (3, "null", "ddp"), (2, "null", "fsdp2")]


def in_ways(cases: Mapping[str, Any]) -> list[Any]:
    """Parameters (case, ways): the first case in every way, the others in two, and with --soak in every way."""
    first, *others = [pytest.param(case, EVERY_WAY, id=f"{name}, every way") for name, case in cases.items()]
    two = [pytest.param(case, TWO_WAYS, id=name) for name, case in cases.items()]
    return [first, *two[1:], *(pytest.param(*other.values, id=other.id, marks=pytest.mark.soak) for other in others)]


def run_in_ways(jobs: Jobs, keys: Mapping[str, Any], ways: Sequence[Way], tolerance: float = 1e-5) -> list[Path]:
    """The folders of runs whose losses agree, one for each of the ways."""
    runs = []
    for world, chunk, dist in ways:
        own = {"chunk_size": chunk, "dist.name": dist, "run.name": f"{dist}-on-{world}-by-{chunk}"}
        runs.append(jobs.run(world, {**keys, **own}))
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), abs=tolerance, rel=tolerance), run.name
    return runs

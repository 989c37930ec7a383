"""Plain types for what an evaluation shows in trackers and model cards besides scalar metrics.

eval/results/panels.py makes them from results. Each tracker draws the parts that it supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Score(NamedTuple):
    """A metric with the ends of its 95 % interval and the value of a random order. None: unknown or not finite."""

    value: float | None
    low: float | None = None
    high: float | None = None
    chance: float | None = None


@dataclass(frozen=True)
class Scored:
    """The scores of one data set for a model card. hub_task: the hub's name of the task."""

    dataset: str
    hub_task: str
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Picture:
    """A thumbnail and the words below it."""

    path: Path
    caption: str


Cell = str | float | Picture | None


@dataclass(frozen=True)
class Grid:
    """A table of cells with named columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Panels:
    """What trackers show of one data set at the end of a run.

    final: metric, or <baseline>/<metric>, → its value, low, high and chance, as far as known. galleries: title in
    letters that suit a key → one row for each query. histograms: "right", "wrong", "best_wrong" → (n + 1 edges, n
    counts) of the scores of such pairs. confusion: (true, predicted, count); classes: (class, accuracy, samples), the
    lowest accuracy first; both None if nothing was classified.
    """

    dataset: str
    final: Mapping[str, Mapping[str, float]]
    galleries: Mapping[str, Grid]
    histograms: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    confusion: Grid | None
    classes: Grid | None

"""Dataclasses for the tables, histograms and scores that an evaluation shows in trackers and model cards.

Trackers are W&B and TensorBoard. eval/results/panels.py makes the objects from results; each tracker draws the parts
that it supports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Score(NamedTuple):
    """A metric value with the ends of its 95 % confidence interval, `low` and `high`.

    chance: the chance level (the score of a random ranking of the candidates). A number that is unknown or not finite
    is None.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    chance: float | None = None


@dataclass(frozen=True)
class Scored:
    """The scores of one data set, for a model card.

    dataset: the name of the data set. hub_task: the name of the task on the Hugging Face hub. scores: metric → Score.
    """

    dataset: str
    hub_task: str
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Thumbnail:
    """An image to show in a tracker: a thumbnail file and the caption below it."""

    path: Path
    caption: str


Cell = str | float | Thumbnail | None


@dataclass(frozen=True)
class Grid:
    """A table to show in a tracker: column names, and rows of cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Panels:
    """The scores, tables and histograms of one data set that trackers (W&B, TensorBoard) show at the end of a run.

    dataset: the name of the data set. final: METRIC, or BASELINE/METRIC for a baseline → {value, low, high, chance},
    without unknown entries (see Score). galleries: title of letters, digits and _ → table with one row per query.
    histograms: "right" (scores of right pairs), "wrong" (of random wrong pairs) or "best_wrong" (of each query's best
    wrong pair) → (n + 1 bin edges, n counts). confusion: table of confused classes, with columns true, predicted,
    count. classes: table with columns class, accuracy, samples, lowest accuracy first. confusion and classes are None
    if nothing was classified.
    """

    dataset: str
    final: Mapping[str, Mapping[str, float]]
    galleries: Mapping[str, Grid]
    histograms: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    confusion: Grid | None
    classes: Grid | None

"""The shapes of the JSON files in a run folder. `read_object` checks them, and all other code relies on them.

A file of another version may lack parts, or have them as null. A part of another shape is left out, with a log line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.errors import first_line
from dyad.data.base.json_text import read_json
from dyad.data.base.untrusted_paths import file_inside
from dyad.eval.results.cases import Case

Count = Annotated[int, Field(ge=0, le=10**15)]
Counts = list[Annotated[float, Field(ge=0, le=1e15)]]
Numbers = dict[str, float | None]
Interval = Annotated[list[float | None], Field(min_length=2, max_length=2)]
Intervals = dict[str, Interval | None]


class Difference(TypedDict, total=False):
    """The model's score minus the score of a baseline, in one metric."""

    value: float | None
    interval: Interval | None


class System(TypedDict, total=False):
    """The scores of one baseline by metric. difference: to the model."""

    metrics: Numbers | None
    intervals: Intervals | None
    difference: dict[str, Difference | None] | None


class Confusion(TypedDict):
    """A confusion matrix. counts: a row for each true class, a column for each predicted class."""

    classes: list[str]
    counts: list[Counts]


class Mistake(TypedDict):
    """How often a true class was predicted as another one."""

    true: str
    predicted: str
    count: Count


class ScoreHistogram(TypedDict):
    """Counts of scores between edges, of right pairs, wrong pairs and the best wrong item of each query."""

    edges: list[Annotated[float, Field(ge=-1e15, le=1e15)]]
    right: Counts
    wrong: Counts
    best_wrong: Counts


def _square(found: Confusion) -> Confusion:
    size = len(found["classes"])
    if not size or [len(row) for row in found["counts"]] != [size] * size:
        raise ValueError("each class needs a row of counts, with a count for each")
    return found


def _drawable(found: ScoreHistogram) -> ScoreHistogram:
    edges, bins = found["edges"], len(found["edges"]) - 1
    if edges != sorted({*edges}) or {len(found["right"]), len(found["wrong"]), len(found["best_wrong"])} != {bins}:
        raise ValueError("the edges must rise, with a count between any two")
    return found


class ResultFile(TypedDict, total=False):
    """The shape of eval/<data set>.json."""

    dataset: Required[str]
    task: Required[str]
    metrics: Required[Numbers]
    source: str | None
    step: Count | None
    truth: str | None
    search: dict[str, Any] | None
    chance: Numbers | None
    intervals: Intervals | None
    baselines: dict[str, System] | None
    per_class: dict[str, Numbers] | None
    confusion: Annotated[Confusion, AfterValidator(_square)] | None
    confused: list[Mistake] | None
    scores: Annotated[ScoreHistogram, AfterValidator(_drawable)] | None
    gallery: dict[str, list[Case]] | None


class StateFile(TypedDict, total=False):
    """The shape of run_state.json."""

    status: str | None
    step: Count | None
    total_steps: Count
    time: str | None
    error: str | None


RESULT, STATE = TypeAdapter(ResultFile), TypeAdapter(StateFile)


def read_object(folder: Path, name: str, shape: TypeAdapter[Any], log: Callable[[str], None]) -> dict[str, Any] | None:
    """The object in a JSON file below `folder`, without the parts that do not fit `shape`.

    None if there is no such file, or if it lacks a part that `shape` requires. log: gets a line for each part that is
    left out, or one for a file that exists and is not used.
    """
    path = file_inside(folder, name)
    if path is None:
        return log(f"{name} is not read: it lies outside this folder") if (folder / name).exists() else None
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        return log(f"{name} cannot be read: {first_line(error)}")
    wrong = _problems(shape, found)
    fitting = {part: value for part, value in found.items() if part not in wrong} if isinstance(found, dict) else found
    if required := _problems(shape, fitting):
        part, problem = next(iter(required.items()))
        return log(f"{name} is none of ours: {f'{part} {wrong.get(part, problem)}'.strip()}")
    for part, problem in wrong.items():
        log(f"{name}: {part} is left out: {problem}")
    return fitting


def _problems(shape: TypeAdapter[Any], found: Any) -> dict[str, str]:
    """Part of `found` → the first reason why it does not fit `shape`; the part "" stands for the whole."""
    problems: dict[str, str] = {}
    try:
        shape.validate_python(found, strict=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False, include_context=False):
            problems.setdefault(str((*problem["loc"], "")[0]), problem["msg"])
    return problems

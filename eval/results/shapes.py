"""The expected form of the JSON files in a run folder. `read_object` checks files, so that other code can rely on it.

A file of another version of Dyad may lack parts, or have null in their place. `read_object` leaves out parts of another
form, with a log line.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.errors import first_line
from dyad.data.base.files import file_inside
from dyad.data.base.json_text import read_json
from dyad.eval.results.cases import Case
from dyad.train.run_folder.best_record import Best

Count = Annotated[int, Field(ge=0, le=10**15)]
Counts = list[Annotated[float, Field(ge=0, le=1e15)]]
Numbers = dict[str, float | None]
Interval = Annotated[list[float | None], Field(min_length=2, max_length=2)]
Intervals = dict[str, Interval | None]


class Difference(TypedDict, total=False):
    """The score of the model minus the score of a baseline, in one metric, with its 95 % interval."""

    value: float | None
    interval: Interval | None


class System(TypedDict, total=False):
    """The scores of one baseline: metric → value, and metric → 95 % interval.

    difference: metric → the score of the model minus the score of the baseline.
    """

    metrics: Numbers | None
    intervals: Intervals | None
    difference: dict[str, Difference | None] | None


class Confusion(TypedDict):
    """A confusion matrix: how often each class was predicted for each true class.

    counts: a row for each true class, a column for each predicted class.
    """

    classes: list[str]
    counts: list[Counts]


class Mistake(TypedDict):
    """How often samples of one class (`true`) were predicted as another class (`predicted`)."""

    true: str
    predicted: str
    count: Count


class ScoreHistogram(TypedDict):
    """Counts of scores in the bins between `edges`.

    right: of right pairs. wrong: of random wrong pairs. best_wrong: of the best wrong item of each query.
    """

    edges: list[Annotated[float, Field(ge=-1e15, le=1e15)]]
    right: Counts
    wrong: Counts
    best_wrong: Counts


def _square(found: Confusion) -> Confusion:
    """Return `found` unchanged.

    Raises ValueError unless each class has a row of counts, with a count for each class.
    """
    size = len(found["classes"])
    if not size or [len(row) for row in found["counts"]] != [size] * size:
        raise ValueError("each class needs a row of counts, with a count for each")
    return found


def _drawable(found: ScoreHistogram) -> ScoreHistogram:
    """Return `found` unchanged. Raises ValueError unless the edges rise and each kind has a count for every bin."""
    edges, bins = found["edges"], len(found["edges"]) - 1
    if edges != sorted({*edges}) or {len(found["right"]), len(found["wrong"]), len(found["best_wrong"])} != {bins}:
        raise ValueError("the edges must rise, with a count between any two")
    return found


class ResultFile(TypedDict, total=False):
    """The expected form of eval/<data set>.json, the result of one evaluation."""

    dataset: Required[str]
    task: Required[str]
    metrics: Required[Numbers]
    source: str | None
    step: Count | None
    truth: str | None
    seen: str | None
    answers: str | None
    width: Count | None
    probe: dict[str, Any] | None
    history: list[str] | None
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
    """The expected form of run_state.json, the progress of a run."""

    status: str | None
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    host: str
    step: Count | None
    total_steps: Count
    best: Best | None
    evaluations_since_best: Count
    time: str | None
    error: str | None


RESULT, STATE = TypeAdapter(ResultFile), TypeAdapter(StateFile)


def read_object(folder: Path, name: str, shape: TypeAdapter[Any], log: Callable[[str], None]) -> dict[str, Any] | None:
    """Read the JSON file `name` in `folder`; return its object without the parts that do not fit `shape`.

    Returns None if the file does not exist, is a link out of `folder`, cannot be read, or has no object with the parts
    that `shape` requires. log: called with one line for each part that is left out, and for a file that exists but is
    not used.
    """
    if (path := file_inside(folder, name)) is None:
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
    """Check the JSON object `found` against `shape`; return name of a wrong part → the first reason; {} if all fits.

    The name "" stands for the whole object.
    """
    problems: dict[str, str] = {}
    try:
        shape.validate_python(found, strict=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False, include_context=False):
            problems.setdefault(str((*problem["loc"], "")[0]), problem["msg"])
    return problems

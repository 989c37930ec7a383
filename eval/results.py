"""What an evaluation leaves: one JSON file per data set, files that other tools read beside it, and short tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError, printable
from data.files import writable
from data.foreign import inside
from data.secrets import without_credentials
from eval.index_spec import EXACT
from train.config import Task
from train.tracking.headlines import PASSAGE_METRICS, Result, Score, lead, part, score, systems

if TYPE_CHECKING:
    from eval.encode import Evaluator, Report
    from train.config import TrainConfig

_RECALLS = (("text_to_image_R@", "image_retrieval_recall@"), ("image_to_text_R@", "text_retrieval_recall@"))
OTHER_TOOLS = (".beir", ".dpr")  # ends of JSON files that are not ours
LONGEST_NAME = 18  # columns of a table that a name has; a longer one is folded
NO_FILES: Mapping[str, Callable[[Path], None]] = {}


def facts(config: TrainConfig, checkpoint: Path, step: int) -> dict[str, Any]:
    """What the JSON says of the model: one name for the two towers, its weights, the step."""
    model = config.model
    towers = (model.image, model.text) if config.task is Task.image_text else (model.text,)
    names = [t.name or config.model.name or t.kind.name for t in towers]
    short = dict.fromkeys(Path(name).stem if name.endswith(".json") else name for name in names)
    return {"model": "+".join(short), "pretrained": str(checkpoint), "step": step}


def result(report: Report, evaluator: Evaluator, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of one data set: CLIP_benchmark's fields with `facts` of the model, and both names of each recall."""
    theirs = {t + k.removeprefix(o): v for o, t in _RECALLS for k, v in report.metrics.items() if k.startswith(o)}
    return {
        "dataset": evaluator.name.removeprefix("eval/"),
        "source": without_credentials(evaluator.source),
        **facts,
        "task": report.task,
        "metrics": {**report.metrics, **theirs},
        "language": "en",
        "chance": report.chance,
        **report.details,
    }


def write(
    folder: Path, content: Mapping[str, Any], files: Mapping[str, Callable[[Path], None]] = NO_FILES
) -> list[Path]:
    """Put a result at <folder>/<dataset>.json and its files beside it, each whole or not at all; returns the paths.

    A file whose format cannot hold the data, as a TREC run cannot hold an id with a space, is left out with a line.
    Raises HardwareError when nothing can be written there.
    """
    from data.files import write_json

    written = [folder / f"{content['dataset']}.json"]
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(written[0], content)
        for end, write_to in files.items():
            path = folder / f"{content['dataset']}{end}"
            try:
                write_to(path)
                written.append(path)
            except DataError as error:
                print(printable(f"left out: {error}"), file=sys.stderr)
    return written


def print_saved_tables(run: Path) -> None:
    """The tables of the results that lie in the run folder `run`."""
    print_tables(saved_results(run))


def saved_results(run: Path) -> list[dict[str, Any]]:
    """The results in the run folder `run`, by name; a file or a part of another shape is left out with a line."""
    from eval.shapes import RESULT, read_object

    found = [read_object(run, name, RESULT) for name in result_files(run)]
    for line in (line for _, lines in found for line in lines):
        print(printable(line), file=sys.stderr)
    return [result for result, _ in found if result and result["task"] in TABLES]


def result_files(run: Path) -> list[str]:
    """The JSON files in eval/ of a run folder that are not another tool's, by name."""
    files = sorted((run / "eval").glob("*.json")) if inside(run, "eval") else []
    return [f"eval/{file.name}" for file in files if not file.stem.endswith(OTHER_TOOLS)]


def print_tables(results: Sequence[Result]) -> None:
    """Retrieval by data set and direction, zero-shot by data set, retrieval of passages by system; 80 columns."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 80, markup=False, emoji=False)
    for task, table in TABLES.items():
        found = [r for r in results if r["task"] == task]
        if found:
            console.print(table(found))


def _table(*columns: str, title: str | None = None) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", box=SIMPLE)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    table.columns[0].overflow, table.columns[0].max_width = "fold", LONGEST_NAME
    return table


def _add_rows(table: Any, name: str, metrics: Sequence[str], result: Result, *more: str) -> None:
    """A row of values; below it their intervals and what chance would score, where these are known."""
    found = [score(result, m) for m in metrics]
    table.add_row(name, *(_told(s.value) for s in found), *more)
    if any(s.low is not None for s in found):
        table.add_row("  95 %", *(_interval(s) for s in found))
    table.add_row("  chance", *(_told(s.chance, unknown="") for s in found))


def _told(value: float | None, form: str = ".3f", unknown: str = "-") -> str:
    return unknown if value is None else f"{value:{form}}"


def _interval(found: Score, form: str = ".3f") -> str:
    return " ".join(_told(end, form, "") for end in (found.low, found.high)).strip()


def _title(result: Result, *counted: str) -> str:
    sizes = [f"{_told(score(result, f'num_{name}').value, ',.0f')} {name}" for name in counted]
    return f"{result['dataset']}: {', '.join(sizes)}{_approximate(result)}"


def _approximate(result: Result) -> str:
    """By which index, where that is not exact."""
    search = part(result, "search")
    indexes = {str(how["index"]) for how in (search, *search.values()) if isinstance(how, dict) and "index" in how}
    indexes -= {EXACT}
    return f" (approximate: index {', '.join(sorted(indexes))})" if indexes else ""


def _retrieval_tables(results: Sequence[Result]) -> Any:
    from rich.console import Group

    return Group(*(_retrieval_table(r) for r in results))


def _retrieval_table(result: Result) -> Any:
    """Direction by recall, the first four that there are."""
    ks = [k.removeprefix("image_to_text_R@") for k in result["metrics"] if k.startswith("image_to_text_R@")][:4]
    table = _table("retrieval", *(f"R@{k}" for k in ks), "median rank", title=_title(result, "images", "texts"))
    for way in ("image_to_text", "text_to_image"):
        median = score(result, f"{way}_median_rank").value  # an index knows the first ranks only
        _add_rows(table, way.replace("_to_", " → "), [f"{way}_R@{k}" for k in ks], result, _told(median, ".0f"))
    return table


def _zero_shot_table(results: Sequence[Result]) -> Any:
    table = _table("zero-shot", "acc1", "acc5", "mean/class", "samples", "largest class")
    for r in results:
        facts = _told(score(r, "num_samples").value, ",.0f"), _told(score(r, "majority_class_share").chance)
        _add_rows(table, r["dataset"] + _approximate(r), ("acc1", "acc5", "mean_per_class_recall"), r, *facts)
    return table


def _passage_tables(results: Sequence[Result]) -> Any:
    from rich.console import Group

    return Group(*(_passage_table(r) for r in results))


def _passage_table(result: Result) -> Any:
    """System by metric, each with its 95 % interval below, and by how much of the first metric the model is ahead."""
    shown = [name for name in PASSAGE_METRICS if name in result["metrics"]][:4]
    metrics = [name for name in result["metrics"] if name in shown]
    table = _table("system", *metrics, "model ahead", title=_title(result, "questions", "passages"))
    for name, system in systems(result).items():
        ahead = [lead(system, m) for m in metrics[:1] if system is not result]
        cells = [_with_interval(score(system, m)) for m in metrics]
        table.add_row(name, *cells, *(_with_interval(found, "+.3f", "") for found in ahead))
    chance = [score(result, m).chance for m in metrics]
    if any(value is not None for value in chance):
        table.add_row("chance", *(_told(value, unknown="") for value in chance))
    return table


def _with_interval(found: Score, form: str = ".3f", unknown: str = "-") -> str:
    return f"{_told(found.value, form, unknown)}\n{_interval(found, form)}".strip()


TABLES: dict[str, Callable[[Sequence[Result]], Any]] = {
    "zeroshot_retrieval": _retrieval_tables,
    "zeroshot_classification": _zero_shot_table,
    "passage_retrieval": _passage_tables,
}

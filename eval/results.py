"""What an evaluation leaves: one JSON file per data set, files that other tools read beside it, and short tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError, shown
from data.foreign import inside
from data.secrets import without_credentials
from eval.index_spec import EXACT
from train.config import Task
from train.files import writable
from train.tracking.headlines import PASSAGE_METRICS

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
    names = [t.name or config.model.name or t.kind.value for t in towers]
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
    from train.files import write_json

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
                print(shown(f"left out: {error}"), file=sys.stderr)
    return written


def print_saved_tables(run: Path) -> None:
    """The tables of the results that lie in the run folder `run`."""
    print_tables(saved_results(run))


def saved_results(run: Path) -> list[dict[str, Any]]:
    """The results that lie in the run folder `run`, by name; files of others are passed over."""
    from eval.shapes import RESULT, read_object

    found = (read_object(run, name, RESULT)[0] for name in result_files(run))
    return [result for result in found if result and result["task"] in TABLES]


def result_files(run: Path) -> list[str]:
    """The JSON files in eval/ of a run folder that are not another tool's, by name."""
    files = sorted((run / "eval").glob("*.json")) if inside(run, "eval") else []
    return [f"eval/{file.name}" for file in files if not file.stem.endswith(OTHER_TOOLS)]


def print_tables(results: Sequence[Mapping[str, Any]]) -> None:
    """Retrieval by data set and direction, zero-shot by data set, retrieval of passages by system; 80 columns."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 80)
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


def _add_rows(table: Any, name: str, metrics: Sequence[str], result: Mapping[str, Any], *more: str) -> None:
    """A row of values; below it their intervals and what chance would score, where these are known."""
    table.add_row(name, *(f"{result['metrics'][m]:.3f}" if m in result["metrics"] else "-" for m in metrics), *more)
    intervals, chance = result.get("intervals", {}), result["chance"]
    if any(intervals.get(m) for m in metrics):
        table.add_row("  95 %", *(" ".join(f"{v:.3f}" for v in intervals.get(m) or ()) for m in metrics))
    table.add_row("  chance", *(f"{chance[m]:.3f}" if m in chance else "" for m in metrics))


def _retrieval_tables(results: Sequence[Mapping[str, Any]]) -> Any:
    from rich.console import Group

    return Group(*(_retrieval_table(r) for r in results))


def _retrieval_table(result: Mapping[str, Any]) -> Any:
    """Direction by recall, the first four that there are."""
    ks = [k.removeprefix("image_to_text_R@") for k in result["metrics"] if k.startswith("image_to_text_R@")][:4]
    sizes = [f"{result['metrics'][f'num_{name}']:,.0f} {name}" for name in ("images", "texts")]
    title = f"{result['dataset']}: {', '.join(sizes)}{_approximate(result)}"
    table = _table("retrieval", *(f"R@{k}" for k in ks), "median rank", title=title)
    for way in ("image_to_text", "text_to_image"):
        median = result["metrics"].get(f"{way}_median_rank")  # an index knows the first ranks only
        cell = "-" if median is None else f"{median:.0f}"
        _add_rows(table, way.replace("_to_", " → "), [f"{way}_R@{k}" for k in ks], result, cell)
    return table


def _approximate(result: Mapping[str, Any]) -> str:
    """By which index, where that is not exact."""
    search = result.get("search", {})
    indexes = {str(how["index"]) for how in (search, *search.values()) if isinstance(how, dict) and "index" in how}
    indexes -= {EXACT}
    return f" (approximate: index {', '.join(sorted(indexes))})" if indexes else ""


def _zero_shot_table(results: Sequence[Mapping[str, Any]]) -> Any:
    table = _table("zero-shot", "acc1", "acc5", "mean/class", "samples", "largest class")
    for r in results:
        facts = f"{r['metrics']['num_samples']:,.0f}", f"{r['chance']['majority_class_share']:.3f}"
        _add_rows(table, r["dataset"] + _approximate(r), ("acc1", "acc5", "mean_per_class_recall"), r, *facts)
    return table


def _passage_tables(results: Sequence[Mapping[str, Any]]) -> Any:
    from rich.console import Group

    return Group(*(_passage_table(r) for r in results))


def _passage_table(result: Mapping[str, Any]) -> Any:
    """System by metric, each with its 95 % interval below, and by how much of the first metric the model is ahead."""
    shown = [name for name in PASSAGE_METRICS if name in result["metrics"]][:4]
    metrics = [name for name in result["metrics"] if name in shown]
    sizes = {name: f"{result['metrics'][f'num_{name}']:,.0f} {name}" for name in ("questions", "passages")}
    title = f"{result['dataset']}: {sizes['questions']}, {sizes['passages']}{_approximate(result)}"
    table = _table("system", *metrics, "model ahead", title=title)
    for name, system in {"model": result, **result["baselines"]}.items():
        ahead = system.get("difference", {}).get(metrics[0])
        cells = [_with_interval(f"{system['metrics'][m]:.3f}", system["intervals"][m], "") for m in metrics]
        table.add_row(name, *cells, _with_interval(f"{ahead['value']:+.3f}", ahead["interval"], "+") if ahead else "")
    if result["chance"]:
        table.add_row("chance", *(f"{result['chance'][m]:.3f}" if m in result["chance"] else "" for m in metrics), "")
    return table


def _with_interval(value: str, interval: Sequence[float] | None, sign: str) -> str:
    return value if interval is None else f"{value}\n{interval[0]:{sign}.3f} {interval[1]:{sign}.3f}"


TABLES: dict[str, Callable[[Sequence[Mapping[str, Any]]], Any]] = {
    "zeroshot_retrieval": _retrieval_tables,
    "zeroshot_classification": _zero_shot_table,
    "passage_retrieval": _passage_tables,
}

"""Write, read and print results of evaluations: a JSON file for each data set, and files for other tools beside it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyad.data.base.errors import DataError, printable
from dyad.data.base.files import leads_inside, write_errors, write_json
from dyad.data.base.secrets import without_credentials
from dyad.eval.results.kinds import KINDS
from dyad.eval.results.shapes import RESULT, read_object
from dyad.eval.results.summary import Result
from dyad.train.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

    from dyad.eval.encode.encoder import Evaluator, Report

_RECALLS = (("text_to_image_R@", "image_retrieval_recall@"), ("image_to_text_R@", "text_retrieval_recall@"))
OTHER_TOOLS = (".beir", ".dpr")  # endings of the stems of JSON files for other tools


def model_facts(config: TrainConfig, source: str, step: int | None) -> dict[str, Any]:
    """Return the fields of a result that describe the model: its name, the source of its weights, the training step.

    "width" is eval.width. With optim.ema, a field "weights" says that they are an average. source: the checkpoint or
    another source of the weights, as text. step: finished optimiser steps; None for a model that was not trained here.
    """
    model = config.model
    towers = [*[model.image] * config.has_images, *[model.text] * config.has_texts]
    names = [(t.name or config.model.name or str(t.kind)).removeprefix("local-dir:") for t in towers]
    # a folder by its last part: python -m eval reads the copy that the run keeps (train/towers/libraries/kept_files.py)
    short = dict.fromkeys(
        Path(name).stem if name.endswith(".json") else Path(name).name if Path(name).is_dir() else name
        for name in names
    )
    average = {} if config.optim.ema is None else {"weights": f"their average, optim.ema={config.optim.ema}"}
    return {"model": "+".join(short), "pretrained": source, "step": step, **average, "width": config.eval.width}


def result(report: "Report", evaluator: "Evaluator", facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a result, with the fields of CLIP_benchmark, from the report of an evaluator.

    Recalls of image–text retrieval have two entries, under our names and under CLIP_benchmark's names. Credentials are
    removed from the source. facts: the fields that describe the model, as `model_facts` returns them.
    """
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


def write(folder: Path, content: Mapping[str, Any], files: Mapping[str, Callable[[Path], None]]) -> list[Path]:
    """Write a result to <folder>/<dataset>.json and its other files beside it; return the paths of all files written.

    content: the result, as returned by `result`. files: ending of another file's name → function that writes the file
    to a given path, or removes it if there is nothing to write. Each file is written whole or not at all. A file whose
    function raises DataError, as for an id with a space in a TREC run, is left out, with a line on stderr. Raises
    HardwareError if the folder cannot be written.
    """
    written = [folder / f"{content['dataset']}.json"]
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(written[0], content)
        for end, write_to in files.items():
            path = folder / f"{content['dataset']}{end}"
            try:
                write_to(path)
                written += [path] if path.exists() else []
            except DataError as error:
                _print_error(f"left out: {error}")
    return written


def saved_results(run: Path) -> list[dict[str, Any]]:
    """Read the results in a run folder; return them sorted by file name.

    Results of unknown tasks are left out. Files and parts of an unexpected form are left out with a line on stderr.
    """
    found = (read_object(run, name, RESULT, _print_error) for name in result_files(run))
    return [result for result in found if result and result["task"] in KINDS]


def result_files(run: Path) -> list[str]:
    """Return the sorted paths of the result files, such as eval/val.json, relative to the run folder `run`.

    JSON files for other tools, such as val.beir.json beside val.json, are left out. Returns [] if eval/ is missing or a
    link out of the run folder.
    """
    files = sorted((run / "eval").glob("*.json")) if leads_inside(run / "eval", run) else []
    of_tools = {f"{file.stem}{end}" for file in files for end in OTHER_TOOLS}
    return [f"eval/{file.name}" for file in files if file.stem not in of_tools]


def _print_error(line: str) -> None:
    """Print a line on standard error."""
    print(printable(line), file=sys.stderr)


def new_console() -> "Console":
    """Return a Rich console for tables; it is 80 columns wide if stdout is no terminal."""
    from rich.console import Console

    return Console(width=None if Console().is_terminal else 80, markup=False, emoji=False, highlight=False)


def print_tables(results: Sequence[Result]) -> None:
    """Print tables of the evaluation results on standard output, one kind of result after the other.

    Results of tasks that are not in KINDS, those of plugins, are not printed.
    """
    console = new_console()
    for task, kind in KINDS.items():
        found = [r for r in results if r["task"] == task]
        for table in kind.tables(found) if found else ():
            console.print(table)

"""Compare runs: the keys that differ and a table of scores, by `python -m eval.compare runs/a runs/b`."""

import csv
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from dyad.data.base.command_line import help_text, parse_options, split_arguments
from dyad.data.base.errors import printable
from dyad.data.base.files import write_bytes, write_errors
from dyad.eval.compare.runs import (
    Keys,
    Metrics,
    Runs,
    SeedRow,
    best_first,
    best_scores,
    by_value,
    differing_keys,
    evaluated_differently,
    headlines,
    metric_name,
    over_seeds,
    read_runs,
    score_of,
)
from dyad.eval.config import CompareCommand
from dyad.eval.report.curves import last_value
from dyad.eval.results.kinds import label, new_table
from dyad.eval.results.summary import number
from dyad.eval.results.write import new_console
from dyad.train.tracking.panel_types import Score

PURPOSE = """\
Compare two or more runs: the keys that differ, and a row for each run with its state, its last training loss, and the
headline metric of each data set that it was evaluated on; of runs that differ in their seed alone, mean and deviation.
Only files of the run folders are read."""
EXAMPLES = {
    "two runs": "python -m eval.compare runs/a runs/b",
    "all runs, as after a sweep; the table also as CSV": "python -m eval.compare runs/* out=runs.csv",
    "with the curves of the runs in the same charts, in one file for a browser": "python -m eval.compare runs/* "
    "page=runs.html",
}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes a cell that begins so for a formula
OWN, EACH = 26, 14  # characters of a line for status, steps and loss, and for each metric


def main() -> None:
    folders, options = split_arguments(sys.argv[1:])
    if {"-h", "--help"} & {*options}:
        return print(help_text(PURPOSE, EXAMPLES, CompareCommand))
    command = parse_options(CompareCommand, options, "python -m eval.compare")
    runs = read_runs(Path(folder).expanduser() for folder in folders)
    keys, metrics = differing_keys(runs), headlines(runs)
    runs, console = best_first(runs, metrics), new_console()
    seeds, said = over_seeds(runs, keys, metrics), [*notes(runs, metrics)]
    for part in (*key_tables(keys), *score_tables(runs, metrics, console.width), *said, *seed_table(seeds)):
        console.print(part)
    if command.out is not None:
        _write(command.out, as_csv(runs, keys, metrics))
    if command.page is not None:
        from dyad.eval.compare.page import render  # Matplotlib takes a second to import

        _write(command.page, render(runs, keys, metrics, seeds, said, Path(command.page).expanduser()))


def _write(file: str, text: str) -> None:
    path = Path(file).expanduser()
    with write_errors(path):
        write_bytes(path, text.encode("utf-8", "replace"))
    print(f"Written: {path}")


# ---- output ----------------------------------------------------------------------------------------------------------


def key_tables(keys: Keys) -> Iterator[Any]:
    """Yield a Rich table of the keys that differ, a row for each value with its runs; a sentence if none differs."""
    table = new_table("key", "value", "runs", first_width=None)
    for key, values in keys.items():
        for n, (value, names) in enumerate(by_value(values).items()):
            table.add_row("" if n else key, value, names)
    yield table if keys else "No key that changes the weights differs."


def score_tables(runs: Runs, metrics: Metrics, width: int) -> Iterator[Any]:
    """Yield Rich tables with a row for each run: its status, steps and loss, and scores.

    A table has as many metrics as fit into `width` characters, at least one. "*" marks the best value of a metric that
    is True in `metrics`, if several runs have it. After the first table, runs without a score in a table are left out.
    """
    found = {m: {name: score_of(run, m) for name, run in runs.items()} for m in metrics}
    best = best_scores(runs, metrics)
    count = max(1, (width - OWN - max(map(len, runs))) // EACH)
    for start in range(0, max(1, len(metrics)), count):
        shown = [*metrics][start : start + count]
        titles = [printable("\n".join((dataset, *label(metric).rsplit(" ", 1)))) for dataset, metric in shown]
        table = new_table("run", "status", "steps", "loss", *titles, first_width=None)
        for name, run in runs.items():
            if start and all(found[m][name].value is None for m in shown):
                continue
            cells = [_cell(found[m][name], (name, m) in best) for m in shown]
            status, loss = printable(run.status or "–"), number(last_value(run.history, "train/loss"))
            table.add_row(name, status, f"{run.step:,}", loss, *cells)
        yield table


def seed_table(rows: Sequence[SeedRow]) -> Iterator[Any]:
    """Yield a Rich table of `rows`, metric by metric; nothing if there are none."""
    table = new_table("over seeds", "keys", "runs", "mean", "deviation", first_width=None)
    for before, row in zip((None, *rows), rows, strict=False):
        first = "" if before and before.metric == row.metric else metric_name(row.metric)
        table.add_row(first, row.keys, f"{row.runs}", number(row.mean), number(row.deviation))
    if rows:
        yield table


def _cell(found: Score, is_best: bool) -> str:
    """Format a score as its value, with "*" if it is the best; a second line has its 95 % interval, if it has one."""
    ends = "" if found.low is None else f"\n{number(found.low)}–{number(found.high)}"
    return f"{number(found.value)}{'*' * is_best}{ends}"


def notes(runs: Runs, metrics: Metrics) -> Iterator[str]:
    """Yield sentences on the tables of scores: what is in a cell, and in what evaluations of a data set differ."""
    if metrics:
        yield f"{'* best of the column; ' * any(metrics.values())}below a value: its 95 % interval"
    for dataset in dict.fromkeys(dataset for dataset, _ in metrics):
        if different := evaluated_differently(runs, dataset):
            facts = (
                f"{fact}: {', '.join(f'{value} ({names})' for value, names in by_value(values).items())}"
                for fact, values in different.items()
            )
            yield printable(f"{dataset}: no run is marked, as they were evaluated differently: {'; '.join(facts)}")


def as_csv(runs: Runs, keys: Keys, metrics: Metrics) -> str:
    """Return the scores as CSV text: a row for each run, a column for each metric and for each key that differs.

    Intervals are not in it. A text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    rows: list[list[Any]] = [["run", "status", "steps", "loss", *map(" ".join, metrics), *keys]]
    for name, run in runs.items():
        state = [name, run.status, run.step, last_value(run.history, "train/loss")]
        rows.append(
            [*state, *(score_of(run, m).value for m in metrics), *(values.get(name) for values in keys.values())]
        )
    text = StringIO()
    safe = ([f"'{c}" if isinstance(c, str) and c.startswith(FORMULA) else c for c in row] for row in rows)
    csv.writer(text).writerows(safe)
    return text.getvalue()

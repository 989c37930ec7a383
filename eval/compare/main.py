"""Compare runs: the keys that differ and a table of scores, by `python -m eval.compare runs/a runs/b`."""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dyad.data.base.command_line import help_text, parse_options, split_arguments
from dyad.data.base.errors import ConfigError, printable
from dyad.data.base.files import write_bytes, write_errors
from dyad.eval.config import CompareCommand
from dyad.eval.report.curves import last_value
from dyad.eval.report.run_folder import RunFolder, read_run
from dyad.eval.results.kinds import KINDS, headline, label, new_table
from dyad.eval.results.summary import number, score
from dyad.eval.results.write import new_console
from dyad.train.run_folder.folder import NOT_MATHS
from dyad.train.run_folder.older_runs import ADDED
from dyad.train.tracking.panel_types import Score

PURPOSE = """\
Compare two or more runs: the keys that differ, and a row for each run with its state, its last training loss, and the
headline metric of each data set that it was evaluated on; of runs that differ in their seed alone, mean and deviation.
Only files of the run folders are read."""
EXAMPLES = {
    "two runs": "python -m eval.compare runs/a runs/b",
    "all runs, as after a sweep; the table also as CSV": "python -m eval.compare runs/* out=runs.csv",
}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes a cell that begins so for a formula
NAMED = 3  # runs that are named of the commonest value of a key
OWN, EACH = 26, 14  # characters of a line for status, steps and loss, and for each metric
Runs = Mapping[str, RunFolder]  # by name
Keys = Mapping[str, Mapping[str, str]]  # dotted key → name of a run → its value as text
Metrics = Mapping[tuple[str, str], bool]  # (data set, metric) → whether the run with the highest value is the best


def main() -> None:
    folders, options = split_arguments(sys.argv[1:])
    if {"-h", "--help"} & {*options}:
        return print(help_text(PURPOSE, EXAMPLES, CompareCommand))
    command = parse_options(CompareCommand, options, "python -m eval.compare")
    runs = read_runs(Path(folder).expanduser() for folder in folders)
    keys, metrics = differing_keys(runs), headlines(runs)
    runs, console = best_first(runs, metrics), new_console()
    for part in (*key_tables(keys), *score_tables(runs, metrics, console.width), *notes(runs, metrics)):
        console.print(part)
    for part in seed_table(runs, keys, metrics):
        console.print(part)
    if command.out is not None:
        path = Path(command.out).expanduser()
        with write_errors(path):
            write_bytes(path, as_csv(runs, keys, metrics).encode("utf-8", "replace"))
        print(f"Written: {path}")


def read_runs(folders: Iterable[Path]) -> dict[str, RunFolder]:
    """Read run folders; return name → content, where the name is the path of a run below the common folder of all runs.

    Folders that are no run folders, are of a newer Dyad, or whose config.yaml cannot be read, are left out, with a line
    on stderr; so are damaged parts of a run. A folder that is given twice counts once. Raises ConfigError for a path
    that is no folder, and if fewer than two runs are left.
    """
    found = dict[Path, RunFolder]()
    for folder in folders:
        try:
            found[folder.resolve()] = read_run(folder)
        except ConfigError as error:  # runs/* names the results of `python -m eval model=…` too
            if not folder.is_dir():
                raise
            print(printable(f"left out: {error}"), file=sys.stderr)
    if len(found) < 2:
        raise ConfigError("Give two run folders or more, for example: python -m eval.compare runs/a runs/b")
    root = os.path.commonpath(found)
    for path, run in found.items():
        for line in run.unread:
            print(printable(f"{path}: {line}"), file=sys.stderr)
    return {printable(os.path.relpath(path, root)): run for path, run in found.items()}


def differing_keys(runs: Runs) -> Keys:
    """Return the keys that change the weights and differ between the runs: key → name of a run → its value as text.

    A key that an older run lacks has its value in ADDED (train/run_folder/older_runs.py). Other keys that a run lacks,
    such as options of another objective, have no entry for this run; that is no difference. from_weights is left out:
    it follows from what was typed.
    """
    options = {name: {**ADDED, **run.options} for name, run in runs.items()}
    without = (*NOT_MATHS, "from_weights")
    keys = dict.fromkeys(key for run in runs.values() for key in run.options if not key.startswith(without))
    found = {key: {name: _text(of[key]) for name, of in options.items() if key in of} for key in keys}
    return {printable(key): values for key, values in found.items() if len({*values.values()}) > 1}


def _text(value: Any) -> str:
    """Return a configuration value as text: a string as it is, any other value as JSON.

    Control characters are escaped and credentials removed (`printable`).
    """
    return printable(value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True))


def headlines(runs: Runs) -> Metrics:
    """Return (data set, headline metric) → whether the run with the highest value is the best, in order of the columns.

    It is, if all runs were evaluated on the same data, for the tasks of KINDS (eval/results/kinds.py), in which a
    higher headline is better; the direction of tasks of plugins is unknown. These metrics come first, of them first
    those of data.val. Results without metrics are left out.
    """
    results = [result for run in runs.values() for result in run.results if result["metrics"]]
    same = {name: len(data_of(runs, name)) == 1 for name in {result["dataset"] for result in results}}
    found = {(r["dataset"], headline(r["metrics"])): r["task"] in KINDS and same[r["dataset"]] for r in results}
    return dict(sorted(found.items(), key=lambda item: (not item[1], item[0][0] != "val", item[0])))


def data_of(runs: Runs, dataset: str) -> list[str]:
    """Return the different data on which runs were evaluated under the name `dataset`, each as its source and sizes."""
    results = [result for run in runs.values() for result in run.results if result["dataset"] == dataset]
    sizes = [{m.removeprefix("num_"): score(r, m).value for m in r["metrics"] if m.startswith("num_")} for r in results]
    texts = (", ".join(f"{number(count)} {name}" for name, count in of.items()) for of in sizes)
    named = (f"{r.get('source')}{text and f' ({text})'}" for r, text in zip(results, texts, strict=True))
    return [*dict.fromkeys(named)]


def best_first(runs: Runs, metrics: Metrics) -> Runs:
    """Sort runs by the first metric that is True in `metrics`, the highest value first.

    Runs without a value come last. If no metric is True, the runs keep their order.
    """
    first = next((metric for metric, higher in metrics.items() if higher), ("", ""))
    found = {name: score_of(run, first).value for name, run in runs.items()}
    return {name: runs[name] for name in sorted(runs, key=lambda name: (found[name] is None, -(found[name] or 0)))}


def score_of(run: RunFolder, metric: tuple[str, str]) -> Score:
    """Return the score of a run in `metric`, a pair (data set, metric); its value is None if the run lacks it."""
    return score(next((result for result in run.results if result["dataset"] == metric[0]), {"metrics": {}}), metric[1])


# ---- output ----------------------------------------------------------------------------------------------------------


def key_tables(keys: Keys) -> Iterator[Any]:
    """Yield a Rich table of the keys that differ, a row for each value with its runs; a sentence if none differs.

    The commonest value comes last, and its runs are counted if they are more than NAMED.
    """
    table = new_table("key", "value", "runs", first_width=None)
    for key, values in keys.items():
        of_value = {value: [name for name in values if values[name] == value] for value in values.values()}
        commonest = max(of_value, key=lambda value: len(of_value[value]))
        if (count := len(of_value[commonest])) > NAMED:
            del of_value[commonest]
            of_value[commonest] = [f"the other {count}"]
        for n, (value, names) in enumerate(of_value.items()):
            table.add_row("" if n else key, value, ", ".join(names))
    yield table if keys else "No key that changes the weights differs."


def score_tables(runs: Runs, metrics: Metrics, width: int) -> Iterator[Any]:
    """Yield Rich tables with a row for each run: its status, steps and loss, and scores.

    A table has as many metrics as fit into `width` characters, at least one. "*" marks the best value of a metric that
    is True in `metrics`, if several runs have it. After the first table, runs without a score in a table are left out.
    """
    found = {m: {name: score_of(run, m) for name, run in runs.items()} for m in metrics}
    values = {m: [s.value for s in found[m].values() if s.value is not None] for m in metrics}
    best = {m: max(of) if len(of) > 1 else None for m, of in values.items()}
    count = max(1, (width - OWN - max(map(len, runs))) // EACH)
    for start in range(0, max(1, len(metrics)), count):
        shown = [*metrics][start : start + count]
        titles = [printable("\n".join((dataset, *label(metric).rsplit(" ", 1)))) for dataset, metric in shown]
        table = new_table("run", "status", "steps", "loss", *titles, first_width=None)
        for name, run in runs.items():
            if start and all(found[m][name].value is None for m in shown):
                continue
            cells = [_cell(found[m][name], metrics[m] and found[m][name].value == best[m]) for m in shown]
            status, loss = printable(run.status or "–"), number(last_value(run.history, "train/loss"))
            table.add_row(name, status, f"{run.step:,}", loss, *cells)
        yield table


def seed_table(runs: Runs, keys: Keys, metrics: Metrics) -> Iterator[Any]:
    """Yield a Rich table of each metric that is True in `metrics`, over runs that differ in their seed alone.

    A row is a group of two such runs or more: the keys in which these groups differ, the number of runs, the mean and
    the sample standard deviation of their values. Yields nothing without such a group.
    """
    groups = dict[tuple[tuple[str, str], ...], list[RunFolder]]()  # (key, value) of all keys but the seed → runs
    for name, run in runs.items() if "seed" in keys else ():
        own = tuple((key, values[name]) for key, values in keys.items() if key != "seed" and name in values)
        groups.setdefault(own, []).append(run)
    table = new_table("over seeds", "keys", "runs", "mean", "deviation", first_width=None)
    for metric in (metric for metric, higher in metrics.items() if higher):
        found = ((own, [score_of(run, metric).value for run in group]) for own, group in groups.items())
        known = ((own, [value for value in values if value is not None]) for own, values in found)
        rows = sorted(((mean(of), own, of) for own, of in known if len(of) > 1), key=lambda row: -row[0])
        common = set.intersection(*({*own} for _, own, _ in rows)) if rows else set()
        for n, (average, own, of) in enumerate(rows):
            first = "" if n else printable(f"{metric[0]} {label(metric[1])}")
            differing = ", ".join("=".join(pair) for pair in own if pair not in common) or "all runs"
            table.add_row(first, differing, f"{len(of)}", number(average), number(stdev(of)))
    if table.rows:
        yield table


def _cell(found: Score, is_best: bool) -> str:
    """Format a score as its value, with "*" if it is the best; a second line has its 95 % interval, if it has one."""
    ends = "" if found.low is None else f"\n{number(found.low)}–{number(found.high)}"
    return f"{number(found.value)}{'*' * (is_best and found.value is not None)}{ends}"


def notes(runs: Runs, metrics: Metrics) -> Iterator[str]:
    """Yield sentences on the tables of scores: what is in a cell, and which runs were evaluated on different data."""
    if metrics:
        yield f"{'* best of the column; ' * any(metrics.values())}below a value: its 95 % interval"
    for dataset in dict.fromkeys(dataset for dataset, _ in metrics):
        if len(different := data_of(runs, dataset)) > 1:
            yield printable(
                f"{dataset}: no run is marked, as they were evaluated on different data: {'; '.join(different)}"
            )


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

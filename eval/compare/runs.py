"""The runs of a comparison as data: the keys that differ, the scores, and the groups that differ in the seed alone."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from dyad.data.base.errors import ConfigError, printable
from dyad.eval.report.run_folder import RunFolder, read_run
from dyad.eval.results.kinds import KINDS, headline, indexes, label
from dyad.eval.results.summary import Result, protocol, score
from dyad.eval.search.index_spec import EXACT
from dyad.train.run_folder.folder import NOT_MATHS
from dyad.train.run_folder.older_runs import ADDED
from dyad.train.tracking.panel_types import Score

Runs = Mapping[str, RunFolder]  # by name
Keys = Mapping[str, Mapping[str, str]]  # dotted key → name of a run → its value as text
Metrics = Mapping[tuple[str, str], bool]  # (data set, metric) → whether the run with the highest value is the best
NAMED = 3  # runs that are named of the commonest value of a key


class SeedRow(NamedTuple):
    """The values of one metric in two or more runs that differ in their seed alone.

    metric: (data set, metric). keys: the values of the keys in which this group differs from the others, as text. runs:
    how many runs. mean, deviation: the mean and the sample standard deviation of their values.
    """

    metric: tuple[str, str]
    keys: str
    runs: int
    mean: float
    deviation: float


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
    return _differing({name: {key: of[key] for key in keys if key in of} for name, of in options.items()})


def _differing(found: Mapping[str, Mapping[str, Any]]) -> Keys:
    """Return the keys with two values or more: key → name of a run → its value as text.

    found: name of a run → key → value.
    """
    keys = dict.fromkeys(key for of in found.values() for key in of)
    values = {key: {name: _text(of[key]) for name, of in found.items() if key in of} for key in keys}
    return {printable(key): of_runs for key, of_runs in values.items() if len({*of_runs.values()}) > 1}


def by_value(values: Mapping[str, str]) -> dict[str, str]:
    """Return value → the names of its runs, as text; a commonest value of more than NAMED runs comes last, counted.

    values: name of a run → value.
    """
    names = {value: [name for name in values if values[name] == value] for value in values.values()}
    commonest = max(names, key=lambda value: len(names[value]))
    if (count := len(names[commonest])) > NAMED:
        del names[commonest]
        names[commonest] = [f"the other {count}"]
    return {value: ", ".join(of) for value, of in names.items()}


def _text(value: Any) -> str:
    """Return a configuration value as text: a string as it is, any other value as JSON.

    Control characters are escaped and credentials removed (`printable`).
    """
    return printable(value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True))


def headlines(runs: Runs) -> Metrics:
    """Return (data set, headline metric) → whether the run with the highest value is the best, in order of the columns.

    It is, if `evaluated_differently` finds nothing, for the tasks of KINDS (eval/results/kinds.py), in which a
    higher headline is better; the direction of tasks of plugins is unknown. These metrics come first, of them first
    those of data.val. Results without metrics are left out.
    """
    results = [result for run in runs.values() for result in run.results if result["metrics"]]
    same = {name: not evaluated_differently(runs, name) for name in {result["dataset"] for result in results}}
    found = {(r["dataset"], headline(r["metrics"])): r["task"] in KINDS and same[r["dataset"]] for r in results}
    return dict(sorted(found.items(), key=lambda item: (not item[1], item[0][0] != "val", item[0])))


def evaluated_differently(runs: Runs, dataset: str) -> Keys:
    """Return in what the evaluations under the name `dataset` differ: fact → name of a run → its value as text.

    Facts are the source, the sizes, the files of histories, the search index and `protocol`. A fact that a result
    lacks, as of an older version, is no difference; a result without an index was searched exactly.
    """
    results = {name: r for name, run in runs.items() for r in run.results if r["dataset"] == dataset}
    return _differing({name: _facts(result) for name, result in results.items()})


def _facts(result: Result) -> dict[str, str]:
    """Return what must be equal where scores are compared: name of the fact → its value as text."""
    sizes = {m: score(result, m).value for m in result["metrics"] if m.startswith("num_")}
    lists = {"history": result.get("history"), "index": indexes(result) or [EXACT]}
    return {
        "source": str(result.get("source")),
        **{name.removeprefix("num_"): f"{size:,.0f}" for name, size in sizes.items() if size is not None},
        **{name: " ".join(values) for name, values in lists.items() if values},
        **protocol(result),
    }


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


def best_scores(runs: Runs, metrics: Metrics) -> set[tuple[str, tuple[str, str]]]:
    """Return (name of a run, metric) where the run has the highest value of several runs that have one.

    Of the metrics that are True in `metrics`.
    """
    found = set[tuple[str, tuple[str, str]]]()
    for metric in (metric for metric, higher in metrics.items() if higher):
        scores = {name: score_of(run, metric).value for name, run in runs.items()}
        values = {name: value for name, value in scores.items() if value is not None}
        if len(values) > 1:
            found |= {(name, metric) for name, value in values.items() if value == max(values.values())}
    return found


def metric_name(metric: tuple[str, str]) -> str:
    """Return the name of a (data set, metric) for people, such as "val image → text R@1"."""
    return printable(f"{metric[0]} {label(metric[1])}")


def over_seeds(runs: Runs, keys: Keys, metrics: Metrics) -> list[SeedRow]:
    """Return the values of each metric that is True in `metrics` over runs that differ in their seed alone.

    They are in the order of `metrics`, the best group first. keys: those that differ between the runs. A group has two
    seeds or more with a value.
    """
    groups = dict[tuple[tuple[str, str], ...], list[str]]()  # (key, value) of all keys but the seed → names of runs
    for name in runs if "seed" in keys else ():
        own = tuple((key, values[name]) for key, values in keys.items() if key != "seed" and name in values)
        groups.setdefault(own, []).append(name)
    common = set.intersection(*map(set, groups)) if groups else set()
    found = list[SeedRow]()
    for metric in (metric for metric, higher in metrics.items() if higher):
        rows = list[SeedRow]()
        for own, names in groups.items():
            scores = {name: score_of(runs[name], metric).value for name in names}
            values = {name: value for name, value in scores.items() if value is not None}
            if len({keys["seed"].get(name) for name in values}) > 1:
                differing = ", ".join("=".join(pair) for pair in own if pair not in common)
                of = values.values()
                rows.append(SeedRow(metric, differing or "all runs", len(of), mean(of), stdev(of)))
        found += sorted(rows, key=lambda row: -row.mean)
    return found

"""The HTML page of a comparison: a table of the runs, scores over seeds, and charts with the curves of several runs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from dyad.eval.compare.runs import Keys, Metrics, Runs, SeedRow, best_scores, metric_name, score_of
from dyad.eval.report.curves import Chart, Charts, evaluation_charts, last_value, training_charts
from dyad.eval.report.main import NAME
from dyad.eval.report.page import ENVIRONMENT
from dyad.eval.report.plots import LINES


def render(runs: Runs, keys: Keys, metrics: Metrics, seeds: Sequence[SeedRow], notes: Sequence[str], out: Path) -> str:
    """Return the page as text. The first runs, as many as there are colours, have curves.

    keys, metrics, seeds: as the functions of runs.py return them. notes: sentences below the table. out: the file to
    which the page is written, for the links to the reports of the runs.
    """
    best, folder = best_scores(runs, metrics), out.absolute().parent
    rows = [
        {
            "name": name,
            "run": run,
            "report": quote(os.path.relpath(run.path.absolute() / NAME, folder)) if (run.path / NAME).exists() else "",
            "loss": last_value(run.history, "train/loss"),
            "scores": [(score_of(run, metric), (name, metric) in best) for metric in metrics],
        }
        for name, run in runs.items()
    ]
    return ENVIRONMENT.get_template("compare.html.j2").render(
        name=f"{len(runs)} runs compared",
        rows=rows,
        keys=keys,
        metrics={metric: metric_name(metric) for metric in metrics},
        ordered=any(metrics.values()),
        notes=notes,
        seeds=[(metric_name(row.metric), row) for row in seeds],
        charts=list(shared_charts(dict(islice(runs.items(), len(LINES)))).items()),
    )


def shared_charts(runs: Runs) -> Charts:
    """Return the charts of the reports of `runs`, by title, each with one line of every run that has it.

    It is the first line of the first run's chart. A line has the name of its run, and the same colour in all charts. A
    chart of one run, or in which all lines are equal, such as the learning rate of runs with one schedule, is left out.
    """
    of_runs = {
        name: {**evaluation_charts(run.history, run.results), **training_charts(run.options, run.history)}
        for name, run in runs.items()
    }
    found = {}
    for title in dict.fromkeys(title for charts in of_runs.values() for title in charts):
        first = next(charts[title] for charts in of_runs.values() if title in charts)
        label = first.series[0].label
        lines = [
            replace(line, label=name, band=(), colour=n)
            for n, (name, charts) in enumerate(of_runs.items())
            for line in (charts[title].series if title in charts else ())
            if line.label == label
        ]
        if len({(*line.steps, *line.values) for line in lines}) > 1:
            found[title] = Chart(" ".join(filter(None, (first.note, label))), lines, log=first.log, shows=first.shows)
    return found

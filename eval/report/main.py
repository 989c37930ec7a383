"""report.html: a run on one page, in one file that loads nothing else. `python -m eval.report run=runs/x` writes it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dyad.data.base.command_line import help_text, parse_options
from dyad.data.base.errors import ConfigError
from dyad.data.base.files import writable, write_bytes
from dyad.data.base.secrets import public_path
from dyad.data.shards.licences import Notice, notices
from dyad.eval.config import ReportCommand
from dyad.eval.report import page, plots
from dyad.eval.report.curves import Chart, evaluation_charts, health_charts, option, training_charts
from dyad.eval.report.gallery import KINDS, View, briefly, cases
from dyad.eval.report.health_checks import health_checks
from dyad.eval.report.run_folder import RunFolder, read_run
from dyad.eval.results.kinds import groups, meanings
from dyad.eval.results.summary import classes, finite, number, part

PURPOSE = """\
Put a run on one page: what was trained on what, numbers with intervals and chance, curves, signs of failure, and what
it finds for some queries. One file, report.html, without anything to load; training writes it by itself at its end."""
EXAMPLES = {
    "of a run that goes on, was cut off, or was evaluated again": "python -m eval.report run=runs/emoji",
    "somewhere else": "python -m eval.report run=runs/emoji out=emoji.html",
}
NAME = "report.html"
GALLERIES = 3_000_000  # bytes of all cases; every other part of the page has a bound of its own
CHARTS = 24
NOTICE = 12_000  # characters of a notice
CONFIG = 40_000  # characters of a configuration
TEMPLATES = Path(__file__).parent / "templates"


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(PURPOSE, EXAMPLES, ReportCommand))
        return
    command = parse_options(ReportCommand, sys.argv[1:], "python -m eval.report")
    out = None if command.out is None else Path(command.out).expanduser()
    print(f"Written: {write_report(Path(command.run).expanduser(), out)}")


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder to `out`, or to report.html in the folder, whole or not at all; return its path.

    Raises ConfigError if it is no run folder, HardwareError if the page cannot be written.
    """
    content = render(read_run(run)).encode("utf-8", "replace")
    path = run / NAME if out is None else out
    with writable(path):
        write_bytes(path, content)
    return path


def render(run: RunFolder) -> str:
    """The page as HTML, of at most 5 MB for any run."""
    status, status_line = page.status(run)
    results = sorted(run.results, key=lambda result: result["dataset"] != "val")
    parts = Parts(run)
    return parts.environment.get_template("report.html.j2").render(
        name=run.path.resolve().name,
        place=shlex.quote(public_path(str(run.path))),
        summary=page.summary(run),
        facts=page.facts(run),
        status=status,
        status_line=status_line,
        unread=run.unread,
        cards=page.cards(results),
        glance=parts.glance(results),
        more=max(0, len(results) - page.FIRST),
        checks=health_checks(run.config, run.records, results),
        sets=[parts.data_set(result, number) for number, result in enumerate(results)],
        over_training=parts.charts(evaluation_charts(run.records, results)),
        training=parts.charts(training_charts(run.config, run.records)),
        health=parts.charts(health_charts(run.records)),
        gone_on=run.gone_on,
        notices=[(public_path(notice.file), notice.text[:NOTICE]) for notice in _notices(run)],
        config=run.config_text[:CONFIG],
        headings=KINDS,
    )


class Parts:
    """Makes the parts of a page. Each figure has a name of its own; all galleries together have GALLERIES bytes."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._figures, self._bytes_left = run, 0, GALLERIES
        self.environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,  # captions, names and notices are written by others
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.filters |= {"number": number, "exact": exact}

    def charts(self, charts: Sequence[Chart]) -> list[tuple[Chart, Markup]]:
        """The first CHARTS of some charts, each with its SVG."""
        marks = self._run.gone_on
        return [(chart, Markup(plots.line_chart(chart, self._figure(), marks))) for chart in charts[:CHARTS]]

    def data_set(self, result: Mapping[str, Any], number: int) -> dict[str, Any]:
        """One result. left_out: what has no room on the page."""
        shown, name = groups(result), str(result["dataset"])
        found = {
            "name": name,
            "anchor": f"set-{number}",
            "source": str(result.get("source") or ""),
            "sizes": page.sizes(result),
            "groups": shown,
            "meanings": meanings(shown),
            "worst": classes(result)[: page.WORST],
            "confused": page.confused_pairs(result),
            "histogram": None,
            "confusion": None,
            "galleries": {},
            "left_out": "Histogram, matrix and cases",
        }
        if number >= page.FIRST:
            return found
        left_out = 0
        for _, title, listed in _galleries([result]):
            for kind, case in cases(listed, self._run.path, name):
                html = self._case(case)
                size = len(html.encode("utf-8", "replace"))
                if size <= self._bytes_left:
                    self._bytes_left -= size
                    found["galleries"].setdefault(title, {}).setdefault(kind, []).append(html)
                else:
                    left_out += 1
        found["left_out"] = f"{left_out} more cases" if left_out else ""
        if scores := result.get("scores"):
            found["histogram"] = Markup(plots.score_histogram(scores, self._figure()))
        if confusion := result.get("confusion"):
            drawn = plots.confusion_matrix(confusion["classes"], confusion["counts"], self._figure())
            found["confusion"] = Markup(drawn)
        return found

    def glance(self, results: Sequence[Mapping[str, Any]]) -> list[Markup]:
        """Random cases of the first gallery with the answers of this run, as many as fit beside the numbers."""
        for dataset, _, listed in _galleries(results):
            drawn = [case for kind, case in cases(listed, self._run.path, dataset) if kind == "random"]
            if drawn:
                return [self._case(briefly(case), glance=True) for case in drawn[: 2 if len(results) < 3 else 4]]
        return []

    def _case(self, case: View, glance: bool = False) -> Markup:
        return Markup(self.environment.get_template("case.html.j2").render(case=case, glance=glance))

    def _figure(self) -> str:
        self._figures += 1
        return f"figure-{self._figures}"


def _galleries(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """(data set, title, cases) of each gallery; galleries with pictures as answers come first."""
    found = [
        (str(result["dataset"]), title, listed)
        for result in results
        for title, listed in part(result, "gallery").items()
    ]
    return sorted(found, key=lambda gallery: not gallery[1].endswith("pictures"))


def _notices(run: RunFolder) -> list[Notice]:
    """Notices beside the data of the run; none if a value of another version cannot be read."""
    keys = ("data.train", "data.val", "data.passage.corpus", "eval.suite")
    values = [option(run.config, key) for key in keys]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
    try:
        return notices([*flat, *(str(r["source"]) for r in run.results if r.get("source"))])
    except ConfigError:
        return []


def exact(value: Any) -> str:
    """A number with all its digits, as the JSON has it."""
    return "" if finite(value) is None else repr(float(value))

"""report.html: a run on one page, a file that loads nothing. `python -m eval.report run=runs/x` makes it anew."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from data import errors
from data.command_line import help_text, parse_options
from data.errors import ConfigError
from data.files import writable, write_bytes
from data.notices import Notice, notices
from data.secrets import public_path
from eval.config import ReportCommand
from eval.report import page, plots
from eval.report.curves import Chart, evaluation_charts, health_charts, number, option, training_charts
from eval.report.gallery import KINDS, briefly, cases
from eval.report.run_folder import RunFolder, read_run
from eval.report.signs import signs
from train.tracking.headlines import classes, finite

PURPOSE = """\
Put a run on one page: what was trained on what, numbers with intervals and chance, curves, signs of failure, and what
it finds for some queries. One file, report.html, without anything to load; training writes it by itself at its end."""
EXAMPLES = {
    "of a run that goes on, was cut off, or was evaluated again": "python -m eval.report run=runs/emoji",
    "somewhere else": "python -m eval.report run=runs/emoji out=emoji.html",
}
NAME = "report.html"
ROOM = 3_000_000  # bytes for cases of galleries; all the rest has a bound of its own
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
    """Write the page of a run folder, whole or not at all, to `out` or report.html in the folder; returns its path.

    Raises ConfigError when it is no run folder, HardwareError when the page cannot be written.
    """
    content = render(read_run(run)).encode("utf-8", "replace")
    path = run / NAME if out is None else out
    with writable(path):
        write_bytes(path, content)
    return path


def render(run: RunFolder) -> str:
    """The page, of at most 5 MB whatever the run has."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # captions, names and notices are other people's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "exact": exact}
    status, status_line = page.status(run)
    results = sorted(run.results, key=lambda result: result["dataset"] != "val")
    figures = Figures(run.gone_on)
    room = Room(ROOM)
    return environment.get_template("report.html.j2").render(
        name=run.path.resolve().name,
        place=shlex.quote(public_path(str(run.path))),
        summary=page.summary(run),
        facts=page.facts(run),
        status=status,
        status_line=status_line,
        unread=run.unread,
        cards=page.cards(results),
        glance=_glance(results, run, environment),
        more=max(0, len(results) - page.FIRST),
        signs=signs(run.config, run.records, results),
        sets=[_data_set(result, place, run, figures, room, environment) for place, result in enumerate(results)],
        over_training=list(figures.of(evaluation_charts(run.records, results))),
        training=list(figures.of(training_charts(run.config, run.records))),
        health=list(figures.of(health_charts(run.records))),
        gone_on=run.gone_on,
        notices=[(public_path(notice.file), notice.text[:NOTICE]) for notice in _notices(run)],
        config=run.config_text[:CONFIG],
        headings=KINDS,
    )


@dataclass
class Room:
    """Bytes that are left on the page."""

    left: int

    def take(self, fragment: str) -> bool:
        """Whether the fragment has room; it is then taken."""
        size = len(fragment.encode("utf-8", "replace"))
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


@dataclass
class Figures:
    """Charts as SVG, each under a name of its own. gone_on: steps that get a line."""

    gone_on: Sequence[float]
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"figure-{self.count}"

    def of(self, charts: Sequence[Chart]) -> Iterator[tuple[Chart, Markup]]:
        for chart in charts[:CHARTS]:
            yield chart, Markup(plots.line_chart(chart, self.name(), self.gone_on))


@dataclass
class DataSet:
    """One result on the page. left_out: what found no room."""

    name: str
    anchor: str
    source: str
    sizes: str
    groups: Sequence[page.Group]
    meanings: Sequence[str]
    worst: Sequence[tuple[str, float, int]]
    confused: Sequence[tuple[str, str, int]]
    histogram: Markup | None = None
    confusion: Markup | None = None
    galleries: dict[str, dict[str, list[Markup]]] = field(default_factory=dict)
    left_out: str = ""


def _data_set(
    result: Mapping[str, Any], place: int, run: RunFolder, figures: Figures, room: Room, environment: Environment
) -> DataSet:
    groups = page.groups(result)
    shown = DataSet(
        name=str(result["dataset"]),
        anchor=f"set-{place}",
        source=str(result.get("source") or ""),
        sizes=page.sizes(result),
        groups=groups,
        meanings=page.meanings(groups),
        worst=classes(result)[: page.WORST],
        confused=page.confused_pairs(result),
    )
    if place >= page.FIRST:
        shown.left_out = "Histogram, matrix and cases"
        return shown
    template, left_out = environment.get_template("case.html.j2"), 0
    for _, title, listed in _galleries([result]):
        for kind, case in cases(listed, run.path, shown.name):
            html = template.render(case=case, glance=False)
            if room.take(html):
                shown.galleries.setdefault(title, {}).setdefault(kind, []).append(Markup(html))
            else:
                left_out += 1
    shown.left_out = f"{left_out} more cases" if left_out else ""
    if scores := result.get("scores"):
        shown.histogram = Markup(plots.score_histogram(scores, figures.name()))
    if confusion := result.get("confusion"):
        drawn = plots.confusion_matrix(confusion["classes"], confusion["counts"], figures.name())
        shown.confusion = Markup(drawn)
    return shown


def _galleries(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """(data set, title, cases) of each gallery; those whose answers are pictures first."""
    found = [
        (str(result["dataset"]), title, listed)
        for result in results
        for title, listed in (result.get("gallery") or {}).items()
    ]
    return sorted(found, key=lambda gallery: not gallery[1].endswith("pictures"))


def _glance(results: Sequence[Mapping[str, Any]], run: RunFolder, environment: Environment) -> list[Markup]:
    """What this run answers in random cases of the first gallery, as many as stand in a row beside the numbers."""
    template = environment.get_template("case.html.j2")
    for dataset, _, listed in _galleries(results):
        drawn = [case for kind, case in cases(listed, run.path, dataset) if kind == "random"]
        if drawn:
            count = 2 if len(results) < 3 else 4
            return [Markup(template.render(case=briefly(case), glance=True)) for case in drawn[:count]]
    return []


def _notices(run: RunFolder) -> list[Notice]:
    """Whose work the data of the run are; nothing where a value of another version cannot be read."""
    keys = ("data.train", "data.val", "data.passage.corpus", "eval.suite")
    values = [option(run.config, key) for key in keys]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
    try:
        return notices([*flat, *(str(r["source"]) for r in run.results if r.get("source"))])
    except ConfigError:
        return []


def exact(value: Any) -> str:
    """As the JSON has it."""
    return "" if finite(value) is None else repr(float(value))


if __name__ == "__main__":
    errors.run(main)

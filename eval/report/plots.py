"""Charts as SVG for the page. Text stays text, colours come from the page, and no global state is used.

Matplotlib does not know CSS variables, so it draws with placeholder colours, which `_svg` replaces by the variables.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dyad.eval.report.curves import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID, ON_FULL = "#010101", "#020202", "#030303", "#040404"
LINES = (
    "#010001",
    "#010002",
    "#010003",
)  # blue, vermilion and green of Okabe and Ito, which colour-blind people can discern
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", ON_FULL: "--on-full"}
VARIABLES |= {line: f"--line-{n}" for n, line in enumerate(LINES)}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # lines also differ without colour
FULL = (0.0, 0.447, 0.698)  # colour of a cell of the confusion matrix; its opacity is its share
LEGIBLE = 0.85  # up to this share dark text is legible on a cell
DECADES = 30  # ratio of values from which an axis is logarithmic
POINTS = 200  # of a line; more points are averaged
WIDTH, HEIGHT = 3.7, 2.1  # inches of 72 units
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same figure, the same bytes
    "text.usetex": False,
    "text.parse_math": False,  # a $ in a class name is a $
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.grid": False,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def line_chart(chart: Chart, name: str, marks: Sequence[float] = ()) -> str:
    """A chart as SVG. name: of the figure, unique in the page. marks: steps with a vertical line."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, axes = _figure(WIDTH, HEIGHT)
        log = chart.log and _ratio(chart) > DECADES
        if log:
            axes.set_yscale("log", subs=[])
        for mark in marks:
            axes.axvline(mark, color=GRID, linewidth=1)
        for level in chart.levels.values():
            axes.axhline(level, color=SOFT, linewidth=1, linestyle=":")
        for number, series in enumerate(chart.series):
            _line(axes, series, number % len(LINES))
        if chart.shows:
            axes.update_datalim([(chart.series[0].steps[0], value) for value in chart.shows])
            axes.autoscale_view()
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        axes.xaxis.set_major_formatter(lambda value, _: _count(value))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.locator_params(axis="x", nbins=5)
        if not log:
            axes.locator_params(axis="y", nbins=6)
        return _svg(figure, name, in_words(chart))


def _ratio(chart: Chart) -> float:
    """The ratio of the largest to the smallest value; 0 if a value has no logarithm."""
    values = [v for s in chart.series for part in (s.values, *(s.band or ())) for v in part]
    return max(values) / min(values) if min(values) > 0 else 0.0


def in_words(chart: Chart) -> str:
    """A chart in words, for screen readers."""
    lines = [
        f"{series.label} from {series.values[0]:.4g} at step {series.steps[0]:,.0f} to {series.values[-1]:.4g} at step "
        f"{series.steps[-1]:,.0f}, least {min(series.values):.4g}, most {max(series.values):.4g}".strip()
        for series in chart.series
    ]
    levels = [f"{label} at {value:.4g}" for label, value in chart.levels.items()]
    return f"{chart.title}: {'; '.join([*lines, *levels])}"


def score_histogram(scores: Mapping[str, Any], name: str) -> str:
    """The histogram of a result as SVG: right pairs, wrong pairs and best wrong items, each with a sum of 1."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, axes = _figure(WIDTH, HEIGHT)
        for number, which in enumerate(("right", "wrong", "best_wrong")):
            counts = np.asarray(scores[which], dtype=float)
            shares = counts / max(counts.sum(), 1)
            filled = number < 2
            axes.stairs(shares, scores["edges"], fill=filled, color=LINES[number], alpha=0.3 if filled else 0.0)
            axes.stairs(shares, scores["edges"], color=LINES[number], linewidth=1.4, linestyle=DASHES[number])
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("score")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        middles = {which: _mean(scores, which) for which in ("right", "wrong", "best_wrong")}
        words = ", ".join(f"{which.replace('_', ' ')} {value:.3g}" for which, value in middles.items())
        return _svg(figure, name, f"Histogram of scores; means: {words}")


def confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]], name: str) -> str:
    """A confusion matrix as SVG with a row for each true class; cells show their share of the row."""
    from matplotlib import rc_context

    shares = np.asarray(counts, dtype=float)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    cells = np.empty((*shares.shape, 4))
    cells[..., :3], cells[..., 3] = FULL, shares
    size = len(classes)
    with rc_context(STYLE):
        figure, axes = _figure(5.6, 3.9)
        axes.imshow(cells, interpolation="none", aspect="auto")
        labels = [_label(label) for label in classes]
        font = 8 if size <= 12 else max(3.5, 8 * 15 / size)
        axes.set_xticks(range(size), labels, rotation=90 if size > 12 else 40, ha="right", fontsize=font)
        axes.set_yticks(range(size), labels, fontsize=font)
        if size > 12:
            for tick in axes.get_xticklabels():
                tick.set_horizontalalignment("center")
        else:
            for tick in axes.get_xticklabels():
                tick.set_rotation_mode("anchor")
        axes.set_xlabel("answered")
        axes.set_ylabel("true")
        axes.tick_params(length=0)
        for row, column in np.argwhere(shares >= 0.005) if size <= 12 else []:
            share = shares[row, column]
            colour = ON_FULL if share > LEGIBLE else INK
            axes.text(column, row, f"{share * 100:.0f}", ha="center", va="center", color=colour, fontsize=font)
        return _svg(figure, name, f"Confusion of {size} classes; the numbers are in the lists beside it")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def _line(axes: Axes, series: Series, number: int) -> None:
    steps, values = _averaged(series.steps, min), _averaged(series.values)
    colour = LINES[number]
    marker = "o" if len(steps) <= 12 else None
    if series.band:
        low, high = _averaged(series.band[0], min), _averaged(series.band[1], max)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    elif len(series.steps) > POINTS:
        low, high = _averaged(series.values, min), _averaged(series.values, max)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(steps, values, color=colour, linestyle=DASHES[number], linewidth=1.4, marker=marker, markersize=2.5)


def _averaged(values: Sequence[float], how: Any = None) -> list[float]:
    """At most POINTS numbers: the mean, or `how`, of equal parts of `values`."""
    if len(values) <= POINTS:
        return list(values)
    cuts = np.linspace(0, len(values), POINTS + 1).astype(int).tolist()
    return [float((how or np.mean)(values[start:stop])) for start, stop in pairwise(cuts)]


def _mean(scores: Mapping[str, Any], which: str) -> float:
    edges, counts = np.asarray(scores["edges"], dtype=float), np.asarray(scores[which], dtype=float)
    return float(((edges[1:] + edges[:-1]) / 2 * counts).sum() / max(counts.sum(), 1))


def _label(text: str) -> str:
    """A class name for an axis: printable and short."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return shown if len(shown) <= 20 else f"{shown[:19]}…"


def _count(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:,.0f}" if value == round(value) else ""


def _svg(figure: Figure, name: str, words: str) -> str:
    """The figure as an <svg> element. Its ids get the prefix `name`, since all figures share a page."""
    from xml.sax.saxutils import quoteattr

    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs that our font lacks: the browser has other fonts
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view
    svg = f'<svg {view[0]} role="img" aria-label={quoteattr(words)}>{svg[svg.index(">") + 1 :]}'
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    return svg

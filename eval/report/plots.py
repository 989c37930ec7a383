"""Draw charts, histograms and confusion matrices as SVG with Matplotlib, without changing its global settings.

Text stays text in the SVG. Matplotlib does not know CSS variables, so charts are drawn in placeholder colours, which
`_svg` replaces by the variables of report.css.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import quoteattr
from zlib import crc32

import numpy as np
from markupsafe import Markup

from dyad.eval.report.curves import Chart, Series

with chdir("/"):  # Matplotlib takes settings from a file matplotlibrc of the working folder, which a stranger may own
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID, ON_FULL = "#010101", "#020202", "#030303", "#040404"
# Blue, vermilion, green, purple, black and orange of Okabe and Ito, which colour-blind people can discern
LINES = ("#010001", "#010002", "#010003", "#010004", "#010005", "#010006")
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", ON_FULL: "--on-full"}
VARIABLES |= {line: f"--line-{n}" for n, line in enumerate(LINES)}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # lines also differ without colour
FULL = (0.0, 0.447, 0.698)  # colour of a cell of the confusion matrix; its opacity is its share
NUMBERED = 20  # the most classes of a confusion matrix whose cells have numbers
LEGIBLE = 0.85  # the largest share of a cell on which dark text is legible
DECADES = 30  # an axis is logarithmic if the largest value is more than so many times the smallest
POINTS = 200  # the most points of a line; more points are averaged
WIDTH, HEIGHT = 3.7, 2.1  # inches of 72 units
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same figure, the same bytes
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "text.color": INK,
    "axes.linewidth": 0.6,
    # text.parse_math: a $ in a class name is a $
    **dict.fromkeys(("text.usetex", "text.parse_math", "axes.grid", "axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), SOFT),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
}


def line_chart(title: str, chart: Chart, marks: Sequence[float] = ()) -> Markup:
    """Return a chart as an <svg> element.

    chart: each of its lines must have a value. title: the title of the chart, used only in its text for screen readers.
    marks: steps at which a vertical line is drawn.
    """
    with _figure(layout=None) as (figure, axes):
        values = [v for series in chart.series for part in (series.values, *series.band) for v in part]
        log = chart.log and min(values) > 0 and max(values) / min(values) > DECADES
        if log:
            axes.set_yscale("log", subs=[])
        for mark in marks:
            axes.axvline(mark, color=GRID, linewidth=1)
        if chart.level[1] is not None:
            axes.axhline(chart.level[1], color=SOFT, linewidth=1, linestyle=":")
        for number, series in enumerate(chart.series):
            _line(axes, series, (number if series.colour is None else series.colour) % len(LINES))
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
        # Matplotlib's layout engine would take as long as all the rest, for every chart
        widest = max(len(f"{value:g}") for value in axes.get_yticks())
        figure.subplots_adjust(left=(8 + 4.8 * widest) / (72 * WIDTH), bottom=0.11, right=0.95, top=0.96)
        return _svg(figure, _description(title, chart))


def _description(title: str, chart: Chart) -> str:
    """Return a text on a chart for screen readers: the first, last, smallest and largest value of each line."""
    lines = [
        f"{series.label} from {series.values[0]:.4g} at step {series.steps[0]:,.0f} to {series.values[-1]:.4g} at step "
        f"{series.steps[-1]:,.0f}, least {min(series.values):.4g}, most {max(series.values):.4g}".strip()
        for series in chart.series
    ]
    level, value = chart.level
    return f"{title}: {'; '.join(lines if value is None else [*lines, f'{level} at {value:.4g}'])}"


def score_histogram(scores: Mapping[str, Any]) -> Markup:
    """Return the score histogram of a result as an <svg> element.

    It has right pairs, wrong pairs and best wrong items, each scaled to a sum of 1. scores: "edges": boundaries of the
    bins; "right", "wrong", "best_wrong": the counts of each bin.
    """
    edges, means = np.asarray(scores["edges"], dtype=float), []
    with _figure() as (figure, axes):
        for number, kind in enumerate(("right", "wrong", "best_wrong")):
            counts = np.asarray(scores[kind], dtype=float)
            total = max(counts.sum(), 1)
            filled = number < 2
            axes.stairs(counts / total, edges, fill=filled, color=LINES[number], alpha=0.3 if filled else 0.0)
            axes.stairs(counts / total, edges, color=LINES[number], linewidth=1.4, linestyle=DASHES[number])
            means.append(f"{kind.replace('_', ' ')} {((edges[1:] + edges[:-1]) / 2 * counts).sum() / total:.3g}")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("score")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return _svg(figure, f"Histogram of scores; means: {', '.join(means)}")


def confusion_matrix(confusion: Mapping[str, Any]) -> Markup:
    """Return the confusion matrix of a result as an <svg> element; the shade of a cell is its share of its row.

    A cell also shows its share in percent, if it is at least 0.5 % and there are at most NUMBERED classes. confusion:
    "classes": names; "counts": a row for each true class, a column for each predicted class.
    """
    shares = np.asarray(confusion["counts"], dtype=float)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    cells = np.empty((*shares.shape, 4))
    cells[..., :3], cells[..., 3] = FULL, shares
    size, labels = len(shares), [_label(label) for label in confusion["classes"]]
    font = 8 if size <= 12 else max(3.5, 8 * 15 / size)
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    turned: dict[str, Any] = slanted if size <= 12 else {"rotation": 90}
    with _figure(5.6, 3.9) as (figure, axes):
        axes.imshow(cells, interpolation="none", aspect="auto")
        axes.set_xticks(range(size), labels, fontsize=font, **turned)
        axes.set_yticks(range(size), labels, fontsize=font)
        axes.set_xlabel("answered")
        axes.set_ylabel("true")
        axes.tick_params(length=0)
        numbers: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": min(font, 110 / size)}
        for row, column in np.argwhere(shares >= 0.005) if size <= NUMBERED else []:
            share = shares[row, column]
            axes.text(column, row, f"{share * 100:.0f}", color=ON_FULL if share > LEGIBLE else INK, **numbers)
        return _svg(figure, f"Confusion of {size} classes; the numbers are in the lists beside it")


@contextmanager
def _figure(width: float = WIDTH, height: float = HEIGHT, layout: Any = "constrained") -> Iterator[tuple[Figure, Axes]]:
    """Context manager: yield a new figure and its axes, with the settings STYLE in effect within the block.

    width, height: in inches of 72 units. layout: Matplotlib's layout engine; None: none.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=72, layout=layout)
        yield figure, figure.add_subplot()


def _line(axes: Axes, series: Series, number: int) -> None:
    """Draw one line of a chart with the band around it. number: of its colour in LINES and dash pattern in DASHES.

    More than POINTS values are averaged in groups; if such a line has no band, the range of each group is drawn as its
    band.
    """
    steps, values = _averaged(series.steps, min), _averaged(series.values)
    colour = LINES[number]
    if series.band or len(series.steps) > POINTS:
        low, high = series.band or (series.values, series.values)
        alpha = 0.15 if series.band else 0.2
        axes.fill_between(steps, _averaged(low, min), _averaged(high, max), color=colour, alpha=alpha, linewidth=0)
    axes.plot(steps, values, color=colour, linestyle=DASHES[number % len(DASHES)], linewidth=1.4)
    if len(steps) <= 12:
        axes.plot(steps, values, "o", color=colour, markersize=2.5)


def _averaged(values: Sequence[float], how: Callable[[Any], Any] = np.mean) -> list[float]:
    """Return at most POINTS values: the values themselves, or `how` of each of POINTS parts of about equal size."""
    if len(values) <= POINTS:
        return list(values)
    cuts = np.linspace(0, len(values), POINTS + 1).astype(int).tolist()
    return [float(how(values[start:stop])) for start, stop in pairwise(cuts)]


def _label(text: str) -> str:
    """Shorten a class name for an axis to at most 20 characters; control characters become blanks."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= 20 else f"{shown[:19]}…"


def _count(value: float) -> str:
    """Format a step for an axis: 200, 2,500 or 20k; "" for a value below 10,000 that is no whole number."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:,.0f}" if value == round(value) else ""


def _svg(figure: Figure, description: str) -> Markup:
    """Convert a figure to an <svg> element.

    Its ids begin with a checksum, so that they differ from the ids of other figures on the page. description: a text
    for screen readers.
    """
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs that our font lacks: the browser has other fonts
        figure.savefig(file, format="svg")
    found = re.search(r'<svg[^>]* (viewBox="[^"]*")[^>]*>(.*)', file.getvalue(), re.DOTALL)
    assert found
    view, content = found.groups()
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    content = re.sub(r"\n\s*", "\n", content)
    content = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{crc32(content.encode())}-", content)
    for placeholder, variable in VARIABLES.items():
        content = content.replace(placeholder, f"var({variable})")
    return Markup(f'<svg {view} role="img" aria-label={quoteattr(description)}>{content}')

"""The charts of the HTML report: reads the metrics of a run, and chooses the lines and explanations of each chart.

A history is metric → step → value. plots.py draws the charts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dyad.eval.results.kinds import companion, headline, label
from dyad.eval.results.summary import Result, evaluator, finite, score

History = Mapping[str, Mapping[float, float]]  # metric → step → value, in the order of steps

# Starts of the names of training metrics that have a chart, or that other charts show as well
CHARTED = """loss accuracy_ logit_scale mi_ log_k positive_score negative_score grad_norm lr samples_per_second
data_time batch_time skipped uniformity_ effective_negatives participation log_z_ tau_
zeta_ peak_ tflops_ mfu copy_time outside_towers exposed_ launches""".split()


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    band: (lower values, upper values) of a band around the line, one for each step; empty for a line without a band.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Chart:
    """One chart: its lines and how they are drawn.

    note: a text that explains the chart. level: (name, value) of a horizontal line; no such line if the value is None.
    log: whether the y axis may be logarithmic. shows: values that the y axis always includes.
    """

    note: str
    series: Sequence[Series]
    level: tuple[str, float | None] = ("", None)
    log: bool = False
    shows: Sequence[float] = ()


Charts = dict[str, Chart]  # by title
SIDES = {  # task → what side x and side y are
    "image_text": ("picture", "text"),
    "question_passage": ("question", "passage"),
    "views": ("first view", "second view"),
    "labelled": ("sample", "class"),
    "sequence": ("context", "item"),
    "language_model": ("prompt", "answer"),
}


def read_history(records: Iterable[Mapping[str, Any]]) -> History:
    """Convert the lines of metrics.jsonl (`records`) to a history: metric → step → value, in the order of steps.

    Values that are not finite are left out.
    """
    found: dict[str, dict[float, float]] = {}
    at_step = [(step, record) for record in records if (step := finite(record.get("step"))) is not None]
    for step, record in sorted(at_step, key=lambda pair: pair[0]):
        for name, given in record.items():
            values = found.setdefault(name, {})
            if (value := finite(given)) is not None:
                values[step] = value
    return found


def last_value(history: History, name: str) -> float | None:
    """Return the last value of the metric `name` in a history (metric → step → value); None if it has no value."""
    return next(reversed(list(history.get(name, {}).values())), None)


# ---- charts ----------------------------------------------------------------------------------------------------------


def training_charts(options: Mapping[str, Any], history: History) -> Charts:
    """Make the charts of the training (loss, scores, speed, learning rate) by title; a chart without data is left out.

    options: the configuration of the run, dotted key → value, such as optim.lr. history: metric → step → value.
    """
    taus = {step: 1 / scale for step, scale in history.get("train/logit_scale", {}).items() if scale > 0}
    waited, whole = (history.get(f"train/{name}", {}) for name in ("data_time", "batch_time"))
    derived = {
        "train/temperature": taus if len(set(taus.values())) > 1 else {},  # else it is not learnt
        "train/waiting_percent": {s: 100 * waited[s] / whole[s] for s in waited if whole.get(s, 0) > 0},
    }
    clamp, clip_norm = (finite(options.get(key)) or None for key in ("objective.min_temperature", "optim.clip_norm"))
    chart, (x, y) = partial(_chart, {**history, **derived}), sides(options)
    charts = {
        "Loss": chart("Of the batch, at the logged steps.", {"": "loss"}),
        "Right in the batch": chart(
            "Share of pairs whose own partner scores highest among the first 1,024 of the batch.",
            {f"{x} → {y}": "accuracy_x", f"{y} → {x}": "accuracy_y"},
            shows=(0.0,),
        ),
        "Temperature": chart(
            "τ, by which scores are divided; the logit scale is 1/τ.", {"": "temperature"}, level=("clamp", clamp)
        ),
        "Bound on mutual information": chart(
            "In nats. It cannot pass log K, K the number of candidates: near that line it says little.",
            {"bound": "mi_bound"},
            level=("log K", last_value(history, "train/log_k")),
        ),
        "Scores": chart(
            "Mean score of right pairs and of wrong pairs: the distance between them is what is learnt.",
            {"right": "positive_score", "wrong": "negative_score"},
        ),
        "Gradient norm": chart(
            "Before clipping; spikes come before trouble.", {"": "grad_norm"}, level=("clipped at", clip_norm), log=True
        ),
        "Throughput": chart("Pairs a second, all devices.", {"": "samples_per_second"}, shows=(0.0,)),
        "Waiting for data": chart(
            "Percent of the time of a step spent waiting for the loader; near 0 is right.",
            {"": "waiting_percent"},
            shows=(0.0, 20.0),
        ),
        "Speed of the towers": chart(
            "TFLOP/s of a device: what forward and backward need, over the time of a whole step.",
            {"": "tflops_per_second_per_device"},
            shows=(0.0,),
        ),
        "Peak memory": chart(
            "GiB of one device: of its tensors since the last point; without a GPU of the process since its start.",
            {"": "peak_gpu_gib", "process": "peak_rss_gib"},
            shows=(0.0,),
        ),
        "Learning rate": chart("As scheduled.", {"": "lr"}, shows=(0.0,)),
    }
    return _drawable(charts)


def sides(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the words for side x and side y in the task of a run, such as question and passage."""
    return SIDES.get(str(options.get("task")), ("x", "y"))


def health_charts(options: Mapping[str, Any], history: History) -> Charts:
    """Make the charts of the embeddings and of the state of samples; return title → chart. A chart without data is left
    out. options: the configuration of the run, dotted key → value. history: metric → step → value.
    """
    chart, named = partial(_chart, history), dict(zip(sides(options), "xy", strict=True))
    charts = {
        "Spread of the embeddings": chart(
            "Uniformity: log mean e^(−2 d²) over pairs of one side. 0 is collapse, −4 about as even as it gets.",
            {word: f"uniformity_{side}" for word, side in named.items()},
            level=("collapse", 0.0),
        ),
        "Effective negatives": chart(
            "How many negatives an anchor's gradient really sees: e^entropy of their softmax, with the extremes.",
            {
                word: " ".join(f"effective_negatives_{of}{side}" for of in ("", "min_", "max_"))
                for word, side in named.items()
            },
            log=True,
        ),
        "Temperatures of samples": chart(
            "Median of τ_i in the batch, and where 80 % of them lie.", {"τ": "tau_p50 tau_p10 tau_p90"}
        ),
        "Weights of candidates": chart(
            "Median of ζ in the batch, and where 80 % of them lie.", {"ζ": "zeta_p50 zeta_p10 zeta_p90"}
        ),
    }
    return _drawable(charts)


def other_charts(options: Mapping[str, Any], history: History) -> Charts:
    """Make a chart for each training metric that no other chart of the report is made for, unless it is constant.

    Its name begins with none of the prefixes in CHARTED. Metrics of the two sides, NAME_x and NAME_y, share a chart. A
    chart without data is left out. options: the configuration of the run, dotted key → value.
    """
    words = dict(zip(("_x", "_y"), sides(options), strict=True))
    lines: dict[str, dict[str, str]] = {}  # title → label of a line → metric
    for metric, values in history.items():
        name = metric.removeprefix("train/")
        if name != metric and not name.startswith(tuple(CHARTED)) and len(set(values.values())) > 1:
            side = words.get(name[-2:], "")
            lines.setdefault((name[:-2] if side else name).replace("_", " "), {})[side] = name
    charts = {
        title: _chart(history, f"{', '.join(f'train/{name}' for name in metrics.values())} in metrics.jsonl.", metrics)
        for title, metrics in lines.items()
    }
    return _drawable(charts)


def evaluation_charts(history: History, results: Sequence[Result]) -> Charts:
    """Make a chart for each data set that was evaluated at least twice during training: name of the data set → chart.

    It shows the headline metric, a second metric, and the chance level of the headline metric (the score of a random
    ranking), which is read from `results`. history: metric → step → value.
    """
    result_of = {evaluator(result): result for result in results}
    charts = {}
    for prefix, metrics in evaluations(history).items():
        first = headline(metrics)
        shown = dict.fromkeys((first, companion(metrics) or first))
        lines = [_series(history, label(name), f"{prefix}/{name}") for name in shown]
        chance = score(result_of.get(prefix, {}), first).chance
        charts[prefix.removeprefix("eval/")] = Chart("Scored while training.", lines, ("chance", chance))
    return _drawable(charts)


def evaluations(history: History) -> dict[str, list[str]]:
    """Return the metrics that each evaluator logged in training: name of the evaluator (val or eval/NAME) → metric
    names.

    history: metric → step → value.
    """
    found: dict[str, list[str]] = {}
    for name in history:
        prefix, _, metric = name.rpartition("/")
        if prefix == "val" or prefix.startswith("eval/"):
            found.setdefault(prefix, []).append(metric)
    return found


def _chart(history: History, note: str, metrics: Mapping[str, str], **more: Any) -> Chart:
    """Make a chart of training metrics with the explanation `note`. history: metric → step → value. more: further
    fields of Chart.

    metrics: label of each line → metric names without "train/", separated by blanks: one name for the line, or three
    names for the line and the lower and the upper end of a band around it.
    """
    names_of = {label: [f"train/{name}" for name in names.split()] for label, names in metrics.items()}
    return Chart(note, [_series(history, label, *names) for label, names in names_of.items()], **more)


def _series(history: History, label: str, *names: str) -> Series:
    """Make one line of a chart from a history (metric → step → value). label: the name of the line.

    names: the metric that the line shows and, for a band around it, the metrics at the lower and the upper end of the
    band. Steps at which one of these metrics is missing are left out.
    """
    line, *band = (history.get(name, {}) for name in names)
    steps = [step for step in line if all(step in end for end in band)]
    return Series(label, steps, [line[step] for step in steps], [[end[step] for step in steps] for end in band])


def _drawable(charts: Charts) -> Charts:
    """Return the charts, by title, without lines of fewer than two points; a chart that has no line left is dropped."""
    shown = {title: [line for line in chart.series if len(line.steps) > 1] for title, chart in charts.items()}
    return {title: replace(charts[title], series=lines) for title, lines in shown.items() if lines}

"""The charts of the HTML report: read the metrics of a run, and choose the lines and explanations of each chart.

A history is a mapping metric → step → value. plots.py draws the charts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dyad.eval.results.kinds import companion, headline, label
from dyad.eval.results.summary import Result, evaluator_name, finite, score

History = Mapping[str, Mapping[float, float]]  # metric → step → value, in the order of steps

# Beginnings of the names of training metrics that have charts of their own; `other_charts` leaves these metrics out
CHARTED = """loss accuracy_ teacher_top1 distillation contrastive pair_correlation logit_scale mi_ log_k positive_score
negative_score grad_norm lr samples_per_second data_time batch_time skipped uniformity_ effective_negatives
participation log_z_ tau_ zeta_ peak_ tflops_ mfu copy_time outside_towers exposed_ launches""".split()


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    band: (lower values, upper values) of a band around the line, one for each step; empty for a line without a band.
    colour: the number of its colour; None: its place in the chart.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: Sequence[Sequence[float]] = ()
    colour: int | None = None


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


@dataclass(frozen=True)
class Plan:
    """A chart of training metrics for any run; `planned_charts` fills in the values of one run.

    note: a text that explains the chart. lines: label of each line → metric names without "train/", separated by
    blanks: one name for the line, or three names for the line and the lower and the upper end of a band around it.
    Each {x} and {y} in a label stands for the word for that side, such as image. level: name of a horizontal line:
    clamp, clipped at, log K or collapse; "": none. log, shows: as in Chart.
    """

    note: str
    lines: Mapping[str, str]
    level: str = ""
    log: bool = False
    shows: Sequence[float] = ()


# The charts of the training by title
TRAINING = {
    "Loss": Plan("Of the batch, at the logged steps.", {"": "loss"}),
    "Right in the batch": Plan(
        "Share of pairs whose own partner scores highest among the first 1,024 of the batch.",
        {"{x} → {y}": "accuracy_x", "{y} → {x}": "accuracy_y"},
        shows=(0.0,),
    ),
    "Best of the list": Plan(
        "Share of the batch's rows whose best passage is the teacher's best.", {"": "teacher_top1"}, shows=(0.0,)
    ),
    "Loss with a teacher": Plan(
        "The loss of the teacher's scores, and that of the whole batch beside it, before its weight.",
        {"teacher": "distillation", "whole batch": "contrastive"},
    ),
    "Correlation of the pairs": Plan(
        "Pearson's correlation of the scores of the batch's pairs with the given ones; 1 is best.",
        {"": "pair_correlation"},
        shows=(0.0, 1.0),
    ),
    "Temperature": Plan("τ, by which scores are divided; the logit scale is 1/τ.", {"": "temperature"}, level="clamp"),
    "Bound on mutual information": Plan(
        "In nats. It cannot pass log K, K the number of candidates: near that line it says little.",
        {"bound": "mi_bound"},
        level="log K",
    ),
    "Scores": Plan(
        "Mean score of right pairs and of wrong pairs: the distance between them is what is learnt.",
        {"right": "positive_score", "wrong": "negative_score"},
    ),
    "Gradient norm": Plan(
        "Before clipping; spikes come before trouble.", {"": "grad_norm"}, level="clipped at", log=True
    ),
    "Throughput": Plan("Pairs a second, all devices.", {"": "samples_per_second"}, shows=(0.0,)),
    "Waiting for data": Plan(
        "Percent of the time of a step spent waiting for the loader; near 0 is right.",
        {"": "waiting_percent"},
        shows=(0.0, 20.0),
    ),
    "Speed of the towers": Plan(
        "TFLOP/s of a device: what forward and backward need, without also.NAME and target, over the time of a step.",
        {"": "tflops_per_second_per_device"},
        shows=(0.0,),
    ),
    "Peak memory": Plan(
        "GiB of one device: of its tensors since the last point; without a GPU of the process since its start.",
        {"": "peak_gpu_gib", "process": "peak_rss_gib"},
        shows=(0.0,),
    ),
    "Learning rate": Plan("As scheduled.", {"": "lr"}, shows=(0.0,)),
}
# The charts of the embeddings and of the state of samples by title
HEALTH = {
    "Spread of the embeddings": Plan(
        "Uniformity: log mean e^(−2 d²) over pairs of one side. 0 is collapse, −4 about as even as it gets.",
        {"{x}": "uniformity_x", "{y}": "uniformity_y"},
        level="collapse",
    ),
    "Effective negatives": Plan(
        "How many negatives an anchor's gradient really sees: e^entropy of their softmax, with the extremes.",
        {
            f"{{{side}}}": " ".join(f"effective_negatives_{of}{side}" for of in ("", "min_", "max_"))
            for side in ("x", "y")
        },
        log=True,
    ),
    "Temperatures of samples": Plan(
        "Median of τ_i in the batch, and where 80 % of them lie.", {"τ": "tau_p50 tau_p10 tau_p90"}
    ),
    "Weights of candidates": Plan(
        "Median of ζ in the batch, and where 80 % of them lie.", {"ζ": "zeta_p50 zeta_p10 zeta_p90"}
    ),
}
# Metric that is computed for the charts → the logged metrics from which it is computed
DERIVED = {"temperature": ("logit_scale",), "waiting_percent": ("data_time", "batch_time")}
SIDES = {  # task → what side x and side y are
    "image_text": ("image", "text"),
    "question_passage": ("question", "passage"),
    "views": ("first view", "second view"),
    "labelled": ("sample", "class"),
    "sequence": ("context", "item"),
    "language_model": ("prompt", "answer"),
}


def read_history(records: Iterable[Mapping[str, Any]]) -> History:
    """Convert the lines of metrics.jsonl (`records`) to a history: metric → step → value, in the order of steps.

    Lines without a finite step, and values that are not finite, are left out. Of several values at one step the last
    counts.
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
    """Return the charts of the training (loss, scores, speed, learning rate) by title.

    Charts without a line of at least two points are left out. options: the configuration of the run, dotted key →
    value, such as optim.lr. history: metric → step → value.
    """
    taus = {step: 1 / scale for step, scale in history.get("train/logit_scale", {}).items() if scale > 0}
    waited, whole = (history.get(f"train/{name}", {}) for name in DERIVED["waiting_percent"])
    derived = {
        "train/temperature": taus if len(set(taus.values())) > 1 else {},  # a constant one is not learnt
        "train/waiting_percent": {s: 100 * waited[s] / whole[s] for s in waited if whole.get(s, 0) > 0},
    }
    return planned_charts(TRAINING, options, {**history, **derived})


def sides(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the words for side x and side y in the task of a run, such as question and passage.

    options: the configuration of the run, dotted key → value.
    """
    return SIDES.get(str(options.get("task")), ("x", "y"))


def other_charts(options: Mapping[str, Any], history: History) -> Charts:
    """Return a chart, by title, for each training metric whose name begins with none of the prefixes in CHARTED.

    Metrics of the two sides, NAME_x and NAME_y, share a chart. Constant metrics and charts without data are left out.
    options: the configuration of the run, dotted key → value. history: metric → step → value.
    """
    words: dict[str, str] = dict(zip(("_x", "_y"), sides(options), strict=True))
    lines: dict[str, dict[str, str]] = {}  # title → label of a line → metric
    for metric, values in history.items():
        name = metric.removeprefix("train/")
        if name != metric and not name.startswith(tuple(CHARTED)) and len(set(values.values())) > 1:
            side = words.get(name[-2:], "")
            lines.setdefault((name[:-2] if side else name).replace("_", " "), {})[side] = name
    charts = {
        title: Chart(
            f"{', '.join(f'train/{name}' for name in named.values())} in metrics.jsonl.", _lines(history, named)
        )
        for title, named in lines.items()
    }
    return _drawable(charts)


def evaluation_charts(history: History, results: Sequence[Result]) -> Charts:
    """Return name of the data set → chart, for each data set that was evaluated at least twice during training.

    A chart shows the headline metric, a second metric that COMPANIONS (eval/results/kinds.py) names, and the chance
    level of the headline metric (the score of a random ranking), which is read from `results`. history: metric → step →
    value.
    """
    result_of = {evaluator_name(result): result for result in results}
    charts = {}
    for prefix, metrics in evaluations(history).items():
        first = headline(metrics)
        shown = dict.fromkeys((first, companion(metrics) or first))
        lines = [_series(history, label(name), f"{prefix}/{name}") for name in shown]
        chance = score(result_of.get(prefix, {}), first).chance
        charts[prefix.removeprefix("eval/")] = Chart("Scored while training.", lines, ("chance", chance))
    return _drawable(charts)


def evaluations(history: History) -> dict[str, list[str]]:
    """Return the metrics that each evaluator logged in training: its name (val or eval/NAME) → metric names.

    history: metric → step → value.
    """
    found: dict[str, list[str]] = {}
    for name in history:
        prefix, _, metric = name.rpartition("/")
        if prefix == "val" or prefix.startswith("eval/"):
            found.setdefault(prefix, []).append(metric)
    return found


def planned_charts(plans: Mapping[str, Plan], options: Mapping[str, Any], history: History) -> Charts:
    """Return the charts, by title, of `plans`, filled with the metrics of a run.

    Charts without a line of at least two points are left out. options: the configuration of the run, dotted key →
    value. history: metric → step → value.
    """
    x, y = sides(options)
    levels = {
        "clamp": finite(options.get("objective.min_temperature")) or None,
        "clipped at": finite(options.get("optim.clip_norm")) or None,
        "log K": last_value(history, "train/log_k"),
        "collapse": 0.0,
    }
    charts = {}
    for title, plan in plans.items():
        named = {label.format(x=x, y=y): metrics for label, metrics in plan.lines.items()}
        level = (plan.level, levels.get(plan.level))
        charts[title] = Chart(plan.note, _lines(history, named), level, plan.log, plan.shows)
    return _drawable(charts)


def _lines(history: History, metrics: Mapping[str, str]) -> list[Series]:
    """Make the lines of a chart of training metrics from a history (metric → step → value).

    metrics: label of a line → its metric without train/; or three metrics, parted by spaces, for a line with a band.
    """
    return [_series(history, label, *(f"train/{n}" for n in names.split())) for label, names in metrics.items()]


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

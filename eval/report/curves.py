"""Charts of a run: columns of numbers from metrics.jsonl over the steps, and the charts drawn of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dyad.eval.results.kinds import companion, headline, label
from dyad.eval.results.summary import Result, evaluator, finite, score

Records = Sequence[Mapping[str, Any]]
Results = Sequence[Result]

# Starts of the names of training metrics that have a chart, or that other charts show as well
CHARTED = """loss accuracy_ logit_scale mi_ log_k positive_score negative_score grad_norm lr samples_per_second
data_time batch_time skipped uniformity_ alignment effective_negatives participation log_z_ staleness
share_never_visited gamma tau_ zeta_ weights_kl zero_weights""".split()


@dataclass(frozen=True)
class Series:
    """One line: values over steps, and the lower and upper values of a band around it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Chart:
    """One chart. note: how to read it. levels: horizontal lines by name. log: whether the y axis may be logarithmic.

    shows: values that the y axis reaches in any case.
    """

    title: str
    note: str
    series: Sequence[Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    shows: Sequence[float] = ()


def column(records: Records, name: str) -> dict[float, float]:
    """Step → value, in the order of steps, where the value is finite."""
    pairs = ((finite(record.get("step")), finite(record.get(name))) for record in records)
    found = {step: value for step, value in pairs if step is not None and value is not None}
    return dict(sorted(found.items()))


def option(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key in the configuration of a run of any age; `default` if it is missing or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


def waiting(records: Records) -> float | None:
    """The share of all step time that was spent waiting for data."""
    total = sum(column(records, "train/batch_time").values())
    return sum(column(records, "train/data_time").values()) / total if total > 0 else None


# ---- charts ----------------------------------------------------------------------------------------------------------


def training_charts(config: Mapping[str, Any], records: Records) -> list[Chart]:
    """The charts that every reader needs. A chart without numbers is left out."""
    chart = _charts_of(records)
    waited, whole = column(records, "train/data_time"), column(records, "train/batch_time")
    percent = {step: 100 * waited[step] / whole[step] for step in waited if whole.get(step, 0) > 0}
    ceiling = list(column(records, "train/log_k").values())
    clip_norm = finite(option(config, "optim.clip_norm"))
    charts = [
        chart("Loss", "Of the batch, at the logged steps.", {"": "loss"}),
        chart(
            "Right in the batch",
            "Share of pairs whose own partner scores highest among the first 1,024 of the batch.",
            {"x → y": "accuracy_x", "y → x": "accuracy_y"},
            shows=(0.0,),
        ),
        _temperature(config, records),
        chart(
            "Bound on mutual information",
            "In nats. It cannot pass log K, K the number of candidates: near that line it says little.",
            {"bound": "mi_bound"},
            levels={"log K": ceiling[-1]} if ceiling else {},
        ),
        chart(
            "Scores",
            "Mean score of right pairs and of wrong pairs: the distance between them is what is learnt.",
            {"right": "positive_score", "wrong": "negative_score"},
        ),
        chart(
            "Gradient norm",
            "Before clipping; spikes come before trouble.",
            {"": "grad_norm"},
            levels={"clipped at": clip_norm} if clip_norm else {},
            log=True,
        ),
        chart("Throughput", "Pairs a second, all devices.", {"": "samples_per_second"}, shows=(0.0,)),
        Chart(
            "Waiting for data",
            "Percent of the time of a step spent waiting for the loader; near 0 is right.",
            [_line("", percent)],
            shows=(0.0, 20.0),
        ),
        chart("Learning rate", "As scheduled.", {"": "lr"}, shows=(0.0,)),
    ]
    return _drawable(charts)


def health_charts(records: Records) -> list[Chart]:
    """Charts of the estimator of the loss. Metrics that no other chart shows come last, so that nothing is hidden."""
    chart = _charts_of(records)
    negatives = [
        _banded(records, side, *(f"effective_negatives{end}_{side}" for end in ("_min", "", "_max"))) for side in "xy"
    ]
    charts = [
        chart(
            "Spread of the embeddings",
            "Uniformity: log mean e^(−2 d²) over pairs of one side. 0 is collapse, −4 about as even as it gets.",
            {"x": "uniformity_x", "y": "uniformity_y"},
            levels={"collapse": 0.0},
        ),
        chart(
            "Distance of pairs",
            "Alignment: mean squared distance of the two sides of a pair, on the unit sphere.",
            {"": "alignment"},
        ),
        Chart(
            "Effective negatives",
            "How many negatives an anchor's gradient really sees: e^entropy of their softmax, with the extremes.",
            negatives,
            log=True,
        ),
        chart(
            "Staleness of u",
            "Mean |log u − log ĝ|: how far the running mean of a sample lags behind its batch.",
            {"": "staleness"},
        ),
        chart(
            "Samples never visited",
            "Share of the training samples whose u nothing has set yet.",
            {"": "share_never_visited"},
        ),
        chart("γ", "Share of the new batch in u, constant or as scheduled.", {"": "gamma"}),
        Chart(
            "Temperatures of samples",
            "Median of τ_i in the batch, and where 80 % of them lie.",
            [_banded(records, "τ", "tau_p10", "tau_p50", "tau_p90")],
        ),
        Chart(
            "Weights of candidates",
            "Median of ζ in the batch, and where 80 % of them lie.",
            [_banded(records, "ζ", "zeta_p10", "zeta_p50", "zeta_p90")],
        ),
        chart(
            "Robust weights",
            "KL of the weights of negatives from uniform ones, and the share that are 0.",
            {"KL": "weights_kl", "zero": "zero_weights"},
        ),
        *(
            chart(name.replace("_", " "), f"train/{name} in metrics.jsonl.", {"": name})
            for name in _without_chart(records)
        ),
    ]
    return _drawable(charts)


def evaluation_charts(records: Records, results: Results) -> list[Chart]:
    """One chart for each data set that was evaluated more than once: its headline, a companion metric, and chance."""
    scored = {evaluator(result): result for result in results}
    charts = []
    for prefix, metrics in evaluations(records).items():
        first = headline(metrics)
        names = dict.fromkeys(name for name in (first, companion(metrics)) if name)
        lines = [_line(label(name), column(records, f"{prefix}/{name}")) for name in names]
        chance = score(scored.get(prefix, {}), first).chance
        level = {} if chance is None else {"chance": chance}
        charts.append(Chart(prefix.removeprefix("eval/"), "Scored while training.", lines, level))
    return [chart for chart in charts if any(len(line.steps) > 1 for line in chart.series)]


def evaluations(records: Records) -> dict[str, list[str]]:
    """Name of each evaluator → its metrics that were logged during training."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for key in record:
            prefix, _, metric = key.rpartition("/")
            if prefix == "val" or prefix.startswith("eval/"):
                found.setdefault(prefix, {})[metric] = None
    return {prefix: list(metrics) for prefix, metrics in found.items()}


def _temperature(config: Mapping[str, Any], records: Records) -> Chart:
    """τ over the steps; empty if it is not learnt."""
    taus = {step: 1 / scale for step, scale in column(records, "train/logit_scale").items() if scale > 0}
    moves = len(set(taus.values())) > 1
    least = finite(option(config, "objective.min_temperature"))
    note = "τ, by which scores are divided; the logit scale is 1/τ."
    return Chart("Temperature", note, [_line("", taus)] if moves else [], {"clamp": least} if least and moves else {})


def _charts_of(records: Records) -> Callable[..., Chart]:
    """A function that makes a Chart from the names of training metrics: label → name."""

    def chart(title: str, note: str, names: Mapping[str, str], **more: Any) -> Chart:
        lines = [_line(label, column(records, f"train/{name}")) for label, name in names.items()]
        return Chart(title, note, lines, **more)

    return chart


def _line(label: str, found: Mapping[float, float]) -> Series:
    return Series(label, list(found), list(found.values()))


def _banded(records: Records, label: str, *names: str) -> Series:
    """A line with its band, at the steps that have all three numbers. names: lower end, line, upper end."""
    low, middle, high = (column(records, f"train/{name}") for name in names)
    steps = [step for step in middle if step in low and step in high]
    return Series(label, steps, [middle[s] for s in steps], ([low[s] for s in steps], [high[s] for s in steps]))


def _without_chart(records: Records) -> list[str]:
    """Training metrics that no chart shows, and that change."""
    names = dict.fromkeys(
        key.removeprefix("train/") for record in records for key in record if key.startswith("train/")
    )
    others = [name for name in names if not name.startswith(tuple(CHARTED))]
    return [name for name in others if len(set(column(records, f"train/{name}").values())) > 1]


def _drawable(charts: Iterable[Chart]) -> list[Chart]:
    """The charts without lines of fewer than two points; charts without lines are left out."""
    shown = [replace(chart, series=[line for line in chart.series if len(line.steps) > 1]) for chart in charts]
    return [chart for chart in shown if chart.series]

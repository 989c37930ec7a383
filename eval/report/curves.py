"""What metrics.jsonl tells over the steps of a run: columns of numbers, and the charts made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from train.tracking.headlines import (
    PICTURE_TO_TEXT,
    TEXT_TO_PICTURE,
    Result,
    evaluator,
    finite,
    headline,
    score,
    spoken,
)

Records = Sequence[Mapping[str, Any]]
Results = Sequence[Result]


@dataclass(frozen=True)
class Series:
    """One line: values over steps; band: lower and upper values around it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Chart:
    """levels: horizontal lines by what they are, e.g. a ceiling; note: how to read it; log: of the y axis.

    shows: values that the y axis reaches in any case.
    """

    title: str
    note: str
    series: Sequence[Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    shows: Sequence[float] = ()


def number(value: Any) -> str:
    """Three decimals for what is a share, whole numbers for counts and ranks, – for nothing."""
    found = finite(value)
    if found is None:
        return "–"
    if abs(found) > 1 and found == round(found):
        return f"{found:,.0f}"
    return f"{found:.1g}" if 0 < abs(found) < 0.0005 else f"{found:.3f}"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def column(records: Records, name: str) -> dict[float, float]:
    """Step → value, in the order of steps, where there is a finite value."""
    pairs = ((finite(record.get("step")), finite(record.get(name))) for record in records)
    found = {step: value for step, value in pairs if step is not None and value is not None}
    return dict(sorted(found.items()))


def option(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key, of runs of any age: `default` where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


# Charts ---------------------------------------------------------------------------------------------------------------


def training_charts(config: Mapping[str, Any], records: Records) -> list[Chart]:
    """What everybody looks at. A chart without numbers is left out."""
    charts = [
        Chart("Loss", "Of the batch, at the logged steps.", _lines(records, {"": "train/loss"})),
        Chart(
            "Right in the batch",
            "Share of pairs whose own partner scores highest among the first 1,024 of the batch.",
            _lines(records, {"x → y": "train/accuracy_x", "y → x": "train/accuracy_y"}),
            shows=(0.0,),
        ),
        _temperature(config, records),
        Chart(
            "Bound on mutual information",
            "In nats. It cannot pass log K, K the number of candidates: near that line it says little.",
            _lines(records, {"bound": "train/mi_bound"}),
            _level("log K", records, "train/log_k"),
        ),
        Chart(
            "Scores",
            "Mean score of right pairs and of wrong pairs: the distance between them is what is learnt.",
            _lines(records, {"right": "train/positive_score", "wrong": "train/negative_score"}),
        ),
        Chart(
            "Gradient norm",
            "Before clipping; spikes come before trouble.",
            _lines(records, {"": "train/grad_norm"}),
            {"clipped at": limit} if (limit := finite(option(config, "optim.clip_norm"))) else {},
            log=True,
        ),
        Chart(
            "Throughput",
            "Pairs a second, all devices.",
            _lines(records, {"": "train/samples_per_second"}),
            shows=(0.0,),
        ),
        Chart(
            "Waiting for data",
            "Percent of the time of a step spent waiting for the loader; near 0 is right.",
            [_line("", _waiting(records))],
            shows=(0.0, 20.0),
        ),
        Chart("Learning rate", "As scheduled.", _lines(records, {"": "train/lr"}), shows=(0.0,)),
    ]
    return _drawn(charts)


def health_charts(records: Records) -> list[Chart]:
    """How the estimator of the loss is doing; what nothing else shows comes last, so that nothing is hidden."""
    charts = [
        Chart(
            "Spread of the embeddings",
            "Uniformity: log mean e^(−2 d²) over pairs of one side. 0 is collapse, −4 about as even as it gets.",
            _lines(records, {"x": "train/uniformity_x", "y": "train/uniformity_y"}),
            {"collapse": 0.0},
        ),
        Chart(
            "Distance of pairs",
            "Alignment: mean squared distance of the two sides of a pair, on the unit sphere.",
            _lines(records, {"": "train/alignment"}),
        ),
        Chart(
            "Effective negatives",
            "How many negatives an anchor's gradient really sees: e^entropy of their softmax, with the extremes.",
            [s for side in "xy" for s in _banded(records, side, "train/effective_negatives", ("_min", "_max"), side)],
            log=True,
        ),
        Chart(
            "Staleness of u",
            "Mean |log u − log ĝ|: how far the running mean of a sample lags behind its batch.",
            _lines(records, {"": "train/staleness"}),
        ),
        Chart(
            "Samples never visited",
            "Share of the training samples whose u nothing has set yet.",
            _lines(records, {"": "train/share_never_visited"}),
        ),
        Chart("γ", "Share of the new batch in u, constant or as scheduled.", _lines(records, {"": "train/gamma"})),
        Chart(
            "Temperatures of samples",
            "Median of τ_i in the batch, and where 80 % of them lie.",
            _banded(records, "τ", "train/tau", ("_p10", "_p90"), middle="_p50"),
        ),
        Chart(
            "Weights of candidates",
            "Median of ζ in the batch, and where 80 % of them lie.",
            _banded(records, "ζ", "train/zeta", ("_p10", "_p90"), middle="_p50"),
        ),
        Chart(
            "Robust weights",
            "KL of the weights of negatives from uniform ones, and the share that are 0.",
            _lines(records, {"KL": "train/weights_kl", "zero": "train/zero_weights"}),
        ),
    ]
    return _drawn([*charts, *(_plain(records, name) for name in _others(records))])


def evaluation_charts(records: Records, results: Results) -> list[Chart]:
    """One for each data set that was evaluated more than once: its headline metric, and chance."""
    scored = {evaluator(result): result for result in results}
    charts = []
    for prefix, metrics in evaluations(records).items():
        first = headline(metrics)
        lines = _lines(records, {spoken(m): f"{prefix}/{m}" for m in (first, *_companions(first, metrics))})
        chance = score(scored.get(prefix, {}), first).chance
        level = {} if chance is None else {"chance": chance}
        charts.append(Chart(prefix.removeprefix("eval/"), "Scored while training.", lines, level))
    return [chart for chart in charts if any(len(line.steps) > 1 for line in chart.series)]


def evaluations(records: Records) -> dict[str, list[str]]:
    """Name of each evaluator → its metrics, as they were logged while training."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for key in record:
            prefix, _, metric = key.rpartition("/")
            if prefix == "val" or prefix.startswith("eval/"):
                found.setdefault(prefix, {})[metric] = None
    return {prefix: list(metrics) for prefix, metrics in found.items()}


def _companions(first: str, metrics: Sequence[str]) -> list[str]:
    """What is drawn beside the headline: the other direction, or one more metric."""
    wanted = (first.replace(PICTURE_TO_TEXT, TEXT_TO_PICTURE), "Recall@100", "mean_per_class_recall", "accuracy@100")
    return [name for name in wanted if name in metrics and name != first][:1]


def _temperature(config: Mapping[str, Any], records: Records) -> Chart:
    """τ over the steps; nothing when it does not learn."""
    scales = column(records, "train/logit_scale")
    taus = {step: 1 / scale for step, scale in scales.items() if scale > 0}
    moves = len(set(taus.values())) > 1
    least = finite(option(config, "objective.min_temperature"))
    note = "τ, by which scores are divided; the logit scale is 1/τ."
    return Chart("Temperature", note, [_line("", taus)] if moves else [], {"clamp": least} if least and moves else {})


def waiting(records: Records) -> float | None:
    """Share of all time that went by waiting for data."""
    waited, whole = column(records, "train/data_time"), column(records, "train/batch_time")
    total = sum(whole.values())
    return sum(waited.values()) / total if total > 0 else None


def _waiting(records: Records) -> dict[float, float]:
    waited, whole = column(records, "train/data_time"), column(records, "train/batch_time")
    return {step: 100 * waited[step] / whole[step] for step in waited if whole.get(step, 0) > 0}


def _lines(records: Records, names: Mapping[str, str]) -> list[Series]:
    return [_line(label, column(records, name)) for label, name in names.items()]


def _line(label: str, found: Mapping[float, float]) -> Series:
    return Series(label, list(found), list(found.values()))


def _banded(
    records: Records, label: str, name: str, ends: tuple[str, str], side: str = "", middle: str = ""
) -> list[Series]:
    """A line with its band, at the steps that have all three numbers."""
    end = f"_{side}" if side else ""
    low, mid, high = (column(records, f"{name}{part}{end}") for part in (ends[0], middle, ends[1]))
    steps = [step for step in mid if step in low and step in high]
    band = ([low[s] for s in steps], [high[s] for s in steps])
    return [Series(label, steps, [mid[s] for s in steps], band)]


def _plain(records: Records, name: str) -> Chart:
    title = name.removeprefix("train/").replace("_", " ")
    return Chart(title, f"{name} in metrics.jsonl.", _lines(records, {"": name}))


def _others(records: Records) -> list[str]:
    """Metrics of training that no chart above shows, and that move."""
    names = dict.fromkeys(key for record in records for key in record if key.startswith("train/"))
    known = tuple(f"train/{name}" for name in KNOWN)
    return [n for n in names if not n.startswith(known) and len(set(column(records, n).values())) > 1]


def _level(label: str, records: Records, name: str) -> dict[str, float]:
    values = list(column(records, name).values())
    return {label: values[-1]} if values else {}


def _drawn(charts: Iterable[Chart]) -> list[Chart]:
    """Those with at least two points in a line, without the lines that have none."""
    kept = []
    for chart in charts:
        series = [line for line in chart.series if len(line.steps) > 1]
        if series:
            kept.append(replace(chart, series=series))
    return kept


# Beginnings of the names that charts above show, or that other numbers there tell as well
KNOWN = """loss accuracy_ logit_scale mi_ log_k positive_score negative_score grad_norm lr samples_per_second data_time
batch_time skipped uniformity_ alignment effective_negatives participation log_z_ staleness share_never_visited gamma
tau_ zeta_ weights_kl zero_weights""".split()

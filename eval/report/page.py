"""The report page of a run: its facts, texts and numbers, filled into templates/report.html.j2."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.data.base.secrets import public_path
from dyad.data.shards.licences import Notice, notices
from dyad.eval.report import plots
from dyad.eval.report.curves import Charts, evaluation_charts, health_charts, last_value, option, training_charts
from dyad.eval.report.gallery import KINDS, View, briefly, cases
from dyad.eval.report.health_checks import health_checks
from dyad.eval.report.run_folder import RunFolder
from dyad.eval.results.kinds import Number, groups, headline, label, meanings
from dyad.eval.results.summary import SYSTEMS, Result, classes, confusions, finite, number, part, score
from dyad.train.config import TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import all_keys, by_section, flat

FIRST = 8  # data sets that have more than their numbers on the page
GALLERIES = 3_000_000  # bytes of all cases; every other part of the page has a bound of its own
CHARTS = 24
NOTICE, CONFIG = 12_000, 40_000  # characters of a notice, and of the configuration
WORST, CONFUSED = 10, 8  # classes, and pairs of classes, that are listed
TRUTHS = {"keys": "right is what has equal content", "pairs": "right is the own pair"}
# Keys that say what a run is: shown also at their defaults
ALWAYS = """model.name model.image.kind model.image.name model.text.kind model.text.name precision
objective.similarity objective.temperature optim.lr optim.warmup optim.schedule""".split()
# Keys that are facts of their own
SHOWN = "task seed steps init_from experiment global_batch_size objective.name".split()


def render(run: RunFolder) -> str:
    """The page as HTML, of at most 5 MB for any run."""
    results = sorted(run.results, key=lambda result: result["dataset"] != "val")
    parts = _Parts(run)
    status, status_line = _status(run)
    return parts.environment.get_template("report.html.j2").render(
        name=run.path.resolve().name,
        place=shlex.quote(public_path(str(run.path))),
        summary=_summary(run),
        facts=_facts(run),
        status=status,
        status_line=status_line,
        unread=run.unread,
        glance=parts.glance(results),
        more=max(0, len(results) - FIRST),
        checks=health_checks(run.config, run.history, results),
        sets=[parts.data_set(position, result) for position, result in enumerate(results)],
        over_training=parts.charts(evaluation_charts(run.history, results)),
        training=parts.charts(training_charts(run.config, run.history)),
        health=parts.charts(health_charts(run.history)),
        resumed_at=run.resumed_at,
        notices=[(public_path(notice.file), notice.text[:NOTICE]) for notice in _notices(run)],
        config=OmegaConf.to_yaml(run.config)[:CONFIG],
        headings=KINDS,
    )


class _Parts:
    """Makes the parts of a page. Each figure has a name of its own; all galleries together have GALLERIES bytes."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._bytes_left = run, GALLERIES
        self._names = (f"figure-{number}" for number in count(1))
        self.environment = Environment(
            loader=FileSystemLoader(Path(__file__).with_name("templates")),
            autoescape=True,  # captions, names and notices are written by others
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.filters |= {"number": number, "exact": exact}

    def charts(self, charts: Charts) -> list[tuple[str, Any, Markup]]:
        """(title, chart, SVG) of the first CHARTS charts."""
        return [
            (title, chart, plots.line_chart(title, chart, next(self._names), self._run.resumed_at))
            for title, chart in list(charts.items())[:CHARTS]
        ]

    def data_set(self, position: int, result: Result) -> dict[str, Any]:
        """One result. left_out: what has no room on the page. headline: of the first data sets, with the baselines."""
        whole, shown, metric = position < FIRST, groups(result), headline(result["metrics"])
        baselines = {SYSTEMS.get(name, name): score(of, metric) for name, of in part(result, "baselines").items()}
        mistakes = [(true, answer, times) for true, answer, times in confusions(result) if true != answer and times]
        galleries, left_out = self._galleries(result) if whole else ({}, "Histogram, matrix and cases")
        scores, confusion = (part(result, name) if whole else {} for name in ("scores", "confusion"))
        return {
            "name": result["dataset"],
            "anchor": f"set-{position}",
            "headline": Number(label(metric), *score(result, metric)) if whole and metric else None,
            "against": ", ".join(f"{name} {number(found.value)}" for name, found in baselines.items()),
            "source": result.get("source") or "",
            "sizes": _sizes(result),
            "groups": shown,
            "meanings": meanings(shown),
            "worst": classes(result)[:WORST],
            "confused": sorted(mistakes, key=lambda mistake: -mistake[2])[:CONFUSED],
            "histogram": scores and plots.score_histogram(scores, next(self._names)),
            "confusion": confusion and plots.confusion_matrix(confusion, next(self._names)),
            "galleries": galleries,
            "left_out": left_out,
        }

    def _galleries(self, result: Result) -> tuple[dict[str, dict[str, list[Markup]]], str]:
        """(title → kind → cases as HTML, what is left out because the page would be too large)."""
        found: dict[str, dict[str, list[Markup]]] = {}
        left_out = 0
        for dataset, title, listed in _pictures_first([result]):
            for kind, case in cases(listed, self._run.path, dataset):
                html = self._case(case)
                size = len(html.encode("utf-8", "replace"))
                if size <= self._bytes_left:
                    self._bytes_left -= size
                    found.setdefault(title, {}).setdefault(kind, []).append(html)
                else:
                    left_out += 1
        return found, f"{left_out} more cases" if left_out else ""

    def glance(self, results: Sequence[Result]) -> list[Markup]:
        """Random cases of the first gallery with the answers of this run, as many as fit beside the numbers."""
        for dataset, _, listed in _pictures_first(results):
            if drawn := [case for kind, case in cases(listed, self._run.path, dataset) if kind == "random"]:
                return [self._case(briefly(case), glance=True) for case in drawn[: 2 if len(results) < 3 else 4]]
        return []

    def _case(self, case: View, glance: bool = False) -> Markup:
        return Markup(self.environment.get_template("case.html.j2").render(case=case, glance=glance))


def _pictures_first(results: Sequence[Result]) -> list[tuple[str, str, Any]]:
    """(data set, title, cases) of each gallery; galleries with pictures as answers come first."""
    found = [(result["dataset"], *gallery) for result in results for gallery in part(result, "gallery").items()]
    return sorted(found, key=lambda gallery: not gallery[1].endswith("pictures"))


def _notices(run: RunFolder) -> list[Notice]:
    """Notices beside the data of the run; none if a value of another version cannot be read."""
    keys = ("data.train", "data.val", "data.passage.corpus", "eval.suite")
    sources = [value for key in keys for value in _list(option(run.config, key)) if isinstance(value, str)]
    try:
        return notices([*sources, *(result["source"] for result in run.results if result.get("source"))])
    except ConfigError:
        return []


def exact(value: float | None) -> str:
    """A number with all its digits, as the JSON has it."""
    return "" if value is None else repr(float(value))


# ---- what was trained ------------------------------------------------------------------------------------------------


def _summary(run: RunFolder) -> str:
    """One sentence: what was trained, on which data, for how long."""
    config = run.config
    sides = "questions and passages" if option(config, "task") == "question_passage" else "pictures and texts"
    size, seconds = finite(option(config, "global_batch_size")) or 0, _trained_seconds(run)
    return (
        f"A dual encoder of {sides}, trained on {_where(option(config, 'data.train'))} with the objective "
        f"{option(config, 'objective.name', '?')}: {run.step:,} steps of {size:,.0f} pairs"
        f"{f' in {_duration(seconds)}' if seconds else ''}."
    )


def _facts(run: RunFolder) -> dict[str, str]:
    """Name → value of what a reader needs first."""
    config, history, changed = run.config, run.history, _changed(run.config)
    seconds, size = _trained_seconds(run), finite(option(config, "global_batch_size")) or 0
    timed_steps = max(history.get("train/batch_time", {}), default=0)
    speed = f", {timed_steps * size / seconds:,.0f} pairs a second" if seconds and size else ""
    rate, rate_of_each = (last_value(history, f"train/samples_per_second{of}") for of in ("", "_per_device"))
    steps, total = f"{run.step:,}", run.state.get("total_steps")
    found = {
        "model": changed.get("model", ""),
        "objective": ": ".join(filter(None, (option(config, "objective.name", ""), changed.get("objective")))),
        "trained on": _written(option(config, "data.train")),
        "evaluated on": _written([*_list(option(config, "data.val")), *_list(option(config, "eval.suite"))]),
        "began with": public_path(_written(option(config, "init_from"))),
        "steps": steps if total is None else f"{steps} of {total:,}",
        "batch": f"{size:,.0f} pairs over all processes",
        "training": changed.get("training", ""),
        "optimiser": ": ".join(filter(None, ("AdamW", changed.get("optim")))),
        "time": f"{_duration(seconds)} in steps{speed}" if seconds else "",
        "processes": f"{rate / rate_of_each:.0f}" if rate and rate_of_each else "",
        "went on": "at step " + ", ".join(f"{step:,}" for step in run.resumed_at) if run.resumed_at else "",
        "seed": _written(option(config, "seed")),
    }
    return {name: value for name, value in found.items() if value}


def _status(run: RunFolder) -> tuple[str, str]:
    """(the status of the run, one line about it)."""
    state = run.state
    status = state.get("status") or "unknown"
    lines = {
        "finished": "Finished",
        "running": f"Not finished: running, or cut off, when run_state.json was written at {state.get('time', '?')}",
        "preempted": f"Stopped on request at step {run.step:,}; the same command goes on",
        "failed": f"Failed at step {run.step:,}: {state.get('error', 'no reason is known')}",
    }
    return status, lines.get(status, "How it ended is not known: run_state.json is missing or of another version")


def _trained_seconds(run: RunFolder) -> float:
    """Seconds spent in steps, over all starts: each logged mean step time, times the steps since the last record."""
    times = run.history.get("train/batch_time", {})
    return sum((step - before) * times[step] for before, step in pairwise([0.0, *times]))


def _changed(config: Mapping[str, Any]) -> dict[str, str]:
    """Section → "key=value, …" of the keys of ALWAYS and those that differ from the defaults."""
    name = option(config, "objective.name", "")
    usual = all_keys(TrainConfig)
    if name in OBJECTIVES:
        usual |= {f"objective.{key}": value for key, value in all_keys(OBJECTIVES[name].options).items()}
    idle = ("model.image.", "model.name") if option(config, "task") == "question_passage" else ()
    always = {key for key in ALWAYS if not key.startswith(idle) and option(config, key) is not None}
    return by_section({k: v for k, v in flat(config).items() if k not in SHOWN and (k in always or v != usual.get(k))})


def _duration(seconds: float) -> str:
    """2 h 3 min, 4 min 10 s, 9 s."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{amount:,} {unit}" for amount, unit in parts if amount) or "less than a second"


def _written(value: Any) -> str:
    """A value of a configuration, or several, as a person writes it."""
    return ", ".join(map(str, _list(value)))


def _where(value: Any) -> str:
    """The place of the data in a word or two: of a list of shards, their folder."""
    sources = list(map(str, _list(value)))
    if len(sources) != 1 or "::" in sources[0]:
        return f"{len(sources)} sources" if sources else "data unknown"
    plain = re.split(r"[{*?[]", sources[0])[0]
    return plain if plain == sources[0] else plain.rpartition("/")[0] or plain


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# ---- what came of it -------------------------------------------------------------------------------------------------


def _sizes(result: Result) -> str:
    """How much was evaluated, from the metrics that are counts."""
    counts = {name.removeprefix("num_"): v for name, v in result["metrics"].items() if name.startswith("num_")}
    words = {"images": "pictures", "samples": "pictures"}
    sizes = [f"{value:,.0f} {words.get(k, k)}" for k, v in counts.items() if (value := finite(v)) is not None]
    step = f"weights of step {result['step']:,}" if isinstance(result.get("step"), int) else ""
    return ", ".join(filter(None, (*sizes, TRUTHS.get(result.get("truth") or "", ""), step)))

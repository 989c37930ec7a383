"""The texts and numbers of the report page as plain values for its template. Numbers are chosen and named, not made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dyad.data.base.secrets import public_path
from dyad.eval.report.curves import column, option
from dyad.eval.report.run_folder import RunFolder
from dyad.eval.results.kinds import Number, headline, label
from dyad.eval.results.summary import SYSTEMS, Result, confusions, finite, number, score, systems
from dyad.train.config import TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import all_keys, by_section, flat

FIRST = 8  # data sets that have more than their numbers on the page
TRUTHS = {"keys": "right is what has equal content", "pairs": "right is the own pair"}
# Keys that say what a run is: shown also at their defaults
ALWAYS = (
    *("model.name", "model.image.kind", "model.image.name", "model.text.kind", "model.text.name", "precision"),
    *("objective.similarity", "objective.temperature", "optim.lr", "optim.warmup", "optim.schedule"),
)
SHOWN = (
    "task",
    "seed",
    "steps",
    "init_from",
    "experiment",
    "global_batch_size",
    "objective.name",
)  # as facts of their own
WORST, CONFUSED = 10, 8  # classes, and pairs of classes, that are listed


@dataclass(frozen=True)
class Card:
    """The headline of a data set. anchor: of its section. against: the scores of the baselines, in words."""

    dataset: str
    anchor: str
    number: Number
    against: str


# ---- what was trained ------------------------------------------------------------------------------------------------


def summary(run: RunFolder) -> str:
    """One sentence: what was trained, on which data, for how long."""
    config = run.config
    sides = "questions and passages" if option(config, "task") == "question_passage" else "pictures and texts"
    size = option(config, "global_batch_size", 0)
    time = f" in {_duration(seconds)}" if (seconds := trained_seconds(run)) else ""
    return (
        f"A dual encoder of {sides}, trained on {_where(option(config, 'data.train'))} with the objective "
        f"{option(config, 'objective.name', '?')}: {run.step:,} steps of {size:,} pairs{time}."
    )


def facts(run: RunFolder) -> dict[str, str]:
    """Name → value of what a reader needs first."""
    config = run.config
    seconds, rate = trained_seconds(run), _rate(run)
    speed, changed = f", {rate:,.0f} pairs a second" if rate else "", _changed(config)
    objective = (option(config, "objective.name", ""), changed.get("objective", ""))
    found = {
        "model": changed.get("model", ""),
        "objective": ": ".join(word for word in objective if word),
        "trained on": _written(option(config, "data.train")),
        "evaluated on": _written([*_list(option(config, "data.val")), *_list(option(config, "eval.suite"))]),
        "began with": public_path(_written(option(config, "init_from"))),
        "steps": f"{run.step:,} of {run.state['total_steps']:,}" if "total_steps" in run.state else f"{run.step:,}",
        "batch": f"{option(config, 'global_batch_size', 0):,} pairs over all processes",
        "training": changed.get("training", ""),
        "optimiser": ": ".join(["AdamW", *([changed["optim"]] if "optim" in changed else [])]),
        "time": f"{_duration(seconds)} in steps{speed}" if seconds else "",
        "processes": _processes(run),
        "went on": _resumed(run),
        "seed": str(option(config, "seed", "")),
    }
    return {name: value for name, value in found.items() if value}


def status(run: RunFolder) -> tuple[str, str]:
    """(the status of the run, one line about it)."""
    state = run.state
    word = str(state.get("status") or "unknown")
    lines = {
        "finished": "Finished",
        "running": f"Not finished: running, or cut off, when run_state.json was written at {state.get('time', '?')}",
        "preempted": f"Stopped on request at step {run.step:,}; the same command goes on",
        "failed": f"Failed at step {run.step:,}: {state.get('error', 'no reason is known')}",
    }
    return word, lines.get(word, "How it ended is not known: run_state.json is missing or of another version")


def trained_seconds(run: RunFolder) -> float:
    """Seconds spent in steps, over all starts: each logged mean step time, times the steps since the last record."""
    times = column(run.records, "train/batch_time")
    steps = [0.0, *times]
    return sum((step - before) * times[step] for before, step in zip(steps[:-1], times, strict=True))


def _changed(config: Mapping[str, Any]) -> dict[str, str]:
    """Section → "key=value, …" of the keys of ALWAYS and those that differ from the defaults."""
    name = option(config, "objective.name")
    usual = all_keys(TrainConfig)
    if name in OBJECTIVES:
        usual |= {f"objective.{key}": value for key, value in all_keys(OBJECTIVES[name]).items()}
    idle = ("model.image.", "model.name") if option(config, "task") == "question_passage" else ()
    always = {key for key in ALWAYS if not key.startswith(idle) and option(config, key) is not None}
    keys = {k: v for k, v in flat(config).items() if k not in SHOWN and (k in always or v != usual.get(k))}
    return by_section(keys)


def _processes(run: RunFolder) -> str:
    rates, each = (
        list(column(run.records, f"train/{name}").values())
        for name in ("samples_per_second", "samples_per_second_per_device")
    )
    return f"{rates[-1] / each[-1]:.0f}" if rates and each and each[-1] else ""


def _rate(run: RunFolder) -> float:
    seconds = trained_seconds(run)
    size = option(run.config, "global_batch_size", 0)
    last = max(column(run.records, "train/batch_time"), default=0)
    return last * size / seconds if seconds else 0.0


def _resumed(run: RunFolder) -> str:
    return "at step " + ", ".join(f"{step:,}" for step in run.gone_on) if run.gone_on else ""


def _duration(seconds: float) -> str:
    """2 h 3 min, 4 min 10 s, 9 s."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{count:,} {unit}" for count, unit in parts if count) or "less than a second"


def _written(value: Any) -> str:
    """A value of a configuration as a person writes it."""
    if isinstance(value, list | tuple):
        return ", ".join(_written(v) for v in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _where(value: Any) -> str:
    """The place of the data in a word or two: of a list of shards, their folder."""
    written = [str(v) for v in _list(value)]
    if len(written) != 1 or "::" in written[0]:
        return f"{len(written)} sources" if written else "data unknown"
    plain = re.split(r"[{*?[]", written[0])[0]
    return plain if plain == written[0] else plain.rpartition("/")[0] or plain


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# ---- what came of it -------------------------------------------------------------------------------------------------


def cards(results: Sequence[Result]) -> list[Card]:
    """The headline of each data set, of the first few."""
    found = []
    for number_of_set, result in enumerate(results[:FIRST]):
        if metric := headline(result["metrics"]):
            shown = Number(label(metric), *score(result, metric))
            _, *others = ((SYSTEMS.get(name, name), score(of, metric).value) for name, of in systems(result).items())
            words = ", ".join(f"{name} {number(value)}" for name, value in others)
            found.append(Card(str(result["dataset"]), f"set-{number_of_set}", shown, words))
    return found


def sizes(result: Result) -> str:
    """How much was evaluated, from the metrics that are counts."""
    counts = {k.removeprefix("num_"): v for k, v in result["metrics"].items() if k.startswith("num_")}
    words = {"images": "pictures", "samples": "pictures"}
    said = [f"{value:,.0f} {words.get(k, k)}" for k, v in counts.items() if (value := finite(v)) is not None]
    step = f"weights of step {result['step']:,}" if isinstance(result.get("step"), int) else ""
    truth = TRUTHS.get(str(result.get("truth")), "")
    return ", ".join(word for word in (*said, truth, step) if word)


def confused_pairs(result: Result) -> list[tuple[str, str, int]]:
    """(true class, answered class, pictures), the most frequent mistakes first."""
    mistakes = [(true, answer, count) for true, answer, count in confusions(result) if true != answer and count]
    return sorted(mistakes, key=lambda mistake: -mistake[2])[:CONFUSED]

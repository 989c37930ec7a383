"""What the report says of a run, as plain values for its template: no number is made up here, only chosen and named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from data.secrets import public_path
from eval.report.curves import column, number, option, signed
from eval.report.gallery import SYSTEMS
from eval.report.run_folder import RunFolder
from train.losses import OBJECTIVES
from train.tracking.headlines import (
    PASSAGE_METRICS,
    PICTURE_TO_TEXT,
    TEXT_TO_PICTURE,
    Result,
    Score,
    answers_by_class,
    finite,
    headline,
    lead,
    score,
    spoken,
    systems,
)

FIRST = 8  # data sets that have more than their numbers on the page
TRUTHS = {"keys": "right is what has equal content", "pairs": "right is the own pair"}
BATCH_NORMS = {
    "per_chunk": "; batch norms with the statistics of each chunk on each process",
    "frozen": "; batch norms with their running statistics",
}
WORST, CONFUSED = 10, 8  # classes, and pairs of classes, that are listed
MEANINGS = {
    "R@": "R@K: share of queries with a right answer among the first K.",
    "median rank": "Median rank: of the first right answer; 1 is best.",
    "top-": "Top-K accuracy: share of pictures whose class is among the first K.",
    "mean per class recall": "Mean per class recall: top-1 accuracy with every class counted alike.",
    "nDCG": "nDCG@10: order of the first ten passages against the best possible one; 1 is best.",
    "Recall@": "Recall@K: share of the right passages that are among the first K.",
    "MRR": "MRR@10: mean of 1 / rank of the first right passage, 0 beyond ten.",
    "Success": "Success@K: share of questions with a right passage among the first K.",
    "accuracy@": "accuracy@K: share of questions with the answer in one of the first K passages.",
}


@dataclass(frozen=True)
class Number:
    """A metric: its interval at 95 %, what chance scores, and by how much the model is ahead of this baseline.

    other: not the score of this run.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    ahead: str = ""
    ahead_interval: str = ""
    other: bool = False

    @property
    def is_share(self) -> bool:
        """Whether it lies in 0 … 1, as a bar needs."""
        return self.value is not None and 0 <= self.value <= 1 and not self.label.endswith("rank")

    @property
    def style(self) -> str:
        """Places on a bar, for the style sheet."""
        places = {"v": self.value, "low": self.low, "high": self.high, "chance": self.chance}
        kept = {name: min(max(place, 0.0), 1.0) for name, place in places.items() if place is not None}
        return ";".join(f"--{name}:{100 * place:.2f}%" for name, place in kept.items())


@dataclass(frozen=True)
class Group:
    title: str
    numbers: Sequence[Number]


@dataclass(frozen=True)
class Card:
    dataset: str
    anchor: str
    number: Number
    against: str


# What was trained -----------------------------------------------------------------------------------------------------


def summary(run: RunFolder) -> str:
    """One sentence: what was trained on what, for how long."""
    config = run.config
    sides = "questions and passages" if option(config, "task") == "question_passage" else "pictures and texts"
    size = option(config, "global_batch_size", 0)
    time = f" in {_duration(seconds)}" if (seconds := trained_seconds(run)) else ""
    return (
        f"A dual encoder of {sides}, trained on {_place(option(config, 'data.train'))} with the objective "
        f"{option(config, 'objective.name', '?')}: {run.step:,} steps of {size:,} pairs{time}."
    )


def facts(run: RunFolder) -> dict[str, str]:
    """Name → value, of what somebody else needs to know first."""
    config = run.config
    seconds, rate = trained_seconds(run), _rate(run)
    speed = f", {rate:,.0f} pairs a second" if rate else ""
    found = {
        "model": _model(config),
        "objective": _objective(config),
        "trained on": _written(option(config, "data.train")),
        "evaluated on": _written([*_list(option(config, "data.val")), *_list(option(config, "eval.suite"))]),
        "began with": public_path(_written(option(config, "init_from"))),
        "steps": f"{run.step:,} of {run.state['total_steps']:,}" if "total_steps" in run.state else f"{run.step:,}",
        "batch": _batch(config),
        "optimiser": _optimiser(config),
        "time": f"{_duration(seconds)} in steps{speed}" if seconds else "",
        "processes": _processes(run),
        "went on": _resumed(run),
        "seed": str(option(config, "seed", "")),
    }
    return {name: value for name, value in found.items() if value}


def status(run: RunFolder) -> tuple[str, str]:
    """("finished" …, a line about it)."""
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
    """Time in steps, of all starts: the logged means of a step's time, each for the steps since the one before."""
    times = column(run.records, "train/batch_time")
    steps = [0.0, *times]
    return sum((step - before) * times[step] for before, step in zip(steps[:-1], times, strict=True))


def _model(config: Mapping[str, Any]) -> str:
    text = _tower(config, "text")
    if option(config, "task") == "question_passage":
        shared = "one encoder for both" if option(config, "model.shared", True) else "two encoders with one start"
        return f"{text}; {shared}"
    return f"pictures: {_tower(config, 'image')}; texts: {text}"


def _tower(config: Mapping[str, Any], which: str) -> str:
    """Name and what is special about a tower."""

    def of(key: str, default: Any = None) -> Any:
        return option(config, f"model.{which}.{key}", default)

    kind = of("kind", "")
    name = of("name") or (option(config, "model.name") if kind != "cnn" else None) or kind
    pretrained = of("pretrained") or (option(config, "model.pretrained") if kind == "open_clip" else None)
    said = {
        f"{kind}": kind and kind not in str(name),
        f"channels {'-'.join(map(str, of('widths', [])))}": kind == "cnn",
        f"{of('image_size')} pixels": of("image_size"),
        f"weights {pretrained}": pretrained,
        f"{of('pooling')} pooling": kind == "transformers" and which == "text" and of("pooling"),
        "from scratch": of("from_scratch") or kind == "cnn",
        "frozen but for its projection": of("frozen") and not (of("unlocked_groups") or of("unlocked_layers")),
        "partly frozen": of("frozen") and (of("unlocked_groups") or of("unlocked_layers")),
        f"LoRA of rank {of('lora_rank')}": of("lora_rank"),
    }
    words = ", ".join(word for word, true in said.items() if true)
    return f"{name} ({words})" if words else str(name)


def _objective(config: Mapping[str, Any]) -> str:
    """Its name, its score and temperature, and what else is not as it is by default."""
    options = option(config, "objective", {})
    name = options.get("name", "?")
    usual = {f.name: f.default for f in fields(OBJECTIVES[name].options)} if name in OBJECTIVES else {}
    learnt = {True: " (learnt)", False: " (fixed)"}.get(options.get("learnable"), "")
    said = [_written(options.get("similarity"))]
    said += [f"temperature {_written(options['temperature'])}{learnt}"] if "temperature" in options else []
    for key, value in options.items():
        default = usual.get(key)
        if key not in ("name", "similarity", "temperature", "learnable") and value != getattr(default, "name", default):
            said.append(f"{key} {_written(value)}")
    return f"{name}: {', '.join(word for word in said if word)}" if options else ""


def _batch(config: Mapping[str, Any]) -> str:
    chunk, precision = option(config, "chunk_size"), option(config, "precision")
    more = f", {chunk:,} a rank embedded at a time" if isinstance(chunk, int) else ""
    norm = BATCH_NORMS.get(str(option(config, "model.batch_norm")), "")
    return f"{option(config, 'global_batch_size', 0):,} pairs over all processes{more}, {precision}{norm}"


def _optimiser(config: Mapping[str, Any]) -> str:
    of = option(config, "optim", {})
    clip = f", clipped at {of['clip_norm']}" if of.get("clip_norm") else ""
    lr, warmup, schedule = (of.get(key, "?") for key in ("lr", "warmup", "schedule"))
    return f"AdamW, peak lr {lr}, warm-up {warmup} steps, {schedule}{clip}" if of else ""


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


def _place(value: Any) -> str:
    """Where data lie, in a word or two: the folder of a list of shards."""
    written = [str(v) for v in _list(value)]
    if len(written) != 1 or "::" in written[0]:
        return f"{len(written)} sources" if written else "data unknown"
    plain = re.split(r"[{*?[]", written[0])[0]
    return plain if plain == written[0] else plain.rpartition("/")[0] or plain


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# What came of it ------------------------------------------------------------------------------------------------------


def cards(results: Sequence[Result]) -> list[Card]:
    """The headline of each data set, of the first few."""
    found = []
    for place, result in enumerate(results[:FIRST]):
        if metric := headline(result["metrics"]):
            shown = Number(spoken(metric), *score(result, metric))
            _, *others = ((_system(name), score(of, metric).value) for name, of in systems(result).items())
            words = ", ".join(f"{name} {number(value)}" for name, value in others)
            found.append(Card(str(result["dataset"]), f"set-{place}", shown, words))
    return found


def groups(result: Result) -> list[Group]:
    """The numbers of a data set, in the order in which they are read."""
    return list(_GROUPS.get(result["task"], _everything)(result))


def sizes(result: Result) -> str:
    """How much was evaluated, from the metrics that are counts."""
    counts = {k.removeprefix("num_"): v for k, v in result["metrics"].items() if k.startswith("num_")}
    words = {"images": "pictures", "samples": "pictures"}
    said = [f"{value:,.0f} {words.get(k, k)}" for k, v in counts.items() if (value := finite(v)) is not None]
    step = f"weights of step {result['step']:,}" if isinstance(result.get("step"), int) else ""
    truth = TRUTHS.get(str(result.get("truth")), "")
    return ", ".join(word for word in (*said, truth, step) if word)


def meanings(shown: Sequence[Group]) -> list[str]:
    """What the metrics that are shown mean, each once."""
    labels = [word for group in shown for word in (group.title, *(number.label for number in group.numbers))]
    return [meaning for start, meaning in MEANINGS.items() if any(label.startswith(start) for label in labels)]


def confused_pairs(result: Result) -> list[tuple[str, str, int]]:
    """(true class, answered class, pictures), the most frequent mistakes first."""
    mistakes = [(true, answer, count) for true, answer, count in answers_by_class(result) if true != answer and count]
    return sorted(mistakes, key=lambda mistake: -mistake[2])[:CONFUSED]


def _system(name: str) -> str:
    return SYSTEMS.get(name, str(name))


def _retrieval(result: Result) -> Iterator[Group]:
    for start in (TEXT_TO_PICTURE, PICTURE_TO_TEXT):
        names = [m for m in result["metrics"] if m.startswith(start) and not m.endswith("mean_rank")]
        title = spoken(start).strip()
        numbers = [Number(m.removeprefix(start).replace("_", " "), *score(result, m)) for m in names]
        if numbers:
            yield Group(title, numbers)


def _zero_shot(result: Result) -> Iterator[Group]:
    names = [m for m in ("acc1", "acc5", "mean_per_class_recall") if m in result["metrics"]]
    numbers = [Number(spoken(m), *score(result, m)) for m in names]
    if (largest := score(result, "majority_class_share").chance) is not None:
        numbers.append(Number("always the largest class", largest, other=True))
    yield Group("picture → class", numbers)


def _passages(result: Result) -> Iterator[Group]:
    """A group for each metric, a row for each system."""
    for metric in [m for m in PASSAGE_METRICS if m in result["metrics"]][:4]:
        rows = []
        for name, system in systems(result).items():
            own, found = system is result, score(system, metric)._replace(chance=None)
            if own or found.value is not None:
                rows.append(Number(_system(name), *found, *_ahead(lead(system, metric)), other=not own))
        luck = score(result, metric).chance
        yield Group(metric, rows if luck is None else [*rows, Number("chance", luck, other=True)])


def _everything(result: Result) -> Iterator[Group]:
    yield Group(str(result["task"]), [Number(spoken(m), *score(result, m)) for m in result["metrics"]])


def _ahead(found: Score) -> tuple[str, str]:
    """By how much the model is ahead of a baseline, and the interval of that, in words."""
    value, low, high, _ = found
    ends = "" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"
    return ("", "") if value is None else (signed(value), ends)


_GROUPS = {
    "zeroshot_retrieval": _retrieval,
    "zeroshot_classification": _zero_shot,
    "passage_retrieval": _passages,
}

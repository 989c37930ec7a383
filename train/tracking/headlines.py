"""What a result of an evaluation says, read once for all that show it: the page, trackers, the card of a model.

A result is the JSON of `eval/<data set>.json`, of a run of any age: what it lacks, or has as null, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.foreign import file_inside

Result = Mapping[str, Any]
MOST = 1e100  # of a number; float32 ends at 3e38, and products of two of these are finite
LARGEST = 48_000  # bytes of a picture: thumbnails of 96 pixels have a tenth
PICTURE_TO_TEXT, TEXT_TO_PICTURE = "image_to_text_", "text_to_image_"
HEADLINES = ("nDCG@10", "acc1", "accuracy@20", "accuracy@5", "accuracy@1")
# of passages, in the order in which they are read; the first four that there are get shown
PASSAGE_METRICS = "nDCG@10 Recall@100 accuracy@20 accuracy@100 MRR@10 Success@1 accuracy@1 accuracy@5".split()


class Score(NamedTuple):
    """low, high: the ends of its 95 % interval; chance: what a random order gets. None: not known, or not finite."""

    value: float | None
    low: float | None = None
    high: float | None = None
    chance: float | None = None


def headline(metrics: Iterable[str]) -> str:
    """The one metric of an evaluation that is looked at first; "" where there is none."""
    names = list(metrics)
    recalls = [name for name in names if name.startswith(f"{PICTURE_TO_TEXT}R@")]
    return next((name for name in (*HEADLINES, *recalls, *names) if name in names), "")


def score(result: Result, metric: str) -> Score:
    """Of the model, or of one of the `systems`, which have no chance of their own."""
    value, interval, chance = (part(result, name).get(metric) for name in ("metrics", "intervals", "chance"))
    return Score(finite(value), *_ends(interval), finite(chance))


def scores(result: Result) -> dict[str, Score]:
    """The metrics that are scores rather than counts: those with an interval or a level of chance."""
    found = {metric: score(result, metric) for metric in part(result, "metrics")}
    return {metric: s for metric, s in found.items() if s.value is not None and (s.low, s.chance) != (None, None)}


def systems(result: Result) -> dict[str, Result]:
    """The model and what it is compared with, by name."""
    return {"model": result, **part(result, "baselines")}


def lead(baseline: Result, metric: str) -> Score:
    """By how much the model is ahead of a baseline."""
    difference = part(baseline, "difference").get(metric) or {}
    return Score(finite(difference.get("value")), *_ends(difference.get("interval")))


def answers_by_class(result: Result) -> list[tuple[str, str, int]]:
    """(true class, answered class, pictures): all pairs of few classes, the most frequent mistakes of many."""
    matrix = part(result, "confusion")
    names = [str(name) for name in matrix.get("classes") or []]
    rows = zip(names, matrix.get("counts") or [], strict=False)
    cells = [(true, other, int(n)) for true, row in rows for other, n in zip(names, row, strict=False)]
    listed = [(str(m["true"]), str(m["predicted"]), int(m["count"])) for m in result.get("confused") or []]
    return cells or listed


def classes(result: Result) -> list[tuple[str, float, int]]:
    """(class, accuracy, pictures) of the classes that have any, the worst first."""
    found = [
        (str(name), accuracy, int(of.get("num_samples") or 0))
        for name, of in part(result, "per_class").items()
        if (accuracy := finite(of.get("accuracy"))) is not None
    ]
    return sorted(found, key=lambda one: (one[1], -one[2]))


def marked(text: str, spans: Sequence[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """(part of the text, whether it is within a span), in order; spans that overlap are one."""
    place = 0
    for start, end in sorted((int(s), int(e)) for s, e in spans):
        start, end = max(start, place), min(end, len(text))
        if start < end:
            if place < start:
                yield text[place:start], False
            yield text[start:end], True
            place = end
    if place < len(text):
        yield text[place:], False


def picture(run: Path, dataset: str, name: str | None) -> Path | None:
    """The thumbnail that a case of a data set names; None when there is none of that name in the run folder."""
    path = file_inside(run, f"eval/{dataset}.pictures/{name}") if name == Path(name or "").name else None
    return path if path and path.suffix == ".webp" and path.stat().st_size <= LARGEST else None


def evaluator(result: Result) -> str:
    """Its name as metrics.jsonl has it."""
    return "val" if result["dataset"] == "val" else f"eval/{result['dataset']}"


def spoken(metric: str) -> str:
    """A metric's name with its direction in words."""
    for start, words in ((PICTURE_TO_TEXT, "picture → text"), (TEXT_TO_PICTURE, "text → picture")):
        if metric.startswith(start):
            return f"{words} {metric.removeprefix(start).replace('_', ' ')}"
    return {"acc1": "top-1 accuracy", "acc5": "top-5 accuracy"}.get(metric, metric.replace("_", " "))


def part(result: Result, name: str) -> Mapping[str, Any]:
    """One of its objects; {} where it has none."""
    return result.get(name) or {}


def finite(value: Any) -> float | None:
    """The number, or None for what is none, or too large to calculate with."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and abs(value) <= MOST else None


def _ends(interval: Sequence[Any] | None) -> tuple[float | None, float | None]:
    low, high = map(finite, interval or (None, None))
    return (None, None) if low is None or high is None else (low, high)

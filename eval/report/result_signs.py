"""Signs of failure in what a run was scored on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eval.report.curves import column, evaluations, finite, headline, name_of, number, signed, spoken
from eval.report.evidence import Evidence, Level, Sign

DROP = 0.02  # from the best evaluation to the last, without an interval
TAKES_ALL = 0.5  # share of the answers of one class


def evaluated(e: Evidence) -> Iterator[Sign]:
    if not e.results and not evaluations(e.records):
        yield Sign(
            "warn",
            "Nothing was evaluated",
            "A falling loss does not say whether anything is found.",
            "data.val=SHARDS, eval.suite=[…], or python -m eval checkpoint=RUN later",
        )


def chance(e: Evidence) -> Iterator[Sign]:
    for result in e.results:
        metric = headline(result["metrics"])
        value, luck = (finite((result.get(part) or {}).get(metric)) for part in ("metrics", "chance"))
        if value is None or luck is None:
            continue
        low = finite(((result.get("intervals") or {}).get(metric) or [None])[0])
        numbers = f"{spoken(metric or '')} {number(value)}, chance {number(luck)}."
        if (value if low is None else low) <= luck:
            yield Sign(
                "bad",
                f"{result['dataset']}: no better than chance",
                numbers,
                "Are pairs right and keys those of the data (data.image_key, data.captions)? Then optim.lr and more "
                "steps",
            )
        else:
            yield Sign("good", f"{result['dataset']}: better than chance", numbers)
        largest = finite((result.get("chance") or {}).get("majority_class_share"))
        if metric == "acc1" and largest is not None and luck < value < largest:
            yield Sign(
                "warn",
                f"{result['dataset']}: below the largest class",
                f"{value:.3f} are right; always answering the most frequent class gives {largest:.3f}.",
                "Prompts and class names of the task file; classes that the training captions never name",
            )


def swallowed(e: Evidence) -> Iterator[Sign]:
    for result in e.results:
        confusion = result.get("confusion") or {}
        counts, classes = confusion.get("counts") or [], confusion.get("classes") or []
        total = sum(map(sum, counts))
        if not total:
            continue
        predicted = [sum(row[c] for row in counts) / total for c in range(len(classes))]
        top = max(range(len(classes)), key=lambda c: predicted[c])
        true = sum(counts[top]) / total
        if predicted[top] > TAKES_ALL and predicted[top] > 2 * true:
            yield Sign(
                "warn",
                f"{result['dataset']}: one class takes all",
                f"“{classes[top]}” is the answer for {predicted[top]:.0%} of the pictures and right for {true:.0%}.",
                "Prompts that are alike for all classes but the name; more prompts for each class",
            )


def baselines(e: Evidence) -> Iterator[Sign]:
    for result in e.results:
        metric = headline(result["metrics"])
        for name, level, words, fix in OTHERS:
            baseline = (result.get("baselines") or {}).get(name) or {}
            ahead = (baseline.get("difference") or {}).get(metric) or {}
            value, interval = finite(ahead.get("value")), ahead.get("interval") or [None, None]
            low, high = (finite(end) for end in interval)
            if value is None:
                continue
            ends = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
            numbers = f"{signed(value)} {metric}{ends}"
            if (value if high is None else high) < 0:
                yield Sign(level, f"{result['dataset']}: behind {words}", f"{numbers}.", fix)
            elif (value if low is None else low) > 0:
                yield Sign("good", f"{result['dataset']}: ahead of {words}", f"{numbers}.")


def overfitting(e: Evidence) -> Iterator[Sign]:
    noise = {name_of(result): _half_width(result) for result in e.results}
    for prefix, metrics in evaluations(e.records).items():
        metric = headline(metrics)
        values = column(e.records, f"{prefix}/{metric}")
        if len(values) < 3:
            continue
        best = max(values, key=lambda step: values[step])
        last = max(values)
        name, numbers = prefix.removeprefix("eval/"), f"{spoken(metric or '')} {values[best]:.3f} at step {best:.0f}"
        if values[best] - values[last] > noise.get(prefix, DROP):
            yield Sign(
                "warn",
                f"{name}: past its best",
                f"{numbers}, {values[last]:.3f} now: it learns the training data by heart.",
                f"steps={best:.0f}; more data or stronger data.augment; a larger optim.weight_decay",
            )
        else:
            yield Sign("good", f"{name}: not past its best", f"Best {numbers}, {values[last]:.3f} at the end.")


OTHERS: tuple[tuple[str, Level, str, str], ...] = (
    (
        "untrained",
        "bad",
        "itself before training",
        "A lower optim.lr and fewer steps: training forgets what the encoder knew",
    ),
    (
        "bm25",
        "warn",
        "BM25",
        "Hard negatives (python -m eval.mine); or use both: the row “fusion” ranks by both",
    ),
)


def _half_width(result: Mapping[str, Any]) -> float:
    """Of the headline's interval."""
    interval = (result.get("intervals") or {}).get(headline(result["metrics"]))
    return DROP if not interval or None in interval else (interval[1] - interval[0]) / 2

"""Signs of failure in what a run was scored on."""

from __future__ import annotations

from collections.abc import Iterator

from eval.report.curves import column, evaluations, number, signed
from eval.report.evidence import Evidence
from train.findings import Finding, fail, ok, warn
from train.tracking.headlines import Result, evaluator, headline, lead, part, score, spoken, systems

DROP = 0.02  # from the best evaluation to the last, without an interval
TAKES_ALL = 0.5  # share of the answers of one class


def evaluated(e: Evidence) -> Iterator[Finding]:
    if not e.results and not evaluations(e.records):
        yield warn(
            "Nothing was evaluated",
            "A falling loss does not say whether anything is found.",
            "data.val=SHARDS, eval.suite=[…], or python -m eval checkpoint=RUN later",
        )


def chance(e: Evidence) -> Iterator[Finding]:
    for result in e.results:
        metric = headline(result["metrics"])
        value, low, _, luck = score(result, metric)
        if value is None or luck is None:
            continue
        numbers = f"{spoken(metric)} {number(value)}, chance {number(luck)}."
        if (value if low is None else low) <= luck:
            yield fail(
                f"{result['dataset']}: no better than chance",
                numbers,
                "Are pairs right and keys those of the data (data.image_key, data.captions)? Then optim.lr and more "
                "steps",
            )
        else:
            yield ok(f"{result['dataset']}: better than chance", numbers)
        largest = score(result, "majority_class_share").chance
        if metric == "acc1" and largest is not None and luck < value < largest:
            yield warn(
                f"{result['dataset']}: below the largest class",
                f"{value:.3f} are right; always answering the most frequent class gives {largest:.3f}.",
                "Prompts and class names of the task file; classes that the training captions never name",
            )


def swallowed(e: Evidence) -> Iterator[Finding]:
    for result in e.results:
        confusion = part(result, "confusion")
        counts, classes = confusion.get("counts") or [], confusion.get("classes") or []
        total = sum(map(sum, counts))
        if not total:
            continue
        predicted = [sum(row[c] for row in counts) / total for c in range(len(classes))]
        top = max(range(len(classes)), key=lambda c: predicted[c])
        true = sum(counts[top]) / total
        if predicted[top] > TAKES_ALL and predicted[top] > 2 * true:
            yield warn(
                f"{result['dataset']}: one class takes all",
                f"“{classes[top]}” is the answer for {predicted[top]:.0%} of the pictures and right for {true:.0%}.",
                "Prompts that are alike for all classes but the name; more prompts for each class",
            )


def baselines(e: Evidence) -> Iterator[Finding]:
    for result in e.results:
        metric = headline(result["metrics"])
        for name, told, words, fix in OTHERS:
            value, low, high, _ = lead(systems(result).get(name) or {}, metric)
            if value is None:
                continue
            ends = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
            numbers = f"{signed(value)} {metric}{ends}"
            if (value if high is None else high) < 0:
                yield told(f"{result['dataset']}: behind {words}", f"{numbers}.", fix)
            elif (value if low is None else low) > 0:
                yield ok(f"{result['dataset']}: ahead of {words}", f"{numbers}.")


def overfitting(e: Evidence) -> Iterator[Finding]:
    noise = {evaluator(result): _half_width(result) for result in e.results}
    for prefix, metrics in evaluations(e.records).items():
        metric = headline(metrics)
        values = column(e.records, f"{prefix}/{metric}")
        if len(values) < 3:
            continue
        best = max(values, key=lambda step: values[step])
        last = max(values)
        name, numbers = prefix.removeprefix("eval/"), f"{spoken(metric)} {values[best]:.3f} at step {best:.0f}"
        if values[best] - values[last] > noise.get(prefix, DROP):
            yield warn(
                f"{name}: past its best",
                f"{numbers}, {values[last]:.3f} now: it learns the training data by heart.",
                f"steps={best:.0f}; more data or stronger data.augment; a larger optim.weight_decay",
            )
        else:
            yield ok(f"{name}: not past its best", f"Best {numbers}, {values[last]:.3f} at the end.")


OTHERS = (
    (
        "untrained",
        fail,
        "itself before training",
        "A lower optim.lr and fewer steps: training forgets what the encoder knew",
    ),
    ("bm25", warn, "BM25", "Hard negatives (python -m eval.mine); or use both: the row “fusion” ranks by both"),
)


def _half_width(result: Result) -> float:
    """Of the headline's interval."""
    _, low, high, _ = score(result, headline(result["metrics"]))
    return DROP if low is None or high is None else (high - low) / 2

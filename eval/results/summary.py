"""Functions that read scores and other entries from results, for everything that shows them.

They serve the HTML report, trackers, printed tables and model cards. A result is the JSON of `eval/<data set>.json`,
perhaps written by an older version. Parts that are missing or null are skipped. Code for only one kind of evaluator is
in eval/results/kinds.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dyad.data.base.files import file_inside
from dyad.train.eval_config import EvalConfig
from dyad.train.tracking.panel_types import Score

Result = Mapping[str, Any]
# Keys of eval.* that decide scores → their defaults, as text
PROTOCOL = {
    k: str(getattr(EvalConfig(), k)) for k in ("seen", "truth", "answers", "probe_features", "probe_k", "width")
}
LARGEST_NUMBER = 1e100  # float32 ends at 3e38, and products of two such numbers are still finite
LARGEST_IMAGE = 48_000  # bytes; thumbnails of 96 pixels have a tenth
SYSTEMS = {"model": "this run", "bm25": "BM25", "untrained": "before training", "fusion": "fused with BM25"}
SYSTEMS |= {"random": "random examples", "no_prompt": "no example"}
SYSTEMS |= {"popularity": "popularity", "successors": "what follows the last item", "item_knn": "item-kNN"}


def score(result: Result, metric: str) -> Score:
    """Return the score of the model in one metric, with its 95 % interval and its chance level.

    The chance level is the score of a random ranking. A part that is not known is None. `result` may also be the scores
    of one baseline (a value of `systems(result)`), which have no chance level.
    """
    value, interval, chance = (part(result, name).get(metric) for name in ("metrics", "intervals", "chance"))
    return Score(finite(value), *_ends(interval), finite(chance))


def scores(result: Result) -> dict[str, Score]:
    """Return metric → score for the metrics of a result that have a 95 % interval or a chance level.

    So counts, such as the number of images, are left out. The chance level is the score of a random ranking.
    """
    found = {metric: score(result, metric) for metric in part(result, "metrics")}
    return {metric: s for metric, s in found.items() if s.value is not None and (s.low, s.chance) != (None, None)}


def systems(result: Result) -> dict[str, Result]:
    """Return system name → its scores: "model" → `result` itself, name of each baseline → its part of `result`."""
    return {"model": result, **part(result, "baselines")}


def lead(baseline: Result, metric: str) -> Score:
    """Return the lead of the model over one baseline in one metric, with its 95 % interval; values not known are None.

    The lead is the score of the model minus that of the baseline. baseline: the part of a result that describes it.
    """
    difference = part(part(baseline, "difference"), metric)
    return Score(finite(difference.get("value")), *_ends(difference.get("interval")))


def protocol(result: Result) -> dict[str, str]:
    """Return key of PROTOCOL → its value in a result, as text; keys that the result lacks are left out.

    A null stands for the default.
    """
    found = {**{f"probe_{key}": value for key, value in part(result, "probe").items()}, **result}
    return {k: usual if found[k] is None else str(found[k]) for k, usual in PROTOCOL.items() if k in found}


def confusions(result: Result) -> list[tuple[str, str, int]]:
    """Return how often classes were predicted, as (true class, predicted class, count).

    If the result has a confusion matrix (few classes), all pairs of classes are returned, else the most frequent
    mistakes.
    """
    if matrix := part(result, "confusion"):
        names, counts = matrix["classes"], matrix["counts"]
        return [(true, other, counts[i][j]) for i, true in enumerate(names) for j, other in enumerate(names)]
    return [(mistake["true"], mistake["predicted"], mistake["count"]) for mistake in result.get("confused") or []]


def classes(result: Result) -> list[tuple[str, float, int]]:
    """Return (class, accuracy, number of samples, 0 if unknown) of classes with an accuracy, lowest accuracy first."""
    scores = part(result, "per_class").items()
    known = [(name, finite(of.get("accuracy")), of.get("num_samples") or 0) for name, of in scores]
    found = [(name, accuracy, samples) for name, accuracy, samples in known if accuracy is not None]
    return sorted(found, key=lambda one: (one[1], -one[2]))


def marked(text: str, spans: Sequence[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """Cut a text at the ends of spans; yield (part, whether the part lies in a span) in order.

    spans: [start, end) in the text, in any order. Of two spans that overlap, the part of the later one begins where the
    earlier one ends.
    """
    position = 0
    for start, end in sorted(map(tuple, spans)):
        start, end = max(start, position), min(end, len(text))
        if start < end:
            if position < start:
                yield text[position:start], False
            yield text[start:end], True
            position = end
    if position < len(text):
        yield text[position:], False


def thumbnail_path(run: Path, dataset: str, name: str | None) -> Path | None:
    """Return the path of a thumbnail in the run folder, or None. name: its file name, or None.

    It is None if the file does not exist, is no .webp file in the folder of this data set, or is too large.
    """
    path = file_inside(run, f"eval/{dataset}.pictures/{name}") if name == Path(name or "").name else None
    return path if path and path.suffix == ".webp" and path.stat().st_size <= LARGEST_IMAGE else None


def evaluator_name(result: Result) -> str:
    """Return the name of the evaluator that made a result: the prefix of its metrics in metrics.jsonl."""
    return "val" if result["dataset"] == "val" else f"eval/{result['dataset']}"


def part(result: Result, name: str) -> Mapping[str, Any]:
    """Return the mapping result[name]; {} if it is missing or null."""
    return result.get(name) or {}


def finite(value: Any) -> float | None:
    """Convert a value to float; None if it is no number, not finite, or too large to calculate with."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and abs(value) <= LARGEST_NUMBER else None


def number(value: Any) -> str:
    """Format a value for readers, with three decimals; "–" (a dash) if `finite` gives None.

    Whole numbers above 1 or below −1 have no decimals. Values closer to 0 than 0.0005, but not 0 itself, have one
    significant digit.
    """
    if (found := finite(value)) is None:
        return "–"
    if abs(found) > 1 and found == round(found):
        return f"{found:,.0f}"
    return f"{found:.1g}" if 0 < abs(found) < 0.0005 else f"{found:.3f}"


def signed(value: float) -> str:
    """Format a difference for readers: three decimals with a sign."""
    return f"{value:+.3f}".replace("-", "−")


def _ends(interval: Sequence[Any] | None) -> tuple[float | None, float | None]:
    """Return both ends of an interval as floats; (None, None) if the interval is missing or an end is not finite."""
    low, high = map(finite, interval or (None, None))
    return (None, None) if low is None or high is None else (low, high)

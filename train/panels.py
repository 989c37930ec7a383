"""What trackers show of the last evaluation besides scalars: headline numbers, galleries, histograms, confusions.

Neutral: a tracker makes of it what it can. Reads the results that stand in `eval/*.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
Item = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A thumbnail and the words below it."""

    path: Path
    caption: str


Cell = str | float | Picture | None


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def headlines(result: Result) -> dict[str, dict[str, float]]:
    """Every number that has an interval, of the model and of what it is compared with: value, low, high, chance."""
    systems = {"": result} | {f"{name}/": system for name, system in result.get("baselines", {}).items()}
    return {
        f"final/{result['dataset']}/{prefix}{metric}": {
            "value": system["metrics"][metric],
            "low": interval[0],
            "high": interval[1],
            **({"chance": chance} if (chance := result["chance"].get(metric)) is not None else {}),
        }
        for prefix, system in systems.items()
        for metric, interval in system.get("intervals", {}).items()
        if interval
    }


def galleries(result: Result, pictures: Path) -> dict[str, Table]:
    """Title in letters fit for a key ("text_to_pictures") → one row per query. pictures: folder of the thumbnails."""
    return {
        re.sub(r"\W+", "_", title.replace("→", "to")): _gallery(cases, pictures)
        for title, cases in result.get("gallery", {}).items()
        if cases
    }


def _gallery(cases: Sequence[Mapping[str, Any]], pictures: Path) -> Table:
    """Pictures found stand in columns, best first; texts found stand one below the other, one column per system."""
    values = list(dict.fromkeys(metric for case in cases for metric in case["value"]))
    names = list(dict.fromkeys(name for case in cases for name in case["systems"]))
    shown = any("picture" in answer for case in cases for answers in case["systems"].values() for answer in answers)
    ranks = range(max(len(answers) for case in cases for answers in case["systems"].values())) if shown else ()
    systems = [f"{name} {rank + 1}" for name in names for rank in ranks] if shown else names
    rows: list[list[Cell]] = []
    for case in cases:
        found = [case["systems"].get(name, []) for name in names]
        rows.append(
            [
                case["kind"],
                _cell(case["query"], pictures),
                *(case["value"].get(metric) for metric in values),
                _cell(case["right"][0], pictures) if shown and case["right"] else "\n".join(map(_words, case["right"])),
                *(
                    [_cell(answers[r], pictures) if r < len(answers) else None for answers in found for r in ranks]
                    if shown
                    else [_lines(answers) for answers in found]
                ),
            ]
        )
    return Table(["kind", "query", *values, "right", *systems], rows)


def _cell(item: Item, pictures: Path) -> Cell:
    path = pictures / Path(item.get("picture", "-")).name
    return Picture(path, _words(item)) if path.is_file() else _words(item)


def _lines(items: Sequence[Item]) -> str:
    return "\n".join(f"{rank}. {_words(item)}" for rank, item in enumerate(items, 1))


def _words(item: Item) -> str:
    """✓ 0.812 Title: text with the «answer» marked, as far as the item has them."""
    mark = ["✓"] if item.get("right") else []
    score = [f"{item['score']:.3f}"] if "score" in item else []
    text = item.get("text", "")
    for start, end in reversed(item.get("spans", [])):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    text = ": ".join(part for part in (item.get("title"), text) if part)
    return " ".join([*mark, *score, text or item["id"]])


def histograms(result: Result) -> dict[str, tuple[list[float], list[float]]]:
    """ "right", "wrong", "best_wrong" → (edges (n + 1,), counts (n,)) of the scores of such pairs."""
    scores = result.get("scores", {})
    return {name: (scores["edges"], counts) for name, counts in scores.items() if name != "edges"}


def confusion(result: Result) -> Table | None:
    """How often what was taken for what: all pairs of few classes, the most frequent mistakes of many; else None."""
    columns = ("true", "predicted", "count")
    if "confusion" in result:
        classes, counts = result["confusion"]["classes"], result["confusion"]["counts"]
        rows = [[t, p, counts[i][j]] for i, t in enumerate(classes) for j, p in enumerate(classes)]
        return Table(columns, rows)
    mistakes = result.get("confused")
    return Table(columns, [[mistake[name] for name in columns] for mistake in mistakes]) if mistakes else None


def classes(result: Result) -> Table | None:
    """Classes that have samples, worst first; None when nothing was classified."""
    seen = [(name, c) for name, c in result.get("per_class", {}).items() if c["num_samples"]]
    rows = [[name, c["accuracy"], c["num_samples"]] for name, c in sorted(seen, key=lambda pair: pair[1]["accuracy"])]
    return Table(("class", "accuracy", "samples"), rows) if rows else None

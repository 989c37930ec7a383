"""What trackers show of the last evaluation besides scalars: headline numbers, galleries, histograms, confusions.

Neutral: a tracker makes of it what it can. Reads the results that stand in `eval/*.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train.tracking.headlines import Result, answers_by_class, classes, marked, part, picture, score, scores, systems

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


def final_numbers(result: Result) -> dict[str, dict[str, float]]:
    """Every score of the model and of what it is compared with: value, low, high, chance, as far as they are known."""
    return {
        f"final/{result['dataset']}/{'' if name == 'model' else f'{name}/'}{metric}": {
            what: number
            for what, number in found._replace(chance=score(result, metric).chance)._asdict().items()
            if number is not None
        }
        for name, system in systems(result).items()
        for metric, found in scores(system).items()
    }


def galleries(result: Result, run: Path) -> dict[str, Table]:
    """Title in letters fit for a key ("text_to_pictures") → one row per query. run: the folder with the pictures."""
    return {
        re.sub(r"\W+", "_", title.replace("→", "to")): _gallery(cases, partial(_cell, run, result["dataset"]))
        for title, cases in result.get("gallery", {}).items()
        if cases
    }


def _gallery(cases: Sequence[Mapping[str, Any]], cell: Callable[[Item], Cell]) -> Table:
    """Pictures found stand in columns, best first; texts found stand one below the other, one column per system."""
    metrics = list(dict.fromkeys(metric for case in cases for metric in case["value"]))
    names = list(dict.fromkeys(name for case in cases for name in case["systems"]))
    found = [answers for case in cases for answers in case["systems"].values()]
    pictured = any("picture" in answer for answers in found for answer in answers)
    longest = max(map(len, found))

    def cells(answers: Sequence[Item]) -> list[Cell]:
        if not pictured:
            return ["\n".join(f"{rank}. {_words(answer)}" for rank, answer in enumerate(answers, 1))]
        return [*(cell(answer) for answer in answers), *[None] * (longest - len(answers))]

    def row(case: Mapping[str, Any]) -> list[Cell]:
        right = case["right"]
        return [
            case["kind"],
            cell(case["query"]),
            *(case["value"].get(metric) for metric in metrics),
            cell(right[0]) if pictured and right else "\n".join(map(_words, right)),
            *(shown for name in names for shown in cells(case["systems"].get(name, []))),
        ]

    columns = [f"{name} {rank}" for name in names for rank in range(1, longest + 1)] if pictured else names
    return Table(["kind", "query", *metrics, "right", *columns], [row(case) for case in cases])


def _cell(run: Path, dataset: str, item: Item) -> Cell:
    path = picture(run, dataset, item.get("picture"))
    return Picture(path, _words(item)) if path else _words(item)


def _words(item: Item) -> str:
    """✓ 0.812 Title: text with the «answer» marked, as far as the item has them."""
    mark = ["✓"] if item.get("right") else []
    score = [f"{item['score']:.3f}"] if "score" in item else []
    parts = marked(item.get("text", ""), item.get("spans", []))
    text = "".join(f"«{part}»" if found else part for part, found in parts)
    text = ": ".join(part for part in (item.get("title"), text) if part)
    return " ".join([*mark, *score, text or item["id"]])


def histograms(result: Result) -> dict[str, tuple[list[float], list[float]]]:
    """ "right", "wrong", "best_wrong" → (edges (n + 1,), counts (n,)) of the scores of such pairs."""
    found = part(result, "scores")
    return {name: (found["edges"], counts) for name, counts in found.items() if name != "edges"}


def confusion(result: Result) -> Table | None:
    """How often what was taken for what; None when nothing was classified."""
    found = answers_by_class(result)
    return Table(("true", "predicted", "count"), found) if found else None


def per_class(result: Result) -> Table | None:
    """Classes that have samples, worst first; None when nothing was classified."""
    found = classes(result)
    return Table(("class", "accuracy", "samples"), found) if found else None

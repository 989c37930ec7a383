"""Convert results to what experiment trackers show (galleries, histograms, tables) and to scores for model cards."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dyad.eval.results.kinds import KINDS, titled
from dyad.eval.results.summary import Result, classes, confusions, marked, part, score, scores, systems, thumbnail_path
from dyad.train.tracking.panel_types import Cell, Grid, Panels, Scored, Thumbnail


def panels(result: Result, run: Path) -> Panels:
    """Convert one evaluation result to Panels: final metrics, galleries of example cases, histograms and tables.

    Experiment trackers draw them. run: the run folder, in which the thumbnails lie.
    """
    pairs, of_class, histogram = confusions(result), classes(result), part(result, "scores")
    return Panels(
        dataset=result["dataset"],
        final=_final_numbers(result),
        galleries={
            re.sub(r"\W+", "_", title.replace("→", "to")): _gallery(cases, run, result["dataset"])
            for title, cases in part(result, "gallery").items()
            if cases
        },
        histograms={name: (histogram["edges"], counts) for name, counts in histogram.items() if name != "edges"},
        confusion=Grid(("true", "predicted", "count"), pairs) if pairs else None,
        classes=Grid(("class", "accuracy", "samples"), of_class) if of_class else None,
    )


def scored(result: Result) -> Scored:
    """Return one evaluation result as Scored, for a model card.

    The task of the result must be in KINDS (eval/results/kinds.py), or it raises KeyError.
    """
    return Scored(titled(result), KINDS[result["task"]].hub_task, scores(result))


def _final_numbers(result: Result) -> dict[str, dict[str, float]]:
    """Return metric → {"value", "low", "high", "chance"} of one result; entries that are not known are left out.

    So are metrics with neither an interval nor a chance level, such as sizes. low, high: the ends of the 95 % interval.
    chance: the chance level of the metric (the score of a random ranking). Metrics of a baseline have the name
    BASELINE/metric.
    """
    found = {}
    for name, system in systems(result).items():
        start = "" if system is result else f"{name}/"
        for metric, own in scores(system).items():
            known = own._replace(chance=score(result, metric).chance)._asdict()
            found[start + metric] = {what: number for what, number in known.items() if number is not None}
    return found


def _gallery(cases: Sequence[Mapping[str, Any]], run: Path, dataset: str) -> Grid:
    """Convert example cases to a table with one row for each query.

    If any answer has an image, each answer has a column, best first; otherwise each system has one cell with a line for
    each answer. run: the run folder, in which the thumbnails lie.
    """
    metrics = dict.fromkeys(metric for case in cases for metric in part(case, "value"))
    names = dict.fromkeys(name for case in cases for name in part(case, "systems"))
    found = [answers for case in cases for answers in part(case, "systems").values()]
    pictured = any("picture" in answer for answers in found for answer in answers)
    longest = max(map(len, found), default=0)

    def cells(answers: Sequence[Mapping[str, Any]]) -> list[Cell]:
        if not pictured:
            return ["\n".join(f"{rank}. {_item_line(answer)}" for rank, answer in enumerate(answers, 1))]
        return [*(_cell(answer, run, dataset) for answer in answers), *[None] * (longest - len(answers))]

    def row(case: Mapping[str, Any]) -> list[Cell]:
        right = case.get("right") or []
        return [
            case.get("kind"),
            _cell(part(case, "query"), run, dataset),
            *(part(case, "value").get(metric) for metric in metrics),
            _cell(right[0], run, dataset) if pictured and right else "\n".join(map(_item_line, right)),
            *(shown for name in names for shown in cells(part(case, "systems").get(name, []))),
        ]

    columns = [f"{name} {rank}" for name in names for rank in range(1, longest + 1)] if pictured else names
    return Grid(["kind", "query", *metrics, "right", *columns], [row(case) for case in cases])


def _cell(item: Mapping[str, Any], run: Path, dataset: str) -> Cell:
    path = thumbnail_path(run, dataset, item.get("picture"))
    return Thumbnail(path, _item_line(item)) if path else _item_line(item)


def _item_line(item: Mapping[str, Any]) -> str:
    """Convert a query or an answer of an example case to text, such as: ✓ 0.812 Title: text with «answer» marked.

    ✓ means that the answer is right. The id stands in place of title and text, if both are missing. Other missing parts
    are skipped. Line breaks in the text stay.
    """
    parts = marked(item.get("text") or "", item.get("spans") or [])
    text = "".join(f"«{part}»" if found else part for part, found in parts)
    named = ": ".join(filter(None, (item.get("title"), text))) or item.get("id") or ""
    score = "" if item.get("score") is None else f"{item['score']:.3f}"
    return " ".join(filter(None, ("✓" if item.get("right") else "", score, named)))

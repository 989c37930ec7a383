"""Convert example cases to fields for the HTML template: embed images, mark answers, cut long texts."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dyad.data.base.files import open_foreign
from dyad.eval.results.cases import Case, Item, excerpt
from dyad.eval.results.summary import SYSTEMS, finite, marked, part, thumbnail_path

KINDS = {
    "random": "Drawn at random: what to expect",
    "best": "Best: where it does well",
    "worst": "Worst: where it fails, and is sure",
}
LONGEST = 260  # characters of a text
BEFORE = 80  # characters before the first marked part of a text that is cut
View = dict[str, Any]  # values for the template case.html.j2


def cases(listed: Sequence[Case], run: Path, dataset: str) -> Iterator[tuple[str, View]]:
    """Yield (kind, fields for the HTML template) of each example case: random cases first, then best, then worst.

    listed: the cases; those of another kind are left out. run: the run folder, in which the thumbnails of the data set
    lie.
    """
    for kind in KINDS:
        yield from ((kind, _case_view(case, run, dataset)) for case in listed if case.get("kind") == kind)


def _case_view(case: Case, run: Path, dataset: str) -> View:
    """Convert one example case (a query, the answers of each system, right answers) to fields for the HTML template.

    run: the run folder. The result has query; systems: name of a system → its answers; right: the right answers, [] if
    one of them is shown beside the image of the query; value: the metrics of the query as text; missed: whether no
    answer of the first system is right; pictured: whether an answer of the first system has an image.
    """

    def views(items: Sequence[Item]) -> list[View]:
        return [_item_view(item, thumbnail_path(run, dataset, item.get("picture"))) for item in items]

    systems = {SYSTEMS.get(name, name): views(answers) for name, answers in part(case, "systems").items()}
    ours = next(iter(systems.values()), [])
    (query,), right = views([case.get("query") or {}]), views(case.get("right") or [])
    beside_image = query["picture"] is not None and query["text"] in {item["text"] for item in right}
    return {
        "query": query,
        "value": _metric_text(part(case, "value")),
        "systems": systems,
        "right": [] if beside_image else right,
        "missed": not any(answer["right"] for answer in ours),
        "pictured": any(answer["picture"] for answer in ours),
    }


def _item_view(item: Item, path: Path | None) -> View:
    """Convert a query or an answer of an example case to fields for the HTML template. path: its thumbnail, or None.

    The result has title; text: its text, cut to about LONGEST characters, or its id if it has no text; parts: the text
    as (part, whether it is marked); picture: the thumbnail as a data: URL or None; score; right: whether it is right.
    """
    parts = [*marked(*excerpt(item.get("text") or "", item.get("spans") or [], LONGEST, BEFORE))]
    parts = parts or [(item.get("id") or "", False)]
    return {
        "title": item.get("title") or "",
        "text": "".join(text for text, _ in parts),
        "parts": parts,
        "picture": path and _data_url(path),
        "score": finite(item.get("score")),
        "right": bool(item.get("right")),
    }


def _data_url(path: Path) -> str | None:
    """Return a thumbnail as a data: URL; None if the file cannot be read."""
    with suppress(OSError), open_foreign(path) as file:
        return f"data:image/webp;base64,{base64.b64encode(file.read()).decode()}"


def _metric_text(value: Mapping[str, Any]) -> str:
    """Return the metrics of an example case as text: {"rank": 3} → "right answer at rank 3", others as "NAME 0.123".

    value: name of a metric → its value for the query of the case.
    """
    known = ((name, number) for name, given in value.items() if (number := finite(given)) is not None)
    return ", ".join(f"right answer at rank {n:,.0f}" if name == "rank" else f"{name} {n:.3f}" for name, n in known)

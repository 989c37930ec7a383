"""Cases of an evaluation in the form that the page shows: pictures embedded, answers marked, long texts cut."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dyad.eval.results.cases import Case, Item
from dyad.eval.results.summary import SYSTEMS, finite, marked, part, picture

KINDS = {
    "random": "Drawn at random: what to expect",
    "best": "Best: where it does well",
    "worst": "Worst: where it fails, and is sure",
}
LONGEST = 260  # characters of a text
LONGEST_WORD = 20  # characters; a cut may fall inside a longer word
BEFORE = 80  # characters before the first marked part of a text that is cut
Thumbnail = Callable[[str | None], Path | None]  # from the file name in an item to the file
View = dict[str, Any]  # values for the template case.html.j2


def cases(listed: Sequence[Case], run: Path, dataset: str) -> Iterator[tuple[str, View]]:
    """(kind, view) of the cases of a data set, random ones first. run: the run folder, which holds the thumbnails."""
    for kind in KINDS:
        for case in listed:
            if case.get("kind") == kind:
                yield kind, _case_view(case, partial(picture, run, dataset))


def briefly(view: View) -> View:
    """The same case with the answers of this run only; of long texts two."""
    ours = list(view["systems"].items())[:1]
    few = {name: answers if view["pictured"] else answers[:2] for name, answers in ours}
    return {**view, "systems": few, "right": []}


def _case_view(case: Case, thumbnail: Thumbnail) -> View:
    """The case with `value` in words. missed: no right answer is shown; pictured: answers are pictures."""
    systems = {
        SYSTEMS.get(name, str(name)): [_item_view(answer, thumbnail) for answer in answers]
        for name, answers in part(case, "systems").items()
    }
    ours = next(iter(systems.values()), [])
    query = _item_view(case.get("query") or {}, thumbnail)
    right = [_item_view(item, thumbnail) for item in case.get("right") or []]
    beside_picture = query["picture"] is not None and query["text"] in {item["text"] for item in right}
    return {
        "query": query,
        "value": _value_words(part(case, "value")),
        "systems": systems,
        "right": [] if beside_picture else right,
        "missed": not any(answer["right"] for answer in ours),
        "pictured": any(answer["picture"] for answer in ours),
    }


def _item_view(item: Item, thumbnail: Thumbnail) -> View:
    """picture: a data: address. parts: the text, cut into parts with whether they are marked."""
    text, name = item.get("text") or "", item.get("id") or ""
    path = thumbnail(item.get("picture"))
    parts = _cut(list(marked(text, item.get("spans") or []))) or [(name, False)]
    return {
        "name": name,
        "title": item.get("title") or "",
        "text": "".join(words for words, _ in parts),
        "parts": parts,
        "picture": path and f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}",
        "score": finite(item.get("score")),
        "right": bool(item.get("right")),
    }


def _cut(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """At most LONGEST characters, from a little before the first marked part on."""
    words = "".join(text for text, _ in parts)
    whole = len(words)
    if whole <= LONGEST:
        return parts
    unmarked = len(parts[0][0]) if not parts[0][1] and len(parts) > 1 else 0
    first = max(0, min(unmarked - BEFORE, whole - LONGEST))
    last = first + LONGEST
    last = last if last == whole else max(words.rfind(" ", 0, last), last - LONGEST_WORD)
    first = min(words.find(" ", first) + 1 or first, first + LONGEST_WORD) if first else 0
    position, shown = 0, []
    for text, is_marked in parts:
        piece = text[max(first - position, 0) : max(last - position, 0)]
        shown += [(piece, is_marked)] if piece else []
        position += len(text)
    dots = [("…", False)]
    return [*(dots if first else []), *shown, *(dots if last < whole else [])]


def _value_words(value: Mapping[str, Any]) -> str:
    """{"rank": 3} → "right answer at rank 3"; other metrics by their names."""
    known = {name: number for name, given in value.items() if (number := finite(given)) is not None}
    words = (
        f"right answer at rank {number:,.0f}" if name == "rank" else f"{name} {number:.3f}"
        for name, number in known.items()
    )
    return ", ".join(words)

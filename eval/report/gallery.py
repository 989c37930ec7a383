"""Cases of an evaluation as a page shows them: pictures as part of it, answers marked, long texts cut."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from train.tracking.headlines import finite, marked, picture

SYSTEMS = {"model": "this run", "bm25": "BM25", "untrained": "before training", "fusion": "fused with BM25"}
KINDS = {
    "random": "Drawn at random: what to expect",
    "best": "Best: where it does well",
    "worst": "Worst: where it fails, and is sure",
}
LONGEST = 260  # characters of a text
Show = Callable[[str | None], Path | None]  # from a file name of a case to the thumbnail
WORD = 20  # characters of a word that is not cut
BEFORE = 80  # characters before the first marked part, where a long text is cut


@dataclass(frozen=True)
class Item:
    """picture: a data: address; parts: the text, cut into what is marked and what is not."""

    picture: str | None
    title: str
    parts: Sequence[tuple[str, bool]]
    name: str

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


@dataclass(frozen=True)
class Answer:
    item: Item
    score: float | None
    right: bool


@dataclass(frozen=True)
class Case:
    """value: how well it went, in words; systems: the answers of each by its name; missed: nothing right is shown."""

    query: Item
    value: str
    systems: Mapping[str, Sequence[Answer]]
    right: Sequence[Item]
    missed: bool
    pictured: bool


def cases(listed: Sequence[Mapping[str, Any]], run: Path, dataset: str) -> Iterator[tuple[str, Case]]:
    """(kind, case) of a data set of a run folder, random ones first."""
    for kind in KINDS:
        for case in listed:
            if case.get("kind") == kind:
                yield kind, _case(case, partial(picture, run, dataset))


def briefly(case: Case) -> Case:
    """What this run answers, and no more of long texts than two."""
    ours = dict(list(case.systems.items())[:1])
    return replace(
        case, systems={name: found if case.pictured else found[:2] for name, found in ours.items()}, right=[]
    )


def _case(case: Mapping[str, Any], show: Show) -> Case:
    systems = {
        SYSTEMS.get(name, str(name)): [_answer(answer, show) for answer in answers]
        for name, answers in (case.get("systems") or {}).items()
    }
    ours = next(iter(systems.values()), [])
    query = _item(case.get("query") or {}, show)
    right = [_item(item, show) for item in case.get("right") or []]
    told = query.picture is not None and query.text in {item.text for item in right}  # it stands beside the picture
    return Case(
        query=query,
        value=_value(case.get("value") or {}),
        systems=systems,
        right=[] if told else right,
        missed=not any(answer.right for answer in ours),
        pictured=any(answer.item.picture for answer in ours),
    )


def _answer(answer: Mapping[str, Any], show: Show) -> Answer:
    return Answer(_item(answer, show), finite(answer.get("score")), bool(answer.get("right")))


def _item(item: Mapping[str, Any], show: Show) -> Item:
    text, name = item.get("text") or "", item.get("id") or ""
    path = show(item.get("picture"))
    parts = list(marked(text, item.get("spans") or []))
    address = path and f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Item(address, item.get("title") or "", _cut(parts) or [(name, False)], name)


def _cut(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """At most LONGEST characters, from a little before the first marked part on."""
    words = "".join(text for text, _ in parts)
    whole = len(words)
    if whole <= LONGEST:
        return parts
    lead = len(parts[0][0]) if not parts[0][1] and len(parts) > 1 else 0
    first = max(0, min(lead - BEFORE, whole - LONGEST))
    last = first + LONGEST
    last = last if last == whole else max(words.rfind(" ", 0, last), last - WORD)
    first = min(words.find(" ", first) + 1 or first, first + WORD) if first else 0
    place, shown = 0, []
    for text, is_marked in parts:
        piece = text[max(first - place, 0) : max(last - place, 0)]
        shown += [(piece, is_marked)] if piece else []
        place += len(text)
    dots = [("…", False)]
    return [*(dots if first else []), *shown, *(dots if last < whole else [])]


def _value(value: Mapping[str, Any]) -> str:
    """{"rank": 3} → "right answer at rank 3"; other metrics by their names."""
    known = {name: number for name, given in value.items() if (number := finite(given)) is not None}
    words = [
        f"right answer at rank {number:,.0f}" if name == "rank" else f"{name} {number:.3f}"
        for name, number in known.items()
    ]
    return ", ".join(words)

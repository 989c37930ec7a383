"""Example cases: a few queries of an evaluation with the answers of each system and the right answers.

All evaluators use one structure. In the JSON of a result it is {"gallery": {title: [case, …]}}; unknown parts are
left out.

n queries, m items, D embedding width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

ANSWERS = 5  # answers of each system in one case
RIGHT = 3  # right answers in one case
LONGEST = 600  # characters of a text
BEFORE = 200  # characters before the first span of a text that is cut


class Item(TypedDict, total=False):
    """A query or an answer. id: of the sample, passage or class. spans: [start, end) of the answers in the text.

    picture: a file in <data set>.pictures/. score, right: of an answer only.
    """

    id: str | None
    text: str | None
    title: str | None
    picture: str | None
    spans: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None
    score: float | None
    right: bool | None


class Case(TypedDict, total=False):
    """One query. kind: best, worst or random. value: its metrics. systems: the answers of each system, best first."""

    kind: str
    query: Item | None
    value: dict[str, float | None] | None
    systems: dict[str, list[Item]] | None
    right: list[Item] | None


def item(name: str, text: str | None = None, **more: Any) -> Item:
    """An item without its empty parts. name: its id."""
    parts = {"id": name, "text": text, **more}
    return Item(**{key: value for key, value in parts.items() if value not in (None, "", [])})


def answer(found: Item, score: float, right: bool) -> Item:
    """The item `found` as an answer of a system, with its score and whether it is right."""
    return {**found, "score": round(score, 4), "right": right}


def choose(
    quality: np.ndarray, sure: np.ndarray, groups: Sequence[Hashable], count: int, seed: int = 0
) -> list[tuple[str, int]]:
    """(kind, query) of the `count` best, the `count` worst and `count` random queries of n, none of them twice.

    quality (n,): higher is better. Of equal queries the one with the higher `sure` (n,), the certainty of the model,
    comes first, then the earlier one: so the worst are those with confident mistakes. groups (n,): the topic of each
    query; a kind has one query of a group as long as there are other groups. If there are few queries, one half is
    best and the other half worst.
    """
    n = len(quality)
    plan = (
        ("best", np.lexsort((-sure, -quality)), min(count, -(-n // 2))),
        ("worst", np.lexsort((-sure, quality)), min(count, n // 2)),
        ("random", np.random.default_rng(seed).permutation(n), count),
    )
    chosen: dict[int, str] = {}
    for kind, order, most in plan:
        left = [query for query in order.tolist() if query not in chosen]
        chosen |= dict.fromkeys(_of_different_groups(left, groups, most), kind)
    return [(kind, query) for query, kind in chosen.items()]


def best_items(query_D: np.ndarray, items_mD: np.ndarray, count: int = ANSWERS) -> list[tuple[int, float]]:
    """(position, score) of the items with the highest scores, the earlier of equal ones first."""
    score_m = items_mD @ query_D
    return [(i, float(score_m[i])) for i in np.argsort(-score_m, kind="stable")[:count].tolist()]


def excerpt(text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[str, list[tuple[int, int]]]:
    """(part, spans in it): at most LONGEST characters of a text, from shortly before its first span on if that is late.

    A … stands where the text is cut.
    """
    start = 0
    if spans and spans[0][1] > LONGEST:
        start = text.rfind(" ", 0, max(0, spans[0][0] - BEFORE)) + 1
    shown = text[start : start + LONGEST]
    before, after = "…" if start else "", "…" if start + LONGEST < len(text) else ""
    moved = [(begin - start + len(before), min(end - start, LONGEST) + len(before)) for begin, end in spans]
    return before + shown + after, [(begin, end) for begin, end in moved if begin < end]


def _of_different_groups(order: Sequence[int], groups: Sequence[Hashable], count: int) -> list[int]:
    """The first `count` queries in `order` of different groups, filled up with others if there are too few groups."""
    first: dict[Hashable, int] = {}
    for query in order:
        first.setdefault(groups[query], query)
    further = [query for query in order if first[groups[query]] != query]
    return sorted([*first.values(), *further][:count], key=order.index)

"""Cases for people to look at: a few queries with what each system answered, and what would have been right.

One structure for all tasks. In the JSON of a result: {"gallery": {title: [case, …]}}; what is not known is left out.

    case    {"kind", "query": item, "value": {metric: number}, "systems": {name: [answer, …]}, "right": [item, …]}
    item    {"id", "text", "title", "picture": file in <data set>.pictures/, "spans": [[start, end], …] in the text}
    answer  item + {"score", "right"}

n queries, m items, D embedding width.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ANSWERS = 5  # of a system in one case
RIGHT = 3  # that would have been right
LONGEST = 600  # characters of a text
BEFORE = 200  # characters before a span that a long text begins with


@dataclass(frozen=True)
class Item:
    """A query or an answer. id: of the sample, passage or class; spans: where the text has an answer."""

    id: str
    text: str | None = None
    title: str | None = None
    picture: str | None = None
    spans: Sequence[tuple[int, int]] | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", [])}


@dataclass(frozen=True)
class Answer:
    """One item that a system found."""

    item: Item
    score: float
    right: bool

    def as_json(self) -> dict[str, Any]:
        return {**self.item.as_json(), "score": round(self.score, 4), "right": self.right}


@dataclass(frozen=True)
class Case:
    """One query. kind: best, worst or random; value: how the model fared; systems: whose answers, the best first."""

    kind: str
    query: Item
    value: Mapping[str, float]
    systems: Mapping[str, Sequence[Answer]]
    right: Sequence[Item]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "query": self.query.as_json(),
            "value": dict(self.value),
            "systems": {name: [answer.as_json() for answer in answers] for name, answers in self.systems.items()},
            "right": [item.as_json() for item in self.right],
        }


def choose(
    quality: np.ndarray, sure: np.ndarray, groups: Sequence[Hashable], count: int, seed: int = 0
) -> list[tuple[str, int]]:
    """(kind, query): the `count` best, the `count` worst and `count` random queries of n, none of them twice.

    quality (n,): higher is better. Of equal ones that with the higher `sure` (n,), how certain the model was, comes
    first, then the earlier one: the worst are those where it was confidently wrong. groups (n,): what each query is
    about; a kind has one of a group as long as there are others. Of few queries one half is best, the other worst.
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
        chosen |= dict.fromkeys(_spread(left, groups, most), kind)
    return [(kind, query) for query, kind in chosen.items()]


def best_items(query_D: np.ndarray, items_mD: np.ndarray, count: int = ANSWERS) -> list[tuple[int, float]]:
    """(position, score) of the items with the highest scores, the earlier of equal ones first."""
    score_m = items_mD @ query_D
    return [(i, float(score_m[i])) for i in np.argsort(-score_m, kind="stable")[:count].tolist()]


def excerpt(text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[str, list[tuple[int, int]]]:
    """LONGEST characters of a text, with the first span among them, and the spans that lie there."""
    start = 0
    if spans and spans[0][1] > LONGEST:
        start = text.rfind(" ", 0, max(0, spans[0][0] - BEFORE)) + 1
    shown = text[start : start + LONGEST]
    before, after = "…" if start else "", "…" if start + LONGEST < len(text) else ""
    moved = [(begin - start + len(before), min(end - start, LONGEST) + len(before)) for begin, end in spans]
    return before + shown + after, [(begin, end) for begin, end in moved if begin < end]


def _spread(order: Sequence[int], groups: Sequence[Hashable], count: int) -> list[int]:
    """The first `count` of `order` that are of different groups; filled up where there are not so many groups."""
    first: dict[Hashable, int] = {}
    for query in order:
        first.setdefault(groups[query], query)
    further = (query for query in order if first[groups[query]] != query)
    picks = {*list(first.values())[:count], *list(further)[: max(0, count - len(first))]}
    return [query for query in order if query in picks]

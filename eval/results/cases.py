"""Example cases: a few queries of an evaluation, each with the answers of each system and the right answers.

All evaluators use the same structure. The JSON of a result has it as {"gallery": {title: [case, …]}}; parts that are
not known are left out.

Symbols: n queries.
"""

from collections.abc import Hashable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.eval.metrics.matches import MISSED

ANSWERS = 5  # answers of each system in one case
RIGHT = 3  # right answers in one case
LONGEST = 600  # characters of a text
BEFORE = 200  # characters before the first span of a text that is cut
LONGEST_WORD = 20  # characters; a cut may fall inside a longer word


class Item(TypedDict, total=False):
    """A query or an answer in an example case.

    id: the id of the image, text, passage, class or question. spans: [start, end) of each place in `text` where an
    answer to the question stands. picture: name of a thumbnail file in the folder <data set>.pictures beside the
    result. score, right: given for answers only; right says whether the answer is right.
    """

    id: str | None
    text: str | None
    title: str | None
    picture: str | None
    spans: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None
    score: float | None
    right: bool | None


class Case(TypedDict, total=False):
    """An example case: one query and what was found for it.

    kind: best, worst or random. value: metrics of the query. systems: system name → its answers, best first. right:
    right answers.
    """

    kind: str
    query: Item | None
    value: dict[str, float | None] | None
    systems: dict[str, list[Item]] | None
    right: list[Item] | None


def item(name: str, text: str | None = None, **more: Any) -> Item:
    """Make an Item from its id (`name`), text and other fields; fields that are None, "" or [] are left out."""
    parts = {"id": name, "text": text, **more}
    return Item(**{key: value for key, value in parts.items() if value not in (None, "", [])})


def answer(found: Item, score: float, right: bool) -> Item:
    """Return a copy of the item `found` as an answer of a system, with its score and whether it is right.

    found: an image, passage, text or class. The score is rounded to 4 decimals.
    """
    return {**found, "score": round(score, 4), "right": right}


def ranked_case(kind: str, query: Item, rank: int, answers: Sequence[Item], right: Sequence[Item]) -> Case:
    """Return the Case of a query whose value is the rank of its best right answer.

    kind: "best", "worst" or "random". rank: from 1, or MISSED; the value is then None. answers: the first answers of
    the model, best first. right: some right answers.
    """
    value: dict[str, float | None] = {"rank": None if rank == MISSED else rank}
    return Case(kind=kind, query=query, value=value, systems={"model": [*answers]}, right=[*right])


def choose(quality: np.ndarray, sure: np.ndarray, groups: Sequence[Hashable], count: int) -> list[tuple[str, int]]:
    """Choose the best, worst and random queries of n, at most `count` of each; return (kind, query index) of each.

    kind is "best", "worst" or "random"; no query is chosen twice. quality (n,): how good the results of each query are;
    higher is better. sure (n,): how certain the model was. Of queries with equal quality the most certain one is taken
    first, then the earlier one, so the worst queries are the confident mistakes. groups (n,): the group of each query,
    for example its topic. Each kind has a second query of a group only if there are fewer than `count` groups to choose
    from. If n is less than 2 · count, one half of the queries is "best", the other half "worst".
    """
    n = len(quality)
    plan = (
        ("best", np.lexsort((-sure, -quality)), min(count, -(-n // 2))),
        ("worst", np.lexsort((-sure, quality)), min(count, n // 2)),
        ("random", np.random.default_rng(0).permutation(n), count),
    )
    chosen: dict[int, str] = {}
    for kind, order, most in plan:
        left = [query for query in order.tolist() if query not in chosen]
        chosen |= dict.fromkeys(_of_different_groups(left, groups, most), kind)
    return [(kind, query) for query, kind in chosen.items()]


def excerpt(
    text: str, spans: Sequence[Sequence[int]] = (), longest: int = LONGEST, before: int = BEFORE
) -> tuple[str, list[tuple[int, int]]]:
    """Cut a text to about `longest` characters; return (the excerpt, the spans in the excerpt).

    spans: [start, end) in `text`, ascending. If the first span ends after `longest` characters, the excerpt begins at a
    word about `before` characters before that span, else at the start of the text. Each cut is marked by "…".
    """
    start = 0
    if spans and spans[0][1] > longest:
        start = text.rfind(" ", 0, max(0, spans[0][0] - before)) + 1
    stop = min(start + longest, len(text))
    if stop < len(text) and (blank := text.rfind(" ", stop - LONGEST_WORD, stop)) > 0:
        stop = blank
    first, last = "…" if start else "", "…" if stop < len(text) else ""
    moved = [(begin - start + len(first), min(end, stop) - start + len(first)) for begin, end in spans]
    return first + text[start:stop] + last, [(begin, end) for begin, end in moved if begin < end]


def _of_different_groups(order: Sequence[int], groups: Sequence[Hashable], count: int) -> list[int]:
    """Choose at most `count` of the query indices in `order`, from as many different groups as possible.

    The first query of each group is chosen first; then, if these are fewer than `count`, other queries of the same
    groups. They are returned in the order that they have in `order`. groups: the group of each query, by query index.
    """
    first: dict[Hashable, int] = {}
    for query in order:
        first.setdefault(groups[query], query)
    further = [query for query in order if first[groups[query]] != query]
    return sorted([*first.values(), *further][:count], key=order.index)

"""The printed summary of `python -m data negatives`: number of questions, ranks of positives, numbers of negatives."""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyad.data.question_passage.questions import QuestionRow

LETTERS = 90  # the most characters of a text in an example


@dataclass
class Summary:
    """Statistics of the questions that were added so far.

    without: number of questions without a positive, by reason. ranks: for each row (question with a positive) the rank,
    from 1, of its best positive, inf if BM25 did not find it. positives, negatives: the number of each that each row
    has.
    """

    without: Counter[str] = field(default_factory=Counter)
    ranks: "array[float]" = field(default_factory=lambda: array("d"))
    positives: "array[int]" = field(default_factory=lambda: array("q"))
    negatives: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, head: dict[str, Any]) -> None:
        """Add a question.

        head: {"why": the reason why it has no positive}, or {"rank": the rank of its best positive or None,
        "positives": their number, "negatives": their number}.
        """
        if "why" in head:
            self.without[head["why"]] += 1
            return
        self.ranks.append(float("inf") if head["rank"] is None else head["rank"])
        self.positives.append(head["positives"])
        self.negatives.append(head["negatives"])

    @property
    def reasons(self) -> str:
        """The reasons why questions have no positive, each with its number of questions, as text for a message."""
        return ", ".join(f"{why}: {count:,}" for why, count in self.without.most_common())

    def lines(self, depth: int) -> Iterator[str]:
        """Yield the lines of the summary; at least one question with a positive must have been added.

        depth: the most passages that BM25 found for a question.
        """
        rows, dropped = len(self.negatives), self.without.total()
        ranks, negatives = np.asarray(self.ranks), np.asarray(self.negatives)
        missed, none = int(np.isinf(ranks).sum()), int((negatives == 0).sum())
        share, reasons = dropped / (rows + dropped), f": {self.reasons}" if dropped else ""
        yield f"{rows + dropped:,} questions: {rows:,} with a positive, {dropped:,} dropped ({share:.1%}){reasons}"
        yield f"positives of a row: {np.mean(self.positives):.2f}"
        yield f"hard negatives of a row: {np.mean(negatives):.2f}; rows without any: {none:,}"
        if none == rows:
            yield "warning: no row has a hard negative: BM25 found no wrong passage of any question"
        yield f"rank of the best positive: median {np.median(ranks):g}; not in the best {depth}: {missed / rows:.1%}"


def example(row: QuestionRow) -> Iterator[str]:
    """Yield lines for a row: its question, its first positive and its first hard negative, if any, each cut short."""
    passages = (("+", row.positives), ("-", row.hard_negatives))
    texts = [("?", row.question.text), *((sign, f"{p[0].title} {p[0].text}") for sign, p in passages if len(p))]
    yield from (f"  {sign} {' '.join(text.split()):.{LETTERS}}" for sign, text in texts)

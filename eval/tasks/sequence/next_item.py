"""Next-item prediction: the rank of the item that a user chose among all items, given the items chosen before.

HR@K is the share of events whose item is among the first K, nDCG@K the mean over events of 1 / log2(1 + rank), with 0
for ranks above K, and MRR the mean of 1 / rank. Each event has one right item, as in Kang & McAuley 2018 (SASRec),
section IV.C, but it is ranked among all items: metrics among sampled items may order models wrongly (Krichene & Rendle
2020). With data.items=ids, an item that does not occur in training has no embedding, and counts as not found.

Symbols: n events; N items; D embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyad.data.sequence.histories import NextItems
from dyad.eval.config import Baseline
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.encode.histories import encode_histories
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.matches import MISSED, Labels, Matches
from dyad.eval.results.cases import ANSWERS, Case, Item, answer, choose, item, ranked_case
from dyad.eval.search.index import Index
from dyad.eval.search.index_spec import EXACT
from dyad.eval.search.ranks import Ranked, ranked
from dyad.eval.tasks.baselines import skip_on_error, untrained_encoder
from dyad.eval.tasks.sequence.next_item_baselines import SCORERS, ranks_by
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.eval_config import Seen


@dataclass(frozen=True)
class NextItem(Evaluator):
    """Evaluator of next-item prediction on one log of events.

    data: the events to predict, with their histories. recall_k: each K of HR@K and nDCG@K. seen: whether the items of a
    history, except the right item, can be answers (keep) or not (drop). index: specification of a FAISS index; "Flat"
    is exact, an approximate one finds `depth` items for each history, or the largest K if that is more. baselines:
    those of SCORERS that the model is compared with; other names are not read. history: the files of events that only
    histories have.
    """

    data: NextItems
    recall_k: Sequence[int]
    seen: Seen
    index: str = EXACT
    depth: int = 100
    baselines: Sequence[Baseline] = ()
    history: Sequence[str] = ()

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        own, found = self._ranked(encode)
        values = self._values(found.ranking.rank)
        details: dict[str, Any] = {"seen": str(self.seen), "history": [*self.history], "search": found.how}
        details["baselines"] = {}
        for baseline in (baseline for baseline in SCORERS if baseline in self.baselines):
            with skip_on_error(baseline):
                rank = from_rank_0(encode.world, lambda b=baseline: ranks_by(SCORERS[b], self.data, self.seen, b))
                details["baselines"][str(baseline)] = comparison(values, self._values(rank), self._groups)
        if before := untrained_encoder(self.untrained, encode.world):
            rank = self._ranked(before)[1].ranking.rank
            details["baselines"]["untrained"] = comparison(values, self._values(rank), self._groups)
        average = summary(values, self._groups) if examples is not None or details["baselines"] else None
        metrics = average["metrics"] if average else {name: float(v.mean()) for name, v in values.items()}
        details |= {"intervals": average["intervals"]} if average else {}
        if examples:
            details["gallery"] = {"history → next item": self._cases(own, found, examples)}
        return Report("next_item", {**metrics, **found.recall_metrics, **self._sizes()}, self._chance(), details)

    def higher_is_better(self) -> dict[str, bool]:
        return {**{f"{name}@{k}": True for name in ("HR", "nDCG") for k in self.recall_k}, "MRR": True}

    def _ranked(self, encode: Encoder) -> tuple[tuple[np.ndarray, np.ndarray], Ranked]:
        """Return ((embeddings of histories, (n, D), embeddings of items, (N, D)), the ranks of the right items).

        All processes must call it together.
        """
        x_nD, items_ND = encode_histories(encode, self.data)
        n, count = len(self.data), len(items_ND)
        known = self.data.target_n < count
        every = Labels(np.arange(count), np.arange(count), count)
        right = Matches(Labels(np.flatnonzero(known), self.data.target_n[known], n), every)
        hidden = None
        if self.seen is Seen.drop:
            event, seen = self.data.seen()
            hidden = Matches(Labels(event, seen, n), every)
        found = ranked(x_nD, items_ND, right, self.index, max(self.depth, *self.recall_k), encode.world, hidden)
        return (x_nD, items_ND), found

    def _values(self, rank: np.ndarray) -> Values:
        """Return metric → its value for each event, float64 (n,).

        rank (n,): the rank of the right item of each event, from 1, or MISSED.
        """
        gain = np.where(rank == MISSED, 0.0, 1 / np.log2(1.0 + rank))
        hits = {k: rank <= k for k in self.recall_k}
        return {
            **{f"HR@{k}": 1.0 * hit for k, hit in hits.items()},
            **{f"nDCG@{k}": gain * hit for k, hit in hits.items()},
            "MRR": np.where(rank == MISSED, 0.0, 1.0 / rank),
        }

    def _groups(self, metric: str) -> list[int]:
        return self.data.user_n.tolist()

    def _sizes(self) -> dict[str, float]:
        count = len(self.data.items)
        sizes = {
            "events": len(self.data),
            "items": count,
            "unknown": (self.data.target_n >= count).sum(),
            "repeats": self.data.repeated_n.sum(),
            "without_history": self.data.without_history,
        }
        return {f"num_{name}": float(size) for name, size in sizes.items()}

    def _chance(self) -> dict[str, float]:
        """Return metric → its expected value if the items that can be answers are ranked at random.

        These are all N items, or, with seen=drop, all but the other items of the history of each event.
        """
        count = len(self.data.items)
        size_n = np.full(len(self.data), count)
        if self.seen is Seen.drop:
            size_n -= np.bincount(self.data.seen()[0], minlength=len(self.data))
        known, up_to = size_n[self.data.target_n < count], np.arange(1, count + 1)
        values = self._values(up_to)
        return {name: float((np.cumsum(v) / up_to)[known - 1].sum()) / len(self.data) for name, v in values.items()}

    def _cases(self, own: tuple[np.ndarray, np.ndarray], found: Ranked, examples: int) -> list[Case]:
        ranking = found.ranking
        chosen = choose(-ranking.rank, np.abs(ranking.best - ranking.best_wrong), self._groups(""), examples)
        events = np.array([event for _, event in chosen])
        index = Index(own[1])
        hits = index.search(own[0][events], ANSWERS + max(len(self.data.before(event)) for event in events.tolist()))
        return [
            self._case(kind, event, int(ranking.rank[event]), hits.found(row))
            for row, (kind, event) in enumerate(chosen)
        ]

    def _case(self, kind: str, event: int, rank: int, found: Sequence[tuple[int, float]]) -> Case:
        before, target = self.data.before(event), int(self.data.target_n[event])
        dropped = {*before.tolist()} - {target} if self.seen is Seen.drop else set[int]()
        shown = [(number, score) for number, score in found if number not in dropped][:ANSWERS]
        answers = [answer(self._item(number), score, number == target) for number, score in shown]
        return ranked_case(
            kind, item(self.data.name(event), self.data.text(event)), rank, answers, [self._item(target)]
        )

    def _item(self, number: int) -> Item:
        name, items = self.data.log.items[number], self.data.items
        return item(name, items.shown(number) if number < len(items) else name)

"""Metrics of passage retrieval: values of each question, means with intervals, differences of systems, and chance.

For judged questions (qrels): nDCG@10, Recall@100, MRR@10, MAP@100, Success@k. For questions with answers: DPR's
accuracy@k. A judged question counts as zero if it finds nothing, or if it is not asked because it has no right passage.
Intervals have 95 % and come from the bootstrap over groups of questions (for example topics), also for differences.

n questions with a value, m passages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from dyad.eval.config import AnswerMatch
from dyad.eval.metrics.answers import TOP_K, Span, prepared, top_k_accuracy
from dyad.eval.metrics.bootstrap import group_means, interval
from dyad.eval.metrics.trec import Qrels, Run, measures, ranked
from dyad.eval.tasks.image_text_retrieval import chance_recall
from dyad.eval.tasks.question_sets import QuestionSet

JUDGED = ("nDCG@10", "Recall@100", "MRR@10", "MAP@100", *(f"Success@{k}" for k in TOP_K))
DEEP = "Recall@1000"  # if so many passages are searched for

Values = dict[str, np.ndarray]  # metric → (n,) values, one per question


class Judge:
    """Decides which passages are right for the questions of a set. mode: as in eval.answers."""

    def __init__(self, data: QuestionSet, mode: AnswerMatch, depth: int) -> None:
        self._data = data
        self._names = (*JUDGED, DEEP) if depth >= 1000 else JUDGED
        group = {question.id: question.group for question in data.questions}
        self._judged = [group.get(query) for query in data.qrels]
        self._answered = [question for question in data.questions if question.answers]
        self._answers = {question.id: prepared(question.answers, mode) for question in self._answered}
        self._hits: dict[tuple[str, str], bool] = {}

    def values(self, run: Run) -> Values:
        """All metrics of a run, question by question."""
        of_judged = measures(self._data.qrels, run, self._names) if self._data.qrels else {}
        values = {name: np.array([of[query] for query in self._data.qrels]) for name, of in of_judged.items()}
        if self._answered:
            hits = [self.hits(question.id, run) for question in self._answered]
            values |= top_k_accuracy(hits)
        return values

    def groups(self, metric: str) -> Sequence[Hashable]:
        """(n,) the group of the question of each value of a metric; None if it has no group."""
        accuracy = metric.startswith("accuracy@")
        return [question.group for question in self._answered] if accuracy else self._judged

    def hits(self, question: str, run: Run) -> list[bool]:
        """Whether each of the first 100 passages of a question contains an answer."""
        return [self.hit(question, passage) for passage, _ in ranked(run.get(question, {}), max(TOP_K))]

    def hit(self, question: str, passage: str) -> bool:
        """Whether a passage contains an answer; False for a question without answers."""
        if question not in self._answers:
            return False
        if (question, passage) not in self._hits:
            text = self._data.corpus[int(self._data.corpus.positions([passage])[0])].text
            self._hits[question, passage] = self._answers[question].within(text)
        return self._hits[question, passage]

    def spans(self, question: str, text: str) -> list[Span]:
        """[start, end) of the answers in a text; [] for a question without answers."""
        return self._answers[question].spans(text) if question in self._answers else []

    def per_question(self, run: Run, values: Values) -> tuple[str, dict[str, float]]:
        """(metric, {question: value}) by which questions are ordered: nDCG@10 if there are judgements, else 1 / rank of
        the first passage with an answer.
        """
        if self._data.qrels:
            return "nDCG@10", dict(zip(self._data.qrels, values["nDCG@10"].tolist(), strict=True))
        hits = {question.id: self.hits(question.id, run) for question in self._answered}
        return "RR@100", {name: 1 / (1 + of.index(True)) if True in of else 0.0 for name, of in hits.items()}

    def right(self, question: str, passage: str) -> bool:
        """Whether a passage is judged right; without judgements, whether it contains an answer."""
        if self._data.qrels:
            return self._data.qrels.get(question, {}).get(passage, 0) > 0
        return self.hit(question, passage)


def summary(values: Values, judge: Judge) -> dict[str, dict[str, Any]]:
    """{"metrics": means over questions, "intervals": of these means, "over_groups": means of the means of groups}.

    A metric whose questions have no groups is not in "over_groups".
    """
    groups = {name: judge.groups(name) for name in values}
    return {
        "metrics": {name: float(v.mean()) for name, v in values.items()},
        "intervals": {name: interval(v, groups[name]) for name, v in values.items()},
        "over_groups": {name: float(group_means(v, g).mean()) for name, v in values.items() if any(g := groups[name])},
    }


def differences(values: Values, others: Values, judge: Judge) -> dict[str, dict[str, Any]]:
    """{metric: {"value", "interval"}} of the mean of `values` minus `others`, question by question."""
    by_question = {name: v - others[name] for name, v in values.items()}
    return {
        name: {"value": float(d.mean()), "interval": interval(d, judge.groups(name))} for name, d in by_question.items()
    }


def chance(qrels: Qrels, m: int) -> dict[str, float]:
    """The expected values of m passages in a random order, for the measures with a closed form."""
    if not qrels:
        return {}
    grades = [np.array([g for g in of.values() if g > 0], dtype=np.float64) for of in qrels.values()]
    right = np.array([len(g) for g in grades])
    success = [0.0, *(chance_recall(right, m, k) for k in range(1, 11))]
    return {
        "nDCG@10": float(np.mean([_chance_ndcg(g, m, 10) for g in grades])),
        "Recall@100": min(100, m) / m * float((right > 0).mean()),
        "MRR@10": sum((success[r] - success[r - 1]) / r for r in range(1, 11)),
        **{f"Success@{k}": chance_recall(right, m, k) for k in TOP_K},
    }


def _chance_ndcg(grades: np.ndarray, m: int, k: int) -> float:
    if not len(grades):
        return 0.0
    discount = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.sort(grades)[::-1][:k]
    return float(grades.sum() / m * discount[: min(k, m)].sum() / (ideal * discount[: len(ideal)]).sum())

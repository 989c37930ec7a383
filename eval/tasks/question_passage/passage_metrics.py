"""Metrics of passage retrieval: the values of each question, and chance levels (the scores of a random ranking).

Questions with judgements (qrels: question → passage → grade) get nDCG@10, Recall@100, MRR@10, MAP@100 and Success@K,
and Recall@1000 if so many passages are found for a question. Questions with answers get DPR's accuracy@K. A judged
question counts as zero if nothing is found for it, or if it is not searched for because it has no right passage.
eval/metrics/bootstrap.py computes means and intervals of the values.

Symbols: n questions that have a value, m passages of the corpus.
"""

from collections.abc import Hashable, Sequence
from functools import cache

import numpy as np

from dyad.data.config import AnswerMatch
from dyad.data.question_passage.answers import Span, answer_finder
from dyad.eval.metrics.accuracy import TOP_K, top_k_accuracy
from dyad.eval.metrics.bootstrap import Values
from dyad.eval.metrics.trec import Qrels, Run, measures, ranked
from dyad.eval.tasks.direction import chance_recall
from dyad.eval.tasks.question_passage.question_sets import QuestionSet, SearchedCorpus

JUDGED = ("nDCG@10", "Recall@100", "MRR@10", "MAP@100", *(f"Success@{k}" for k in TOP_K))
DEEP = "Recall@1000"  # computed if at least 1000 passages are found for each question


class Judge:
    """Decides which passages are right for the questions of a set, and computes the metrics of a run.

    A run is question id → passage id → score; its passages must be in the corpus of the set. data: the question set.
    mode: whether answers are strings or regular expressions. depth: the number of passages found for each question;
    from 1000 on, Recall@1000 is computed too. hit(question, passage): whether the passage contains an answer to the
    question, both given by id (cached).
    """

    def __init__(self, data: QuestionSet, mode: AnswerMatch, depth: int) -> None:
        self._data = data
        self._names = (*JUDGED, DEEP) if depth >= 1000 else JUDGED
        group = {question.id: question.group for question in data.questions}
        self._judged = [group.get(query) for query in data.qrels]
        self._answered = [question for question in data.questions if question.answers]
        self._answers = {question.id: answer_finder(question.answers, mode) for question in self._answered}
        self.hit = cache(self._hit)

    def values(self, run: Run) -> Values:
        """Compute all metrics of a run; return metric → its value for each of n questions, float64 (n,).

        run: question id → passage id → score. The n questions are those with answers for accuracy@K, and those with
        judgements for all other metrics.
        """
        of_judged = measures(self._data.qrels, run, self._names) if self._data.qrels else {}
        values = {name: np.array([of[query] for query in self._data.qrels]) for name, of in of_judged.items()}
        if self._answered:
            values |= top_k_accuracy([self.hits(question.id, run) for question in self._answered])
        return values

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that `values` computes."""
        of_answers = [f"accuracy@{k}" for k in TOP_K] if self._answered else []
        return [*(self._names if self._data.qrels else ()), *of_answers]

    def groups(self, metric: str) -> Sequence[Hashable]:
        """Return the group (for example the topic) of each question that has a value of this metric; None: no group.

        The order is that in which the method `values` returns the questions.
        """
        return [question.group for question in self._answered] if metric.startswith("accuracy@") else self._judged

    def hits(self, question: str, run: Run) -> list[bool]:
        """Return whether each of the first 100 passages found for a question, best first, contains an answer.

        question: the id of the question. run: question id → passage id → score. The result is [] if nothing is found.
        """
        return [self.hit(question, passage) for passage, _ in ranked(run.get(question, {}), max(TOP_K))]

    def _hit(self, question: str, passage: str) -> bool:
        """Whether a passage contains an answer to a question, both given by id; False for questions without answers.

        The passage must be in the corpus: an unknown id is not noticed.
        """
        if question not in self._answers:
            return False
        return self._answers[question].within(self._data.corpus[int(self._data.corpus.positions([passage])[0])].text)

    def spans(self, question: str, text: str) -> list[Span]:
        """Return [start, end) of each answer in `text`; [] if the question has no answers.

        question: the id of the question.
        """
        return self._answers[question].spans(text) if question in self._answers else []

    def per_question(self, run: Run, values: Values) -> tuple[str, dict[str, float]]:
        """Return the metric by which questions are ordered from best to worst, as (its name, question id → value).

        It is nDCG@10 if the question set has judgements. Otherwise it is RR@100: 1 / (rank of the first passage with an
        answer), or 0 if none of the first 100 has an answer. run: question id → passage id → score. values: the metrics
        of `run`, computed by the method `values`.
        """
        if self._data.qrels:
            return "nDCG@10", dict(zip(self._data.qrels, values["nDCG@10"].tolist(), strict=True))
        hits = {question.id: self.hits(question.id, run) for question in self._answered}
        return "RR@100", {name: 1 / (1 + of.index(True)) if True in of else 0.0 for name, of in hits.items()}

    def right(self, question: str, passage: str) -> bool:
        """Whether a passage is right for a question, both given by id.

        If the set has judgements, a grade above 0 is right; otherwise a passage that contains an answer is right.
        """
        if self._data.qrels:
            return self._data.qrels.get(question, {}).get(passage, 0) > 0
        return self.hit(question, passage)


def chance(qrels: Qrels, corpus: SearchedCorpus) -> dict[str, float]:
    """Return metric → chance level for nDCG@10, Recall@100, MRR@10 and Success@K.

    The chance level is the expected value, averaged over questions, if the passages of the corpus are ranked at random;
    a right passage that is not in the corpus is never found. qrels: question id → passage id → grade. Without
    judgements the result is {}.
    """
    if not qrels:
        return {}
    m, judged = len(corpus), [{name: grade for name, grade in of.items() if grade > 0} for of in qrels.values()]
    grades = [np.array([*of.values()], dtype=np.float64) for of in judged]
    found = [of[corpus.positions([*names]) >= 0] for of, names in zip(grades, judged, strict=True)]  # in the corpus
    right = np.array([len(of) for of in found])
    success = [0.0, *(chance_recall(right, m, k) for k in range(1, 11))]
    return {
        "nDCG@10": float(np.mean([_chance_ndcg(*of, m, 10) for of in zip(grades, found, strict=True)])),
        "Recall@100": min(100, m) / m * float(np.mean(right / np.maximum([len(of) for of in grades], 1))),
        "MRR@10": sum((success[r] - success[r - 1]) / r for r in range(1, 11)),
        **{f"Success@{k}": chance_recall(right, m, k) for k in TOP_K},
    }


def _chance_ndcg(grades: np.ndarray, found: np.ndarray, m: int, k: int) -> float:
    """Return the expected nDCG@k of one question if m passages are ranked at random.

    grades: of its right passages. found: of those that are among the m passages.
    """
    if not len(grades):
        return 0.0
    discount = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.sort(grades)[::-1][:k]
    return float(found.sum() / m * discount[: min(k, m)].sum() / (ideal * discount[: len(ideal)]).sum())

"""Evaluate a language model on answers: accuracy of its choice among them, and likelihood of the right ones.

choice_accuracy is the share of prompts, of those with wrong answers, whose best right answer has a higher score than
every wrong one. The score is that of training, the mean log-likelihood of a token of the answer. log_likelihood is the
mean over prompts of the score of the right answers, perplexity exp(−(1/T) Σ log p) over the T tokens of all right
answers.

Letters in shapes: n prompts; N answers of all of them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dyad.data.question_passage.prompts import AnswerLists
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.results.cases import ANSWERS, RIGHT, Case, Item, answer, choose, excerpt, item, ranked_case
from dyad.eval.tasks.baselines import untrained_encoder


@dataclass(frozen=True)
class Answers(Evaluator):
    """Evaluator of a language model on prompts with right and wrong answers. data: the prompts and their answers."""

    data: AnswerLists

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        score_N = self.scores(encode)
        values, details = self.values(score_N), {"baselines": dict[str, Any]()}
        metrics = {name: float(v.mean()) for name, v in values.items()} | {"perplexity": self._perplexity(score_N)}
        if before := untrained_encoder(self.untrained, encode.world):
            others_N = self.scores(before)
            found = comparison(values, self.values(others_N), self.groups)
            found["metrics"]["perplexity"] = self._perplexity(others_N)
            details["baselines"]["untrained"] = found
        if examples is not None:
            details["intervals"] = summary(values, self.groups)["intervals"]
        if examples:
            details["gallery"] = {"prompt → answer": self.cases(score_N, examples)}
        sizes = {"num_prompts": float(len(self.data.prompts)), "num_answers": float(len(self.data))}
        return Report("answers", {**metrics, **sizes}, self.chance(), details)

    def higher_is_better(self) -> dict[str, bool]:
        return {**dict.fromkeys(self.chance(), True), "log_likelihood": True, "perplexity": False}

    def scores(self, encode: Encoder) -> np.ndarray:
        """Return the score of each answer, the mean log-likelihood of its tokens after its prompt, float64 (N,).

        encode: its y tower must be that of a language model. All processes must call it together.
        """
        return replace(encode, cosine=False, features=False)("y", self.data)[:, 0].astype(np.float64)

    @property
    def _counts(self) -> np.ndarray:
        """The number of wrong and of right answers of each prompt, (2, n)."""
        row_N, right_N, n = self.data.row_N, self.data.right_N, len(self.data.prompts)
        return np.stack([np.bincount(row_N[right_N == right], minlength=n) for right in (False, True)])

    def _ranks(self, score_N: np.ndarray) -> np.ndarray:
        """Return the rank, from 1, of the best right answer of each prompt, int64 (n,).

        Of equal scores wrong answers come first. score_N: the scores of all answers.
        """
        row_N, right_N, n = self.data.row_N, self.data.right_N, len(self.data.prompts)
        best_n = np.full(n, -np.inf)
        np.maximum.at(best_n, row_N[right_N], score_N[right_N])
        before_N = ~right_N & (score_N >= best_n[row_N])
        return 1 + np.bincount(row_N[before_N], minlength=n)

    def values(self, score_N: np.ndarray) -> Values:
        """Return metric → its value for each prompt that has one.

        choice_accuracy has a value for the prompts that have wrong answers, and is left out if there are none;
        log_likelihood for all n prompts. score_N: the scores of all answers.
        """
        (wrong_n, right_n), right_N = self._counts, self.data.right_N
        likelihood_n = np.bincount(self.data.row_N[right_N], score_N[right_N]) / right_n
        chosen = {"choice_accuracy": 1.0 * (self._ranks(score_N) == 1)[wrong_n > 0]} if wrong_n.any() else {}
        return {**chosen, "log_likelihood": likelihood_n}

    def groups(self, metric: str) -> Sequence[Hashable]:
        """Return the group of each prompt that has a value of `metric`, in the order of `values`."""
        wrong_n = self._counts[0]
        return [q.group for q, n in zip(self.data.prompts, wrong_n, strict=True) if n or metric != "choice_accuracy"]

    def _perplexity(self, score_N: np.ndarray) -> float:
        """Return exp of minus the mean log-likelihood of a token over all right answers.

        score_N: the scores of all answers.
        """
        right = np.flatnonzero(self.data.right_N)
        tokens = self.data.token_counts(right)
        return float(np.exp(-(tokens * score_N[right]).sum() / tokens.sum()))

    def chance(self) -> dict[str, float]:
        """Return {"choice_accuracy": its value for random scores}; {} if no prompt has a wrong answer."""
        wrong_n, right_n = self._counts
        several = wrong_n > 0
        return {"choice_accuracy": float((right_n / (right_n + wrong_n))[several].mean())} if several.any() else {}

    def cases(self, score_N: np.ndarray, examples: int) -> list[Case]:
        """Return at most `examples` example cases of each kind (best, worst, random), of prompts with wrong answers.

        score_N: the scores of all answers.
        """
        several = np.flatnonzero(self._counts[0])
        rank_n = self._ranks(score_N)[several]
        starts = np.searchsorted(self.data.row_N, np.arange(len(self.data.prompts) + 1))
        spread = np.array([np.ptp(score_N[starts[row] : starts[row + 1]]) for row in several.tolist()])
        chosen = choose(-rank_n, spread, [self.data.prompts[row].group or row for row in several.tolist()], examples)
        return [
            self._case(kind, row := int(several[i]), int(rank_n[i]), np.arange(starts[row], starts[row + 1]), score_N)
            for kind, i in chosen
        ]

    def _case(self, kind: str, row: int, rank: int, own: np.ndarray, score_N: np.ndarray) -> Case:
        prompt, right_N = self.data.prompts[row], self.data.right_N
        order = own[np.argsort(-score_N[own], kind="stable")].tolist()
        found = [answer(self._item(number), float(score_N[number]), bool(right_N[number])) for number in order]
        right = [self._item(number) for number in order if right_N[number]][:RIGHT]
        query = item(prompt.id or f"row {row + 1}", excerpt(prompt.text)[0])
        return ranked_case(kind, query, rank, found[:ANSWERS], right)

    def _item(self, number: int) -> Item:
        """Return the entry of answer `number` in an example case."""
        return item(str(number), excerpt(self.data.answers[number].text)[0])

"""Evaluate an encoder on pairs of texts with a score, such as the similarity that people gave (STS).

spearman and pearson are the correlations of the model's scores of the pairs, cosines or inner products, with the given
scores, as in sentence-transformers' EmbeddingSimilarityEvaluator. Of a model with two encoders, that of questions
embeds the first text of a pair, and that of passages the second, as in training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dyad.data.config import PassageConfig, QuestionConfig
from dyad.data.question_passage.dataset import TextInputs, TokenizeTexts
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.correlation import pearson_values, spearman_values
from dyad.eval.tasks.baselines import untrained_encoder
from dyad.eval.tasks.question_passage.pair_sets import ScoredPairSet


@dataclass(frozen=True)
class PairCorrelation(Evaluator):
    """Evaluator of the order of scored pairs. data: the pairs. tokenize: the tokenizer of the model. question, passage:
    how the texts of x and y are made."""

    data: ScoredPairSet
    tokenize: TokenizeTexts
    question: QuestionConfig
    passage: PassageConfig

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        values, details = self._values(encode), dict[str, Any]()
        if examples is not None:
            details["intervals"] = summary(values, self._groups)["intervals"]
        if before := untrained_encoder(self.untrained, encode.world):
            details["baselines"] = {"untrained": comparison(values, self._values(before), self._groups)}
        metrics = {name: float(v.mean()) for name, v in values.items()} | {"num_pairs": float(len(self.data.score_P))}
        return Report("scored_pairs", metrics, dict.fromkeys(values, 0.0), details)

    def higher_is_better(self) -> dict[str, bool]:
        return {"spearman": True, "pearson": True}

    def _groups(self, metric: str) -> list[str | None]:
        return [question.group for question in self.data.questions]

    def _values(self, encode: Encoder) -> Values:
        """Return metric → (P,) values of the pairs, whose mean is the metric. All processes must call it together."""
        x_PD = self._embeddings(partial(encode, "x"), self.data.questions, self.question)
        y_PD = self._embeddings(partial(encode, "y"), self.data.passages, self.passage)
        found_P = np.einsum("pd,pd->p", x_PD, y_PD, dtype=np.float64)
        return {
            "spearman": spearman_values(found_P, self.data.score_P),
            "pearson": pearson_values(found_P, self.data.score_P),
        }

    def _embeddings(self, encode: Callable[[TextInputs], np.ndarray], texts: Sequence[Any], config: Any) -> np.ndarray:
        """Return the embeddings of P texts, float32 (P, D). Equal texts are encoded once.

        encode: function from inputs of one tower to their embeddings. config: how the texts are made.
        """
        _, first, number = np.unique([text.key for text in texts], return_index=True, return_inverse=True)
        return encode(TextInputs.of([texts[i] for i in first], self.tokenize, config))[number]

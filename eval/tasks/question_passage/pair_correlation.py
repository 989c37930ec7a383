"""Evaluate an encoder on pairs of texts with a score, such as the similarity that people gave (STS).

spearman and pearson are the correlations of the model's scores of the pairs, cosines or inner products, with the given
scores, as in sentence-transformers' EmbeddingSimilarityEvaluator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyad.data.config import PassageConfig, QuestionConfig
from dyad.data.question_passage.dataset import TextInputs, TokenizeTexts
from dyad.data.question_passage.passages import Passage, Question
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.correlation import pearson_values, spearman_values
from dyad.eval.tasks.baselines import before_training
from dyad.eval.tasks.question_passage.scored_pairs import ScoredPairs


@dataclass(frozen=True)
class PairCorrelation(Evaluator):
    """Evaluator of the order of scored pairs. data: the pairs. tokenize: the tokenizer of the model. question, passage:
    how the texts of x and y are made."""

    data: ScoredPairs
    tokenize: TokenizeTexts
    question: QuestionConfig
    passage: PassageConfig

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        values, details = self._values(encode), dict[str, Any]()
        groups = self.data.groups
        if examples is not None:
            details["intervals"] = summary(values, lambda metric: groups)["intervals"]
        if before := before_training(self.untrained, encode.world):
            details["baselines"] = {"untrained": comparison(values, self._values(before), lambda metric: groups)}
        metrics = {name: float(v.mean()) for name, v in values.items()} | {"num_pairs": float(len(groups))}
        return Report("scored_pairs", metrics, dict.fromkeys(values, 0.0), details)

    def higher_is_better(self) -> dict[str, bool]:
        return {"spearman": True, "pearson": True}

    def _values(self, encode: Encoder) -> Values:
        """Return metric → (P,) values of the pairs, whose mean is the metric. All processes must call it together."""
        x, y = encode("x", self._texts(self.data.questions)), encode("y", self._texts(self.data.passages))
        found_P = np.einsum("pd,pd->p", x[self.data.x_P], y[self.data.y_P], dtype=np.float64)
        return {
            "spearman": spearman_values(found_P, self.data.score_P),
            "pearson": pearson_values(found_P, self.data.score_P),
        }

    def _texts(self, texts: Sequence[Question] | Sequence[Passage]) -> TextInputs:
        config = self.question if isinstance(texts[0], Question) else self.passage
        return TextInputs(texts.__getitem__, np.array([len(t.text.encode()) for t in texts]), self.tokenize, config)

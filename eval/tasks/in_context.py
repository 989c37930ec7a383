"""In-context evaluation of a model that finds examples: how well a language model answers after such an example.

For each question the model finds one example, which is put before the question; the language model then chooses among
the answers (Rubin et al. 2022, section 5). Baselines are the examples that BM25 finds, random examples, and no example.

Letters in shapes: n questions; m examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from dyad.data.config import DataConfig
from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.question_passage.dataset import TextInputs, TokenizeTexts
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.prompts import AnswerLists
from dyad.data.shards.content_keys import Int64s
from dyad.eval.config import Baseline
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import comparison, summary
from dyad.eval.search.index import Index
from dyad.eval.tasks.answers import Answers
from dyad.eval.tasks.baselines import skip_on_error
from dyad.train.distributed.agreement import from_rank_0

NONE = -1  # in place of the index of an example: no example


@dataclass(frozen=True)
class InContext(Evaluator):
    """Evaluator of a model that finds an example for each question, by the answers of a language model.

    data: questions with right and wrong answers, tokenised for the language model. examples (m,): texts to put before a
    question. scorer: the y tower of the language model. tokenize, config: the tokenizer and the data options of the
    model that finds the examples.
    """

    data: AnswerLists
    examples: Sequence[str]
    scorer: nn.Module
    tokenize: TokenizeTexts
    config: DataConfig

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        found = {"model": self._by_model(encode), **from_rank_0(encode.world, self._others)}
        scores = {name: self._with(found_n).scores(self._scorer(encode)) for name, found_n in found.items()}
        own = self._with(found["model"])
        values = {name: own.values(score_N) for name, score_N in scores.items()}
        of_model = values.pop("model")
        details: dict[str, Any] = {
            "baselines": {name: comparison(of_model, others, own.groups) for name, others in values.items()},
            "intervals": summary(of_model, own.groups)["intervals"],
        }
        if examples:
            details["gallery"] = {"prompt → answer": own.cases(scores["model"], examples)}
        metrics = {name: float(v.mean()) for name, v in of_model.items()}
        sizes = {"num_prompts": float(len(self.data.prompts)), "num_examples": float(len(self.examples))}
        return Report("in_context", {**metrics, **sizes}, own.chance(), details)

    def higher_is_better(self) -> dict[str, bool]:
        answers = Answers(self.name, self.source, self.data)
        return {**dict.fromkeys(answers.chance(), True), "log_likelihood": True}

    def _scorer(self, encode: Encoder) -> Encoder:
        """Return an Encoder with the language model as its y tower, which is moved to the device of this process."""
        return replace(encode, towers={"y": self.scorer.to(encode.world.device)}, width=None)  # a score is one number

    def _with(self, found_n: Int64s) -> Answers:
        """Return the evaluator of the questions with an example before each.

        found_n (n,): the index of the example of each question; NONE: no example.
        """
        before = [self.examples[int(i)] if i != NONE else "" for i in found_n.tolist()]
        prompts = [replace(q, text=text + q.text) for q, text in zip(self.data.prompts, before, strict=True)]
        return Answers(self.name, self.source, replace(self.data, prompts=prompts))

    def _by_model(self, encode: Encoder) -> Int64s:
        """Return the index of the example that the model finds for each question, int64 (n,).

        All processes must call it together.
        """
        questions, passages = self.data.prompts, [Passage(text) for text in self.examples]
        x = TextInputs.of(questions, self.tokenize, self.config.question)
        y = TextInputs.of(passages, self.tokenize, self.config.passage)
        return Index(encode("y", y), world=encode.world).search(encode("x", x), 1).positions[:, 0]

    def _others(self) -> dict[str, Int64s]:
        """Return name of a baseline → the index of the example for each question, int64 (n,).

        The baselines are "bm25" (NONE where BM25 finds no example; left out if it fails), "random" and "no_prompt"
        (always NONE).
        """
        n, found = len(self.data.prompts), dict[str, Int64s]()
        with skip_on_error(Baseline.bm25):
            hits = build_bm25(self.examples).search([question.text for question in self.data.prompts], 1)
            found["bm25"] = np.array([positions[0] if len(positions) else NONE for _, positions in hits])
        drawn = np.random.default_rng(0).integers(len(self.examples), size=n)
        return {**found, "random": drawn, "no_prompt": np.full(n, NONE)}

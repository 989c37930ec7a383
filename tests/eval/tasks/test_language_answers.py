"""Choice of answers and perplexity by a language model against transformers' own losses, answer by answer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_causal
from transformers import AutoModelForCausalLM, AutoTokenizer

from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.question_passage.prompts import answer_lists
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.answers import Answers
from dyad.train.config import ModelConfig, TextTower, TextTowerConfig
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_language_model

ROWS = [
    {"question": "two and two", "pos": [" four"], "neg": [" five", " six", " four"]},
    {"question": "a", "pos": [" b", " c"], "neg": [" dd"]},
    {"question": "nothing to choose", "pos": [" done"], "neg": []},
    {"question": "x", "pos": [" yyyyyy"], "neg": [" z", " a much longer answer"]},
]


@pytest.mark.parametrize("block", [1, 3, 64])
def test_metrics_equal_those_of_single_answers(block: int, tmp_path: Path) -> None:
    tiny_causal.write(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"query": row["question"], **row}) + "\n" for row in ROWS))
    text = TextTowerConfig(kind=TextTower.transformers, name=str(tmp_path))
    model = build_language_model(ModelConfig(embed_dim=None, text=text))
    data = DataConfig(question=QuestionConfig(length=30), passage=PassageConfig(length=30))
    lists = answer_lists(str(path), data, model.tokenize, "data.val")
    towers = model.towers
    report = Answers("val", "", lists).report(Encoder({"x": towers.x_tower, "y": towers.y_tower}, World(), block), 1)

    reference: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def score(prompt: str, answer: str) -> tuple[float, int]:
        head, given = [tokenizer.bos_token_id, *tokenizer(prompt).input_ids], tokenizer(answer).input_ids
        with torch.no_grad():
            log_p = reference(torch.tensor([head + given])).logits[0].log_softmax(-1)
        return sum(float(log_p[len(head) + t - 1, token]) for t, token in enumerate(given)) / len(given), len(given)

    hits, likelihoods, total, tokens = [], [], 0.0, 0
    for row in ROWS:
        right = [score(row["question"], answer) for answer in row["pos"]]
        wrong = [score(row["question"], answer)[0] for answer in row["neg"] if answer not in row["pos"]]
        if wrong:
            hits.append(max(value for value, _ in right) > max(wrong))
        likelihoods.append(np.mean([value for value, _ in right]))
        total, tokens = total + sum(value * n for value, n in right), tokens + sum(n for _, n in right)
    assert report.metrics == pytest.approx(
        {
            "choice_accuracy": np.mean(hits),
            "log_likelihood": np.mean(likelihoods),
            "perplexity": math.exp(-total / tokens),
            "num_prompts": 4,
            "num_answers": 10,
        },
        rel=1e-5,
    )
    assert report.chance == pytest.approx({"choice_accuracy": (1 / 3 + 2 / 3 + 1 / 3) / 3})
    (case, *_) = report.details["gallery"]["prompt → answer"]
    answers = case["systems"]["model"]
    assert [a["score"] for a in answers] == sorted((a["score"] for a in answers), reverse=True)
    assert {a["text"] for a in case["right"]} <= {a["text"] for a in answers}


def test_a_wrong_answer_of_equal_score_is_before_the_right_one(tmp_path: Path) -> None:
    tiny_causal.write(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": "a", "pos": ["bc"], "neg": ["bcd"]}) + "\n")
    text = TextTowerConfig(kind=TextTower.transformers, name=str(tmp_path))
    model = build_language_model(ModelConfig(embed_dim=None, text=text))
    data = DataConfig(question=QuestionConfig(length=9), passage=PassageConfig(length=2))  # both are cut to "bc"
    lists = answer_lists(str(path), data, model.tokenize, "data.val")
    evaluator = Answers("val", "", lists)
    report = evaluator.report(Encoder({"y": model.towers.y_tower}, World()))
    assert report.metrics["choice_accuracy"] == 0.0 and "choice_accuracy" in evaluator.higher_is_better()

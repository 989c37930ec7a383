"""Scores of answers to prompts equal the log-likelihoods of transformers for the same token ids; steps on them equal
plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import tiny_causal
from helpers.dist import launch
from helpers.messages import raises
from transformers import AutoModelForCausalLM, AutoTokenizer

from dyad.data.base.errors import ConfigError, SampleError
from dyad.data.batch import PADDING
from dyad.data.config import DataConfig, NegativesConfig, PassageConfig
from dyad.data.question_passage.prompts import PromptAnswers
from dyad.data.question_passage.questions import open_questions
from dyad.evaluation.suite import check_suite
from dyad.train.cli.compose import compose_config
from dyad.train.config import ModelConfig, TextTower, TextTowerConfig
from dyad.train.config_rules import validate
from dyad.train.towers.build import build_language_model

PROMPTS = ["one and one is", "", "a prompt that is longer than what is taken of it", "2 + 3 ="]
ANSWERS = [" two", "x", " an answer", " five, which is more than four"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_causal.write(tmp_path)
    return tmp_path


def config(folder: Path, **text: object) -> ModelConfig:
    return ModelConfig(embed_dim=None, text=TextTowerConfig(kind=TextTower.transformers, name=str(folder), **text))  # pyright: ignore[reportArgumentType]


def test_scores_equal_transformers(folder: Path) -> None:
    model = build_language_model(config(folder))
    rows = model.tokenize(PROMPTS, ANSWERS, 12, 20)
    x, scores = model.towers.x_tower(torch.zeros(4, 1)), model.towers.y_tower(rows)
    assert x.tolist() == [[1.0]] * 4 and scores.shape == (4, 1)
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for row, prompt, answer, score in zip(rows, PROMPTS, ANSWERS, scores[:, 0], strict=True):
        head = [tokenizer.bos_token_id, *tokenizer(prompt[-11:]).input_ids]
        given = tokenizer(answer[:20]).input_ids
        assert row[row != PADDING].tolist() == [len(head), *head, *given]
        ids = torch.tensor([head + given])
        # its loss is the mean of −log p over labels other than −100
        loss = reference(ids, labels=ids.where(torch.arange(ids.shape[1]) >= len(head), -100)).loss
        torch.testing.assert_close(score, -loss, rtol=0, atol=1e-5)


def test_no_prompts_are_no_rows_of_tokens(folder: Path) -> None:
    rows = build_language_model(config(folder)).tokenize([], [], 12, 20)
    assert len(rows) == 0 and rows.dtype == torch.int64


def test_answers_are_drawn_with_their_prompts(folder: Path) -> None:
    tokenize, path = build_language_model(config(folder)).tokenize, folder / "rows.jsonl"
    rows = [("2 + 2 =", " 4", [" 5", " 6"]), ("hi", " you", []), ("a", " b", " c")]
    fields = ("prompt", "answer", "negative")
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    data = DataConfig(train=str(path), negatives=NegativesConfig(per_row=2), passage=PassageConfig(length=16))
    batch = PromptAnswers(open_questions(data.train, data), tokenize, data, 0, None).__getitems__([(0, 0), (0, 2)])
    pairs = [("2 + 2 =", " 4"), ("a", " b")], [("2 + 2 =", " 5"), ("2 + 2 =", " 6"), ("a", " c")]
    assert batch.extra is not None and batch.extra.row.tolist() == [0, 0, 1] and not batch.extra.positive.any()

    def of(rows: torch.Tensor) -> list[tuple[str, str]]:
        found = [row[row != PADDING].tolist() for row in rows]
        return [(decode(row[2 : 1 + row[0]]), decode(row[1 + row[0] :])) for row in found]

    decode = tokenize.tokenizer.decode
    assert of(batch.y) == pairs[0] and sorted(of(batch.extra.y)) == sorted(pairs[1])
    assert batch.x.shape == (2, 1)


SCORED = ["objective.candidates=list", "objective.similarity=dot", "data.negatives.per_row=1"]


def test_what_has_no_score_is_refused(folder: Path) -> None:
    tokenize = build_language_model(config(folder)).tokenize
    with raises(ConfigError, "data.passage.length=64", "64"):
        tokenize.check(64)
    row = tokenize(["x" * 70], ["y" * 20], 60, 30)[0]
    assert row.tolist() == [44, tokenize.begin, *[row[2]] * 43, *[row[-1]] * 20]  # 64 tokens: the answer is whole
    with raises(SampleError, "answer", "tokens"):
        tokenize(["a"], [""], 8, 8)
    entry = ["task=language_model", "data.train=rows.jsonl", "steps=1", "objective=one_sided_dpm", "eval.suite=[]"]
    with raises(ConfigError, "objective.candidates=list", "objective.similarity=dot"):
        validate(compose_config([*entry, "data.negatives.per_row=1", "data.val=null"]), 1)
    with raises(ConfigError, "data.passage.title=pair", "task=language_model"):
        validate(compose_config([*entry, "data.passage.title=pair", "data.val=null", *SCORED]), 1)
    with raises(ConfigError, "data.val", "rows.jsonl"):
        check_suite(compose_config([*entry, "data.val=rows.jsonl"]))
    pairs = [
        "objective=nll",
        "task=question_passage",
        "data.train=rows.jsonl",
        "steps=1",
        "eval.suite=[]",
        "data.val=null",
    ]
    with raises(ConfigError, "objective=nll", "task=language_model"):
        validate(compose_config(pairs), 1)
    with raises(ConfigError, "model.embed_dim=null", "model.text.name"):
        build_language_model(ModelConfig(embed_dim=8, text=config(folder).text))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_on_lists_of_answers_equal_loops(world_size: int) -> None:
    launch("dist_language_model.py", world_size)

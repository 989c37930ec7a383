"""A corpus, questions and scores written by hand, and what is mined from them.

The embedding of a passage is its row of scores, and that of a question a unit vector: the inner product of question q
and passage p is scores[p][q].
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyad.data.config import DataConfig, MiningConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.questions import open_questions
from dyad.eval.mine.mining import MiningInput, mine
from dyad.eval.mine.pair_scores import read_pair_scores
from dyad.eval.mine.passages import QuestionsAndPassages
from dyad.train.distributed.world import World

Fields = Mapping[str, Any]


def write_lines(path: Path, rows: Sequence[Fields]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_corpus(folder: Path, texts: Sequence[str]) -> Path:
    """Write a corpus of the passages p0, p1, … with these texts, and return its path."""
    return write_lines(folder / "corpus.jsonl", [{"docid": f"p{i}", "text": text} for i, text in enumerate(texts)])


def row(name: str, right: Sequence[str], answers: Sequence[str] = ()) -> dict[str, Any]:
    """A training row in Tevatron's format with ids."""
    return {
        "query_id": name,
        "query_text": f"question {name}",
        "positive_document_ids": list(right),
        "negative_document_ids": [],
        "answers": list(answers),
    }


def source(
    folder: Path, texts: Sequence[str], rows: Sequence[Fields], scores: np.ndarray, judged: str | None = None
) -> MiningInput:
    """Return what mining gets, from files written here. scores (m, n): of each of m passages for each of n rows."""
    corpus = str(write_corpus(folder, texts))
    config = DataConfig()
    config.passage.corpus = corpus
    questions = open_questions(str(write_lines(folder / "train.jsonl", rows)), config)
    passages, queries = np.asarray(scores, np.float32), np.eye(len(rows), dtype=np.float32)
    data = QuestionsAndPassages(questions, open_corpus(corpus, "corpus"), untokenized, config)
    return MiningInput(data, queries, passages, read_pair_scores(judged) if judged else None)


def untokenized(*texts: Any, **options: Any) -> Any:
    raise AssertionError("nothing is encoded here")


def random_source(folder: Path, seed: int, count: int = 60) -> tuple[MiningInput, list[str], list[dict[str, Any]]]:
    """Return (what mining gets, texts of passages, rows): copies, questions with several rows, passages and answers."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices("abcdefgh", k=3)) for _ in range(120)]  # 512 texts: some come twice
    rows = [
        row(
            f"q{chance.randrange(count)}",
            [f"p{i}" for i in chance.sample(range(120), chance.choice([1, 1, 3]))],
            chance.choices(["a b", "c", "h h h"], k=chance.randrange(2)),
        )
        for _ in range(count)
    ]
    scores = np.random.default_rng(seed).normal(size=(120, count))
    first = {r["query_id"]: i for i, r in reversed(list(enumerate(rows)))}
    for i, r in enumerate(rows):  # the same question has the same embedding
        scores[:, i] = scores[:, first[r["query_id"]]]
    return source(folder, texts, rows, scores), texts, rows


def mined(found: MiningInput, out: Path, **settings: Any) -> tuple[dict[str, list[str]], dict]:
    """Mine with these settings of MiningConfig; return (question id → negatives, summary)."""
    summary = mine(found, MiningConfig(**{"first_rank": 1, **settings}), out, World(), {})
    return {line["query_id"]: line["negatives"] for line in read_lines(out / "mined.jsonl")}, summary

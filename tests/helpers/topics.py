"""A small BEIR folder that a tiny text model can learn from, and a run on it, for tests that start commands."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from helpers.mining import write_lines


def write_topics(folder: Path, topics: int = 24, passages: int = 8) -> Path:
    """Topics of a few letters; the passages of a topic are made of its letters and of others; one is there twice."""
    chance = random.Random(5)
    corpus, queries, qrels = [], [], ["query-id\tcorpus-id\tscore\n"]
    for topic in range(topics):
        letters = chance.sample("abcdefghijklmnopqrstuvwxyz", 4)
        queries.append({"_id": f"t{topic}", "text": " ".join(letters)})
        for number in range(passages):
            words = [*chance.choices(letters, k=6), *chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)]
            corpus.append({"_id": f"p{topic}-{number}", "title": "", "text": " ".join(words)})
            qrels.append(f"t{topic}\tp{topic}-{number}\t1\n")
    corpus.append({**corpus[0], "_id": "copy"})
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    (folder / "qrels" / "train.tsv").write_text("".join(qrels))
    return folder


def arguments(bert: Path, topics: Path, runs: Path, keys: dict[str, Any]) -> list[str]:
    """Return `train` and arguments for a run of seconds; keys, as they are typed, override."""
    common = {
        "task": "question_passage",
        "model": "minilm",
        "model.text.name": bert,
        "data": "question_passage",
        "data.train": topics,
        "data.passage.length": 32,
        "data.workers": 0,
        "objective": "info_nce_text",
        "global_batch_size": 8,
        "steps": 12,
        "optim.lr": 0.003,
        "tracking": "local",
        "tracking.every": 1,
        "run.dir": runs,
    }
    return ["train", *(f"{key}={value}".replace(", ", ",") for key, value in {**common, **keys}.items())]

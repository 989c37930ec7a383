"""Small files of questions and passages, and a tokenizer of characters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dyad.data.batch import PADDING

Fields = dict[str, Any]


class Letters:
    """A tokenizer: tokens are code points; a pair has a 1 between its texts.

    Rows are padded to the longest one, rounded up to 8, and cut to `length`.
    """

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
        rows = [[ord(c) for c in text] for text in texts]
        if pairs is not None:
            rows = [row + [1] + [ord(c) for c in second] for row, second in zip(rows, pairs, strict=True)]
        width = min(length, -(-max(map(len, rows)) // 8) * 8)
        return torch.tensor([(row + [PADDING] * width)[:width] for row in rows])


tokenize = Letters()


def texts_of(tokens: Tensor) -> list[str]:
    """Return the texts that `tokenize` was given, cut to its length, with | between those of a pair."""
    return ["".join(chr(c) for c in row if c != PADDING).replace("\1", "|") for row in tokens.tolist()]


def write_lines(path: Path, rows: Iterable[Fields]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus_row(i: int) -> Fields:
    return {"_id": f"d{i}", "title": f"title {i}" if i % 2 else "", "text": f"text {i}"}


def write_beir(folder: Path, passages: int = 20, queries: int = 8, split: str = "train") -> Path:
    """Question i of all but the last two is judged: d(3i) 0, d(3i + 1) 1, d(3i + 2) 2; topics have two questions."""
    write_lines(folder / "corpus.jsonl", (corpus_row(i) for i in range(passages)))
    write_lines(
        folder / "queries.jsonl",
        ({"_id": f"q{i}", "text": f"what {i}", "metadata": {"topic": f"t{i // 2}"}} for i in range(queries)),
    )
    judged = [f"q{i}\td{(3 * i + j) % passages}\t{j}\n" for i in range(queries - 2) for j in range(3)]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


def dpr_row(i: int, hard: int = 2, positives: int = 1) -> Fields:
    return {
        "question": f"what’s {i}",
        "answers": [f"answer {i}"],
        "positive_ctxs": [{"title": f"P{i}", "text": f"right {i} {j}", "score": 1} for j in range(positives)],
        "negative_ctxs": [{"title": "N", "text": f"other {i}", "psg_id": 7}],
        "hard_negative_ctxs": [{"title": "H", "text": f"hard {i} {j}", "passage_id": f"h{j}"} for j in range(hard)],
    }

"""Small question–passage sources, their conversion, and what training reads of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyad.data.cli.convert import convert
from dyad.data.cli.options import PackOptions, Target
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import open_questions

TARGETS = list(Target)
TEXT = 'Béla\rsaid: "no"\tor\r\nyes\u2028…'  # what tables, lines and quotes may trip over


def context(n: int, title: str = "", named: bool = True) -> dict[str, Any]:
    """Return passage `n` as a row of DPR has it. named: whether it has an id."""
    fields = {"title": title, "text": f"passage {n} {TEXT}"}
    return {**fields, "passage_id": f"p{n}"} if named else fields


ROWS: list[dict[str, Any]] = [
    {
        "query_id": "q1",
        "metadata": {"topic": "writers"},
        "question": "who wrote it?",
        "answers": ["Ann", "Ann Lee"],
        "positive_ctxs": [context(1, "Ann"), context(2)],
        "negative_ctxs": [context(3)],
        "hard_negative_ctxs": [context(4, "Bob"), context(5)],
    },
    {
        "query_id": "q0",
        "question": "whose turn?",
        "answers": [],
        "positive_ctxs": [context(2)],
        "negative_ctxs": [],
        "hard_negative_ctxs": [context(1, "Ann"), context(6), context(7)],
    },
]
GOOD = {"query": "fine", "pos": ["a"], "neg": []}
IDS = {"query_id": "x", "query_text": "x", "positive_document_ids": ["c1"], "negative_document_ids": []}
DPR = {"question": "x", "positive_ctxs": [{"text": "a"}]}


def write_dpr(path: Path, rows: list[Any]) -> Path:
    """Write a DPR file, one JSON list of the rows, and return its path."""
    path.write_text(json.dumps(rows, ensure_ascii=False))
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write a .jsonl file and return its path. A row that is a text is written as it is."""
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Converted:
    """The result of a conversion. source, corpus: the values of data.train and data.passage.corpus to read it."""

    folder: Path
    target: Target
    split: str = "train"

    @property
    def source(self) -> str:
        names = {Target.shards: "000000.tar", Target.dpr: f"{self.split}.json", Target.beir: ""}
        return str(self.folder / names.get(self.target, f"{self.split}.jsonl"))

    @property
    def corpus(self) -> str | None:
        return str(self.folder / "corpus.jsonl") if self.target is Target.tevatron_ids else None


def converted(source: Path | str, out: Path, target: Target, **options: Any) -> Converted:
    """Convert `source` into the folder `out` by `data pack`. options: of PackOptions."""
    convert(str(source), PackOptions(out=str(out), to=target, **options))
    return Converted(out, target, options.get("split", "train"))


Read = tuple[Question, list[Passage], list[Passage], list[Passage]]


def read(made: Converted) -> list[Read]:
    """Return (question, right, other and hard negative passages) of each row, as training reads a conversion."""
    config = DataConfig(passage=PassageConfig(corpus=made.corpus), question=QuestionConfig(split=made.split))
    rows = map(open_questions(made.source, config).row, range(len(open_questions(made.source, config))))
    return [(row.question, [*row.positives], [*row.negatives], [*row.hard_negatives]) for row in rows]


def write_beir(folder: Path, qrels: str = "q1\tb\t2\nq1\ta\t0\nq2\ta\t1\n", split: str = "test") -> Path:
    """Write a BEIR folder with the passages a … d, the queries q0 … q2 and the judgements `qrels` of one split."""
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "corpus.jsonl", [{"_id": n, "title": f"T{n}", "text": f'"{n}" {TEXT}'} for n in "abcd"])
    write_lines(
        folder / "queries.jsonl", [{"_id": n, "text": f"question {n}", "lang": "en"} for n in ("q0", "q1", "q2")]
    )
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder

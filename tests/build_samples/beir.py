"""A BEIR folder, the same bytes every time: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEADER = "query-id\tcorpus-id\tscore\n"
Judgement = tuple[str, str, int]  # query id, passage id, grade ≥ 1


def write_beir(
    folder: Path,
    corpus: Iterable[Mapping[str, Any]],
    queries: Iterable[Mapping[str, Any]],
    qrels: Mapping[str, Iterable[Judgement]],
) -> None:
    """Write passages {_id, title, text}, queries {_id, text, metadata} and judgements of each split, as given."""
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    for split, judgements in qrels.items():
        rows = "".join(f"{query}\t{passage}\t{grade}\n" for query, passage, grade in judgements)
        (folder / "qrels" / f"{split}.tsv").write_text(HEADER + rows, encoding="utf-8")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def residue(key: str) -> int:
    """SHA-1(key) mod 10: what the splits go by."""
    return int(hashlib.sha1(key.encode()).hexdigest(), 16) % 10

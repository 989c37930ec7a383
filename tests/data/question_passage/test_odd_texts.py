"""Every reader of questions takes the same files and finds the same rows in them: `data check`, `data pack`, `data
split`, training, evaluation, and the Python API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.data_cli import ended
from helpers.passages import make_run

import dyad
from dyad.data.base.errors import UserError
from dyad.data.config import DataConfig
from dyad.data.question_passage.questions import open_questions

MARK = b"\xef\xbb\xbf"
ROWS = [{"anchor": f"q{i}", "positive": f"p{i}", "negative": f"n{i}"} for i in range(6)]
LINES = [json.dumps(row).encode() for row in ROWS]
CSV = "anchor,positive\n" + "".join(f"größe {i},p {i}\n" for i in range(6))


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ODD: dict[str, tuple[str, bytes, int | None]] = {  # suffix, content, and how many rows are read; None: refused
    "plain": ("jsonl", lines(*ROWS), 6),
    "a mark": ("jsonl", MARK + lines(*ROWS), 6),
    "blank last lines": ("jsonl", lines(*ROWS) + b"\n  \n", 6),
    "blank lines between": ("jsonl", b"\n\n".join(LINES), 6),
    "line ends of Windows": ("jsonl", b"\r\n".join(LINES) + b"\r\n\r\n", 6),
    "no last line end": ("jsonl", b"\n".join(LINES), 6),
    "an array": ("json", json.dumps(ROWS).encode(), 6),
    "an array with a mark": ("json", MARK + json.dumps(ROWS, indent=1).encode() + b"\n\n", 6),
    "lines in a .json": ("json", lines(*ROWS), 6),
    "CSV of Excel": ("csv", MARK + CSV.replace("\n", "\r\n").encode(), 6),
    "CSV with semicolons": ("csv", CSV.replace(",", ";").encode(), 6),
    "CSV with a blank last line": ("csv", CSV.encode() + b"\n", 6),
    "TSV with a mark": ("tsv", MARK + CSV.replace(",", "\t").encode(), 6),
    "a negative that is the positive": ("jsonl", lines(*ROWS[:5], {**ROWS[5], "negative": "p5"}), 6),
    "Latin-1": ("csv", CSV.encode("latin-1"), None),
    "UTF-16": ("csv", CSV.encode("utf-16"), None),
    "Latin-1 lines": ("jsonl", '{"anchor": "größe", "positive": "p"}\n'.encode("latin-1"), None),
    "no positive": ("jsonl", lines(*ROWS[:5], {"anchor": "q5", "positive": None}), None),
    "several objects on a line": ("jsonl", b"".join(LINES), None),
    "an array named .jsonl": ("jsonl", json.dumps(ROWS).encode(), None),
    "nothing": ("jsonl", b"", None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dyad.Model:
    return dyad.load(str(make_run(tmp_path_factory.mktemp("texts") / "run")), "cpu")


def count(read: Callable[[], int | None]) -> int | None:
    """How many rows a reader finds; None if it refuses the file, in one message."""
    try:
        return read()
    except UserError:
        return None


@pytest.mark.parametrize("name", ODD)
def test_every_reader_finds_the_same_rows(
    name: str, tmp_path: Path, model: dyad.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix, content, rows = ODD[name]
    path = tmp_path / f"odd.{suffix}"
    path.write_bytes(content)

    def by_command(*words: str | Path) -> int | None:
        done = ended(monkeypatch, *words)
        assert done.returncode in (0, 2, 3) and "Traceback" not in done.stderr, done.stderr
        return rows if done.returncode == 0 else None

    def trained() -> int | None:
        found = open_questions(str(path), DataConfig())
        return len([found.row(i) for i in range(len(found))]) or None

    def of_batches() -> int:
        return sum(len(batch) for batch in dyad.batches(str(path), model=model, global_batch_size=2))

    def evaluated() -> int:
        return int(dyad.evaluate(model, val=str(path))["val"]["num_questions"])

    found = {
        "training": count(trained),
        "API": count(of_batches),
        "evaluation": count(evaluated),
        "check": by_command("check", path),
        "pack": by_command("pack", path, f"out={tmp_path / 'packed'}"),
        # rows of a TSV are split as they are packed, which split says
        "split": by_command("pack" if suffix == "tsv" else "split", path, f"out={tmp_path / 'parts'}", "val=0.4"),
    }
    assert found == dict.fromkeys(found, rows)

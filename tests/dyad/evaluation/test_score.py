"""python -m eval.score: scores equal those of the Python API; an interrupted file is gone on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_causal
from helpers.messages import raises
from helpers.runs import make_run

import dyad
from dyad.data.base.errors import ConfigError, HardwareError
from dyad.evaluation import score
from dyad.evaluation.score import CONTENT, main

ROWS = [("one and one", " two"), ("two and one", " three"), ("a frog", " is green"), ("one frog", " jumps")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_causal.write(tmp_path, positions=128)
    lines = [json.dumps({"query_id": f"q{i}", "query": q, "pos": [a]}) for i, (q, a) in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def scored(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[dict[str, Any]]:
    given = {"model": f"lm:{folder}", "rows": folder / "rows.jsonl", "out": folder / "scored.jsonl", **options}
    monkeypatch.setattr(sys, "argv", ["eval.score", *(f"{key}={value}" for key, value in given.items())])
    main()
    return [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("by", "batch"), [("bm25", 1), ("random", 64)])
def test_scores_are_those_of_the_model(by: str, batch: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scored(folder, monkeypatch, by=by, depth=2, batch=batch)
    model = dyad.load(f"lm:{folder}")
    assert [row["question"] for row in found] == [question for question, _ in ROWS]
    for row, (question, answer) in zip(found, ROWS, strict=True):
        own = [context["score"] for context in row["ctxs"]]
        assert own == sorted(own, reverse=True) and row["answers"] == [answer]
        for context in row["ctxs"]:
            q, a = ROWS[int(context["id"])]
            assert q != question and context["text"] == f"{q}{a}\n"
            assert model.score(context["text"] + question, [answer])[0] == pytest.approx(context["score"], abs=1e-5)
    assert [len({context["id"] for context in row["ctxs"]}) for row in found] == [2] * 4
    assert by != "bm25" or "3" in {context["id"] for context in found[2]["ctxs"]}, "the only other frog"


def test_a_prompt_is_one_text(folder: Path) -> None:
    model = dyad.load(f"lm:{folder}")
    for prompt in (None, 1, ["a frog"], "half \ud800"):
        with raises(ConfigError, "prompt"):
            model.score(prompt, ["is green"])  # pyright: ignore[reportArgumentType]


def test_a_sample_of_the_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {row["id"]: row for row in scored(folder, monkeypatch)}
    (folder / "scored.jsonl").unlink()
    half = scored(folder, monkeypatch, sample=2)
    assert len(half) == 2 and all(row == whole[row["id"]] for row in half)
    part = (folder / "scored.jsonl").rename(folder / "scored.jsonl.part")
    part.write_text(json.dumps(half[0], ensure_ascii=False) + "\n")
    assert scored(folder, monkeypatch, sample=2) == half


def test_an_interrupted_file_is_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scored(folder, monkeypatch)
    out = folder / "scored.jsonl"
    with raises(ConfigError, "scored.jsonl", "remove"):
        scored(folder, monkeypatch)
    first, second = out.read_bytes().splitlines(keepends=True)[:2]
    out.rename(folder / "scored.jsonl.part").write_bytes(first + second[:10])
    with raises(ConfigError, "depth=50", "3"):
        scored(folder, monkeypatch, depth=3)
    rows, about = folder / "rows.jsonl", folder / "scored.jsonl.json"
    content, options = rows.read_text(), about.read_text()
    rows.write_text(content.replace("two", "six"))
    with raises(ConfigError, f"rows={rows}", "scored.jsonl.part"):
        scored(folder, monkeypatch)
    rows.write_text(content)
    for unreadable in (about.unlink, lambda: about.write_text('{"depth": '), lambda: about.write_text("[1]")):
        unreadable()
        with raises(ConfigError, about, "scored.jsonl.part"):
            scored(folder, monkeypatch)
    about.write_text(json.dumps({key: value for key, value in json.loads(options).items() if key != CONTENT}))
    assert scored(folder, monkeypatch) == whole, "an earlier version wrote no digest"


def test_wrong_options_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "template=x", "{question}"):
        scored(folder, monkeypatch, template="x")
    with raises(ConfigError, "missing.jsonl"):
        scored(folder, monkeypatch, rows=folder / "missing.jsonl")
    one = folder / "one.jsonl"
    one.write_text((folder / "rows.jsonl").read_text().splitlines()[0])
    with raises(ConfigError, f"rows={one}"):
        scored(folder, monkeypatch, rows=one)
    assert not list(folder.glob("scored*"))
    pictures = make_run(folder)
    with raises(ConfigError, f"by={pictures}", "bm25, random", "questions and passages"):
        scored(folder, monkeypatch, by=pictures)


def test_a_place_that_cannot_be_written_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(HardwareError, "rows.jsonl"):
        scored(folder, monkeypatch, out=folder / "rows.jsonl" / "scored.jsonl")


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "scored.jsonl.part").symlink_to("/dev/full")
    monkeypatch.setattr(score, "_begin_or_continue", lambda *_: 0)
    with raises(HardwareError, "scored.jsonl.part"):
        scored(folder, monkeypatch)

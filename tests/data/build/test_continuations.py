"""python -m data continuations: halves of texts, wrong answers of the same part, groups in one part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.build.continuations import run
from dyad.data.build.sequences import part_by_hash
from dyad.data.cli.options import ContinuationsOptions

PARTS = ("train", "val", "test")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [{"_id": f"{i // 5}.{i % 5}", "text": f"word{i} a" + " b" * (i % 3) + f" end{i}"} for i in range(200)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, [*texts, {"_id": "40.0", "text": "oneword"}])))
    return path


def rows(folder: Path) -> dict[str, list[dict[str, str]]]:
    return {part: [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()] for part in PARTS}


def test_halves_and_wrong_answers(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"group_of": r"(\d+)[.]\d+", "wrong": 3}
    for name in ("a", "b", "c d"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / name), **given))
    assert f"'data.train=\"{tmp_path}/c d/train.jsonl\"'" in capsys.readouterr().out
    found = rows(tmp_path / "a")
    assert found == rows(tmp_path / "b")
    texts = {row["_id"]: row["text"] for row in map(json.loads, corpus.read_text().splitlines())}
    groups = [{row["id"].split(".")[0] for row in found[part]} for part in PARTS]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 40
    for part in PARTS:
        own = {row["pos"][0] for row in found[part]}
        for row in found[part]:
            assert row["query"] + row["pos"][0] == texts[row["id"]] and row["pos"][0].startswith(" ")
            assert abs(len(row["query"]) - len(texts[row["id"]]) / 2) <= 4
            assert len({*row["neg"]}) == 3 and {*row["neg"]} <= own - {row["pos"][0]}


def test_each_row_of_train_stands_after_rows_of_other_groups(corpus: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run([str(corpus)], ContinuationsOptions(str(tmp_path / name), r"(\d+)[.]\d+", wrong=3, examples=2))
    assert (tmp_path / "a/examples.jsonl").read_bytes() == (tmp_path / "b/examples.jsonl").read_bytes()
    train = {row["id"]: row for row in rows(tmp_path / "a")["train"]}
    by_text = {row["query"] + row["pos"][0]: name for name, row in train.items()}
    found = [json.loads(line) for line in (tmp_path / "a/examples.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [name for name in train for _ in range(2)]
    for row in found:
        example, prompt = row["query"].split("\n")
        own = train[row["id"]]
        assert (prompt, row["pos"]) == (own["query"], own["pos"]) and len(row["neg"]) == 3
        assert by_text[example].split(".")[0] != row["id"].split(".")[0]


def test_most_examples_are_those_of_bm25(tmp_path: Path) -> None:
    texts = [{"_id": str(i), "text": f"name{i % 9} word{i % 9} and other{i} end"} for i in range(360)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, texts)))
    run([str(tmp_path / "c.jsonl")], ContinuationsOptions(str(tmp_path / "a"), examples=1))
    after = [json.loads(line) for line in (tmp_path / "a/examples.jsonl").read_text().splitlines()]
    pairs = [row["query"].split("\n") for row in after]
    alike = [example.split()[0] == prompt.split()[0] for example, prompt in pairs]
    assert 0.7 < sum(alike) / len(alike) < 0.9, "three of four by BM25, and one of nine others by chance"


def test_examples_need_two_groups(corpus: Path, tmp_path: Path) -> None:
    names = [next(n for n in map(str, range(999)) if part_by_hash(n, 0.1, 0.1) == part) for part in PARTS]
    texts = [{"_id": f"{name}.{i}", "text": f"word{i} end{i}"} for name in names for i in range(9)]
    corpus.write_text("\n".join(map(json.dumps, texts)))
    with raises(DataError, "one group", "examples=1"):
        run([str(corpus)], ContinuationsOptions(str(tmp_path / "a"), r"(\d+)[.]\d+", wrong=3, examples=1))
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_divided_is_refused(corpus: Path, tmp_path: Path) -> None:
    with raises(DataError, "group_of=[a-z]*()", "0.0"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / "a"), group_of="[a-z]*()"))
    with raises(DataError, "group_of=(x)?.*", "0.0"):  # a group that takes no part
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / "a"), group_of="(x)?.*"))
    with raises(DataError, "wrong=1000"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / "a"), wrong=1000))
    with raises(ConfigError, "val=0.6", "test=0.5"):
        ContinuationsOptions(val=0.6, test=0.5)
    with raises(ConfigError, "group_of=."):
        ContinuationsOptions(group_of=".")
    assert not (tmp_path / "a").exists()

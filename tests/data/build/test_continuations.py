"""python -m data continuations: halves of texts, wrong answers of the same part, groups in one part."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.build.continuations import run
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


def test_halves_and_wrong_answers(corpus: Path, tmp_path: Path) -> None:
    given = {"group_of": r"(\d+)[.]\d+", "wrong": 3}
    for name in ("a", "b"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / name), **given))
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


def test_rows_of_classes_and_the_examples_of_bm25(tmp_path: Path) -> None:
    classes = {f"class{i}": [f"word{i} name{i}x{j}" for j in range(40)] for i in range(9)}
    (tmp_path / "c.json").write_text(json.dumps({"classes": classes, "label": "x"}))
    run([str(tmp_path / "c.json")], ContinuationsOptions(str(tmp_path / "a"), examples=1))
    found = rows(tmp_path / "a")
    assert sum(map(len, found.values())) == 360
    for row in itertools.chain(*found.values()):
        assert row["query"] == f"{row['id']}:" and row["id"] in classes[row["pos"][0][1:]]
    after = [json.loads(line) for line in (tmp_path / "a/examples.jsonl").read_text().splitlines()]
    alike = [row["query"].split("\n")[0].endswith(row["pos"][0]) for row in after]
    assert 0.7 < sum(alike) / len(alike) < 0.9, "three of four by BM25, and one of nine others by chance"


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"classes": []}', '{"classes": {"a": ["x", 1]}}', '{"classes": {"a": "x"}}']
)
def test_other_files_of_classes_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content)
    with raises(DataError, "c.json"):
        run([str(tmp_path / "c.json")], ContinuationsOptions(str(tmp_path / "a")))
    with raises(DataError, "missing.json"):
        run([str(tmp_path / "missing.json")], ContinuationsOptions(str(tmp_path / "a")))


def test_what_cannot_be_divided_is_refused(corpus: Path, tmp_path: Path) -> None:
    with raises(DataError, "group_of=[a-z]*()", "0.0"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / "a"), group_of="[a-z]*()"))
    with raises(DataError, "wrong=1000"):
        run([str(corpus)], ContinuationsOptions(out=str(tmp_path / "a"), wrong=1000))
    with raises(ConfigError, "val=0.6", "test=0.5"):
        ContinuationsOptions(val=0.6, test=0.5)
    with raises(ConfigError, "group_of=."):
        ContinuationsOptions(group_of=".")
    assert not (tmp_path / "a").exists()

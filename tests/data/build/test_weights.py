"""`python -m data weights`: log q of each item against a plain count, and what a person is told."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from helpers.data_cli import ended, here
from helpers.messages import raises
from helpers.rows import write_lines
from helpers.shards import image, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import ZETA, LogWeights, read_log_weights
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.shards.content_keys import content_key

ROWS = [  # question, numbers of right passages, of hard negatives
    ("a", [0, 1, 2], [7]),
    ("b", [0], [0, 8]),
    ("a", [2, 0], []),
    ("c", [1, 1], [3]),
]


def dpr(folder: Path) -> Path:
    def contexts(numbers: list[int]) -> list[dict[str, str]]:
        return [{"title": "t", "text": f"passage {n}"} for n in numbers]

    rows = [
        {"question": q, "answers": [], "positive_ctxs": contexts(right), "hard_negative_ctxs": contexts(hard)}
        for q, right, hard in ROWS
    ]
    return write_lines(folder / "dpr.jsonl", rows)


def passage(number: int) -> int:
    return Passage(f"passage {number}", "t").key


def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: object, name: str = "log_q") -> LogWeights:
    out = tmp_path / "w.safetensors"
    out.unlink(missing_ok=True)
    here(monkeypatch, "weights", *map(str, arguments), f"out={out}")
    return read_log_weights(str(out), name)


def equal(found: LogWeights, counts: dict[int, float], power: float = 1.0, add: float = 0.0) -> None:
    total = sum((count + add) ** power for count in counts.values())
    assert found.keys_n.tolist() == sorted(counts)
    want = [np.log((counts[key] + add) ** power / total) for key in sorted(counts)]
    np.testing.assert_allclose(found.values_n, want, rtol=1e-13)


@pytest.mark.parametrize("positives", ["one", "first", "all"])
def test_passages_are_counted_as_training_draws_them(
    positives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = defaultdict[int, float](float)
    for _, right, _ in ROWS:
        if positives == "all":
            counts |= {key: counts[key] + 1 for key in map(passage, set(right))}
        elif positives == "first":
            counts[passage(right[0])] += 1
        else:
            for number in right:
                counts[passage(number)] += 1 / len(right)
    equal(made(monkeypatch, tmp_path, dpr(tmp_path), f"positives={positives}"), counts)


def test_power_additive_smoothing_and_zeta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With add= every candidate has a q: hard negatives, and passages of the corpus."""
    data, counts = dpr(tmp_path), {passage(n): 0.0 for n in (0, 1, 2, 3, 7, 8)}
    for _, right, _ in ROWS:
        counts[passage(right[0])] += 1
    positive = {key: count for key, count in counts.items() if count}
    equal(made(monkeypatch, tmp_path, data, "positives=first", "power=0.75"), positive, 0.75)
    smooth = made(monkeypatch, tmp_path, data, "positives=first", "power=0.5", "add=0.1")
    equal(smooth, counts, 0.5, 0.1)
    zeta = made(monkeypatch, tmp_path, data, "positives=first", "power=0.5", "add=0.1", "temperature=0.07", name=ZETA)
    np.testing.assert_allclose(zeta.values_n, -0.07 * smooth.values_n, rtol=1e-13)
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": str(n), "text": f"passage {n}"} for n in range(9)])
    rows = [{"query_id": "1", "query_text": "a", "positive_document_ids": ["3"], "negative_document_ids": ["4"]}]
    by_id = write_lines(tmp_path / "ids.jsonl", rows)
    whole = made(monkeypatch, tmp_path, by_id, f"corpus={corpus}", "add=1")
    equal(whole, {Passage(f"passage {n}").key: float(n == 3) for n in range(9)}, add=1.0)


def test_questions_and_weights_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dpr(tmp_path)
    other = write_lines(tmp_path / "other.jsonl", [{"query": "b", "pos": ["x"], "neg": []}])
    found = made(monkeypatch, tmp_path, f"{data}@2::{other}@0.5", "side=x")
    equal(found, {Question("", text).key: count for text, count in (("a", 4.0), ("b", 2.5), ("c", 2.0))})


def test_captions_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions = [["a dog", "a cat"], ["a dog"], ["a dog", "a dog", "a cow"]]
    members = [(f"{n}.png", image(n % 2)) for n in range(3)]
    members += [(f"{n}.json", json.dumps({"c": texts, "d": f"d{n}"}).encode()) for n, texts in enumerate(captions)]
    tar = write_tar(tmp_path / "a.tar", sorted(members))
    counts = defaultdict[str, float](float)
    for n, texts in enumerate(captions):
        counts[f"d{n}"] += 0.25
        for text in texts:
            counts[text] += 0.75 / len(texts)
    of_y = made(monkeypatch, tmp_path, tar, "captions=[c,d]", "caption_weights=[3,1]")
    equal(of_y, {content_key(text.encode()): count for text, count in counts.items()})
    equal(made(monkeypatch, tmp_path, tar, "side=x"), {content_key(image(0)): 2.0, content_key(image(1)): 1.0})


def test_bad_samples_are_left_out_and_many_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: at most data.bad_share of them."""
    members = [(f"{n:03}.{kind}", content) for n in range(200) for kind, content in (("png", b"x"), ("txt", b"a dog"))]
    members[1], members[3] = ("000.txt", b" "), ("001.txt", b"\xff")
    tar = write_tar(tmp_path / "a.tar", members)
    said = ended(monkeypatch, "weights", tar, f"out={tmp_path}/w.safetensors").stdout
    assert "1 items of side y, 198 draws" in said and "2 rows" in said and "sample '000'" in said
    with raises(DataError, "sample '000'", "captions=", "image_key="):
        made(monkeypatch, tmp_path, tar, "captions=[c]")


def test_a_person_can_judge_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q of passages 0, 1, 2 with positives=first: 1/2, 1/4, 1/4; exp(entropy) is 2^1.5."""
    said = ended(monkeypatch, "weights", dpr(tmp_path), f"out={tmp_path}/w.safetensors", "positives=first").stdout
    assert "3 items of side y, 4 draws an epoch; 0 are never drawn" in said
    assert "2.8 (94.3%)" in said and "the 3 most frequent have 100.0% of q" in said
    assert [line.split()[0] for line in said.splitlines() if "t passage" in line] == ["2", "1", "1"]
    assert f'objective.importance_file="{tmp_path}/w.safetensors"' in said and "objective=nce" in said


def test_items_of_scored_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training reads them, which data.relevance allows; a path with a blank is quoted for the shell and Hydra."""
    rows = write_lines(tmp_path / "a.jsonl", [{"anchor": "q", "positive": f"p{i % 2}", "score": 0.5} for i in range(3)])
    out = tmp_path / "a b" / "w.safetensors"
    out.parent.mkdir()
    here(monkeypatch, "weights", str(rows), f"out={out}", "relevance=score")
    equal(read_log_weights(str(out), "log_q"), {Passage("p0").key: 2, Passage("p1").key: 1})
    said = ended(monkeypatch, "weights", rows, f"out={out.with_stem('x')}", "relevance=score").stdout
    commands = [shlex.split(line) for line in said.splitlines() if "objective=" in line]
    file = out.with_stem("x")
    assert [words[-1] for words in commands] == [
        f'objective.importance_file="{file}"',
        f'objective.noise_file="{file}"',
    ]
    with raises(DataError, rows, "line 1", "score"):
        here(monkeypatch, "weights", str(rows), f"out={out.with_stem('y')}")


def test_what_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dpr(tmp_path)
    (tmp_path / "there.safetensors").write_text("mine")
    for arguments, *named in (
        (("out=w.npy",), "out=w.npy", ".safetensors"),
        ((f"out={tmp_path}/there.safetensors",), "out=", "there.safetensors"),
        (("out=w.safetensors", "task=views"), "task=views"),
        (("out=w.safetensors", "add=-1"), "add=-1"),
    ):
        with raises(ConfigError, *named):
            here(monkeypatch, "weights", str(data), *arguments)
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "1", "text": "x"}])
    with raises(ConfigError, corpus, "corpus="):
        here(monkeypatch, "weights", str(corpus), f"out={tmp_path}/w.safetensors")
    with raises(DataError, "empty.jsonl"):
        here(monkeypatch, "weights", str(write_lines(tmp_path / "empty.jsonl", [])), f"out={tmp_path}/w.safetensors")
    log = tmp_path / "log.csv"
    log.write_text("user,item\na,b\n")
    with raises(ConfigError, log, "user, item"):
        here(monkeypatch, "weights", str(log), f"out={tmp_path}/w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    bad = write_lines(tmp_path / "bad.jsonl", [{"query": "b", "pos": [1], "neg": []}])
    with raises(DataError, bad):
        here(monkeypatch, "weights", str(bad), f"out={tmp_path}/w.safetensors")
    assert not (tmp_path / "w.safetensors").exists() and (tmp_path / "there.safetensors").read_text() == "mine"

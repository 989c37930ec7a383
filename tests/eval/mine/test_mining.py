"""Mined negatives: every filter by hand, all of them against a plain reading of the rules, any number of ranks."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.dist import launch
from helpers.messages import raises
from helpers.mining import mined, random_source, read_lines, row, source, write_lines

from dyad.data.base.command_line import parse_options
from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.data.config import MiningConfig, Title
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.shards.storage import sha256_of
from dyad.eval.config import MineCommand
from dyad.eval.metrics import matches
from dyad.eval.mine import mining
from dyad.eval.mine.mining import MiningInput, grouped
from dyad.eval.mine.pair_scores import read_pair_scores
from dyad.eval.mine.passages import QuestionsAndPassages
from dyad.eval.search.index import _Approximate

# Ranks of the one question: p0 .95 (1), p1 .90 (2), p2 .85 (3) … p9 .50 (10)
TEXTS = ["zero", "one", "right", "three", "four", "right", "six", "three", "eight Paris", "nine"]
SCORES = 0.95 - 0.05 * np.arange(10)[:, None]
NO_NEGATIVES: dict[str, list] = {"negative_passages": []}


def of_one(tmp_path: Path, answers: tuple[str, ...] = (), judged: str | None = None, **settings: Any):
    found = source(tmp_path / "data", TEXTS, [row("q", ["p2"], answers)], SCORES, judged)
    negatives, summary = mined(found, tmp_path / "out", **{"last_rank": 10, **settings})
    assert sum(summary["left_out"].values()) + summary["negatives"] == summary["found"]
    return negatives["q"], summary["left_out"]


# One filter at a time ------------------------------------------------------------------------------------------------


def test_right_passages_and_their_copies_are_left_out(tmp_path: Path) -> None:
    negatives, left_out = of_one(tmp_path)
    assert negatives == ["p0", "p1", "p3", "p4", "p6", "p8", "p9"]  # p5 is a copy of p2, p7 one of p3
    assert left_out == {"right": 2, "repeated": 1}


def test_ranks_count_all_passages_found(tmp_path: Path) -> None:
    negatives, left_out = of_one(tmp_path, first_rank=2, last_rank=6)
    assert negatives == ["p1", "p3", "p4"]  # ranks 3 and 6 are right, and keep their rank
    assert left_out == {"rank": 1, "right": 2}


def test_of_many_the_best_ranked_are_kept(tmp_path: Path) -> None:
    negatives, left_out = of_one(tmp_path, keep=2)
    assert negatives == ["p0", "p1"]
    assert left_out == {"right": 2, "beyond_keep": 6}


def test_margins_are_below_the_best_right_passage(tmp_path: Path) -> None:
    assert of_one(tmp_path, margin=0.125)[0] == ["p6", "p7", "p8", "p9"]  # .85 - .125 = .725
    assert of_one(tmp_path, margin=-0.07)[0][:2] == ["p1", "p3"]
    negatives, left_out = of_one(tmp_path, relative_margin=0.2)  # .85 · .8 = .68
    assert (negatives, left_out["margin"]) == (["p6", "p7", "p8", "p9"], 4)
    assert of_one(tmp_path, relative_margin=0.2, margin=0.33)[0] == ["p9"]  # both hold: .52 and .68
    assert of_one(tmp_path, max_score=0.61)[0] == ["p7", "p8", "p9"]


def test_a_relative_margin_means_the_same_below_zero(tmp_path: Path) -> None:
    found = source(tmp_path / "data", TEXTS, [row("q", ["p2"])], SCORES - 1)
    assert mined(found, tmp_path / "out", relative_margin=0.5)[0]["q"][:2] == ["p4", "p6"]  # -.15 - .075 = -.225


def test_the_best_of_several_right_passages_counts(tmp_path: Path) -> None:
    found = source(tmp_path / "data", TEXTS, [row("q", ["p9", "p1"])], SCORES)
    assert mined(found, tmp_path / "out", margin=0.28)[0]["q"] == ["p7", "p8"]  # .90 - .28 = .62, p9 is right


def test_a_right_passage_that_was_not_found_counts_too(tmp_path: Path) -> None:
    found = source(tmp_path / "data", TEXTS, [row("q", ["p9"])], SCORES)
    negatives, summary = mined(found, tmp_path / "out", last_rank=3, margin=0.0)
    assert (negatives["q"], summary["left_out"]) == ([], {"margin": 3})
    assert mined(found, tmp_path / "out", last_rank=3, margin=-0.41)[0]["q"] == ["p1", "p2"]  # .50 + .41


def test_passages_with_an_answer_are_left_out(tmp_path: Path) -> None:
    assert of_one(tmp_path, ("paris", ""))[0] == ["p0", "p1", "p3", "p4", "p6", "p9"]
    assert of_one(tmp_path, ("paris", ""))[1]["answer"] == 1
    assert "p8" in of_one(tmp_path, ("paris",), drop_answers=False)[0]
    assert "p8" in of_one(tmp_path, ("pari.",))[0]
    assert "p8" not in of_one(tmp_path, ("pari.",), regex_answers=True)[0]


def test_right_by_id_though_the_row_has_another_text(tmp_path: Path) -> None:
    inline = {"query_id": "q", "query": "?", "positive_passages": [{"docid": "p1", "title": "", "text": "One."}]}
    found = source(tmp_path / "data", TEXTS, [{**inline, "negative_passages": []}], SCORES)
    negatives, _ = mined(found, tmp_path / "out", last_rank=10)
    assert "p1" not in negatives["q"] and "p2" in negatives["q"]
    assert mined(found, tmp_path / "out", margin=0.33)[0]["q"] == ["p8", "p9"]  # its score counts: .90 - .33


def test_rows_of_one_question_share_what_is_right(tmp_path: Path) -> None:
    rows = [row("a", ["p0"]), row("b", ["p3"]), row("a", ["p1"], ["nine"])]
    found = source(tmp_path / "data", TEXTS, rows, np.repeat(SCORES, 3, axis=1))
    negatives, summary = mined(found, tmp_path / "out", last_rank=10)
    assert list(negatives) == ["a", "b"] and summary["questions"] == 2
    assert negatives["a"] == ["p2", "p3", "p4", "p6", "p8"]


def test_rows_of_one_text_share_what_is_right(tmp_path: Path) -> None:
    """As in a table of pairs with ids: each line has its own question, and no right passage of the other."""
    rows = [{**row(name, [right]), "query_text": text} for name, right, text in (("a", "p0", "?"), ("b", "p3", "?"))]
    found = source(tmp_path / "data", TEXTS, [*rows, row("c", ["p9"])], np.repeat(SCORES, 3, axis=1))
    negatives, summary = mined(found, tmp_path / "out", last_rank=10)
    assert negatives["a"] == negatives["b"] == ["p1", "p2", "p4", "p6", "p8", "p9"] and summary["questions"] == 3
    assert negatives["c"][0] == "p0"


@pytest.mark.parametrize(
    ("own", "title", "of_corpus", "right"),
    [
        ("", Title.join, "Tea", True),
        ("Tea", Title.join, "", True),
        ("Tea", Title.join, "Faust", False),
        ("Tea", Title.drop, "Faust", True),
    ],
)
def test_a_right_text_without_its_title(tmp_path: Path, own: str, title: Title, of_corpus: str, right: bool) -> None:
    rows = [{"query_id": "q", "query": "?", "positive_passages": [{"text": "two", "title": own}], **NO_NEGATIVES}]
    found = source(tmp_path / "data", TEXTS[:2], rows, SCORES[:3])
    lines = [{"docid": f"p{i}", "text": text, "title": of_corpus} for i, text in enumerate(("zero", "one", "two"))]
    corpus = open_corpus(str(write_lines(tmp_path / "titled.jsonl", lines)), "corpus")
    assert isinstance(found.data, QuestionsAndPassages)
    found.data.config.passage.title = title
    negatives, summary = mined(replace(found, data=replace(found.data, corpus=corpus)), tmp_path / "out")
    assert negatives["q"] == ["p0", "p1", "p2"][: 3 - right] and summary["left_out"].get("right", 0) == right


def test_no_margin_without_a_right_passage_in_the_corpus(tmp_path: Path) -> None:
    elsewhere = [{"docid": "x", "title": "", "text": "in no corpus"}]
    rows = [{"query_id": "q", "query": "?", "positive_passages": elsewhere, "negative_passages": []}]
    found = source(tmp_path / "data", TEXTS, rows, SCORES)
    assert len(mined(found, tmp_path / "out", last_rank=3)[0]["q"]) == 3
    negatives, summary = mined(found, tmp_path / "out", last_rank=3, margin=0.0)
    assert (negatives["q"], summary["left_out"], summary["without"]) == ([], {"unknown": 3}, 1)


# Scores of another model ----------------------------------------------------------------------------------------------


def test_margins_go_by_the_scores_of_another_model(tmp_path: Path) -> None:
    judged = tmp_path / "scores.tsv"
    given: dict[str, float] = {"p0": 9, "p1": 4, "p2": 5, "p3": 4.5, "p4": -3, "p5": 7, "p6": 5.5}
    judged.write_text("query_id\tdocid\tscore\n" + "".join(f"q\t{p}\t{s}\n" for p, s in given.items()))
    negatives, left_out = of_one(tmp_path, judged=str(judged), margin=2.5)  # p5, a copy, is right: 7 - 2.5
    assert negatives == ["p1", "p3", "p4"]
    assert left_out == {"right": 2, "unscored": 3, "margin": 2}
    assert of_one(tmp_path, judged=str(judged), max_score=4.2)[0] == ["p1", "p4"]
    lines = [{"query_id": "q", "docid": passage, "score": score} for passage, score in given.items()]
    assert of_one(tmp_path, judged=str(write_lines(judged, lines)), margin=2.5)[0] == negatives
    assert read_lines(tmp_path / "out" / "mined.jsonl")[0]["scores"] == [0.9, 0.8, 0.75]  # the search's own


BAD_LINES = [
    "q p1 3",
    "q\tp1\tmuch",
    "q\tp1\tnan",
    "q\tp1\t1e300",
    '{"query_id": "q", "docid": "p1", "score": 1' + "0" * 400 + "}",
    '{"query_id": "q", "docid": "p1"}',
    '{"query_id": 1, "docid": "p1", "score": 2}',
    "q\tp1\t1" + "0" * 70_000,
    "[" * 3000,
    r'{"query_id": "\ud800", "docid": "p1", "score": 2}',
]


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_bad_line_of_scores_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "scores.tsv"
    path.write_text(f"q\tp0\t1\n{line}\n")
    with raises(DataError, path, "line 2") as caught:
        read_pair_scores(str(path))
    assert len(str(caught.value)) < 400


def test_scores_that_are_not_there(tmp_path: Path) -> None:
    with raises(ConfigError, "none.tsv"):
        read_pair_scores(str(tmp_path / "none.tsv"))
    (tmp_path / "bytes.tsv").write_bytes(b"q\tp\xc3\xa9\xff\t1\n")
    with raises(DataError, "line 1", "UTF-8"):
        read_pair_scores(str(tmp_path / "bytes.tsv"))
    (tmp_path / "empty.tsv").write_bytes(b"")
    assert np.isnan(read_pair_scores(str(tmp_path / "empty.tsv")).of("q", ["p"])).all()


def test_the_last_of_several_scores_counts(tmp_path: Path) -> None:
    (tmp_path / "s.tsv").write_text("q\tp\t1\nq\tr\t5\nq\tp\t2\n")
    scores = read_pair_scores(str(tmp_path / "s.tsv"))
    np.testing.assert_array_equal(scores.of("q", ["p", "r", "x"]), np.array([2, 5, np.nan], dtype=np.float32))


# All together ---------------------------------------------------------------------------------------------------------


def plainly(texts: list[str], rows: list[dict[str, Any]], scores: np.ndarray, config: MiningConfig) -> dict[str, list]:
    """The rules, read aloud."""
    result: dict[str, list[str]] = {}
    for name in dict.fromkeys(r["query_id"] for r in rows):
        own = [i for i, r in enumerate(rows) if r["query_id"] == name]
        score = [float(s) for s in scores[:, own[0]].astype(np.float32)]
        right = {texts[int(p[1:])] for i in own for p in rows[i]["positive_document_ids"]}
        answers = [a.split() for i in own for a in rows[i]["answers"]]
        best = max(s for s, t in zip(score, texts, strict=True) if t in right)
        kept: list[int] = []
        ranked = sorted(range(len(texts)), key=lambda p: -score[p])
        seen = set()
        for p in ranked[config.first_rank - 1 : config.last_rank]:
            words = texts[p].split()
            has = any(words[k : k + len(a)] == a for a in answers for k in range(len(words)))
            close = config.margin is not None and score[p] > best - config.margin
            close |= config.relative_margin is not None and score[p] > best - config.relative_margin * abs(best)
            if texts[p] not in right and not close and texts[p] not in seen:
                seen.add(texts[p])
                if not (has and config.drop_answers):
                    kept.append(p)
        result[name] = [f"p{p}" for p in kept[: config.keep]]
    return result


SETTINGS = [
    {},
    {"first_rank": 5, "last_rank": 40, "keep": 3},
    {"last_rank": 1000, "keep": 1000, "margin": 0.5},
    {"last_rank": 100, "relative_margin": 0.3, "drop_answers": False},
    {"last_rank": 100, "relative_margin": 0.1, "margin": 0.2, "keep": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_as_a_plain_reading_of_the_rules(tmp_path: Path, seed: int, settings: dict, monkeypatch) -> None:
    found, texts, rows = random_source(tmp_path / "data", seed)
    for block in (mining.BLOCK, 7):  # blocks change nothing
        monkeypatch.setattr(mining, "BLOCK", block)
        monkeypatch.setattr(matches, "SCAN", block)
        negatives, summary = mined(found, tmp_path / "out", **settings)
        expected = plainly(texts, rows, found.items_mD, MiningConfig(**{"first_rank": 1, **settings}))
        assert negatives == expected
        assert summary["negatives"] == sum(map(len, expected.values()))
        assert summary["without"] == sum(not n for n in expected.values())
        assert sum(summary["left_out"].values()) + summary["negatives"] == summary["found"]


def test_an_index_in_parts_is_filled_once(tmp_path: Path, monkeypatch) -> None:
    """With few queries in memory it is filled again for each search, with equal negatives."""
    found, _, _ = random_source(tmp_path / "data", 0)
    fill, filled = _Approximate.filled, []
    monkeypatch.setattr(_Approximate, "filled", lambda *args: filled.append(args[2:]) or fill(*args))
    monkeypatch.setattr(mining, "BLOCK", 7)
    monkeypatch.setattr(_Approximate, "shard_bytes", 10_000)  # a part of 40 items
    negatives, _ = mined(found, tmp_path / "out", index="IVF2,Flat;nprobe=2")
    assert len(negatives) > 2 * mining.BLOCK and filled == [(0, 40), (40, 80), (80, 120)]
    monkeypatch.setattr(mining, "SEARCHED_BYTES", 10_000)
    assert mined(found, tmp_path / "out", index="IVF2,Flat;nprobe=2")[0] == negatives and len(filled) > 6


def test_half_precision_passages(tmp_path: Path) -> None:
    found, texts, rows = random_source(tmp_path / "data", 3)
    half = MiningInput(found.data, found.queries_nD, found.items_mD.astype(np.float16))
    expected = plainly(texts, rows, half.items_mD.astype(np.float32), MiningConfig(first_rank=1, margin=0.3))
    assert mined(half, tmp_path / "out", margin=0.3)[0] == expected


def test_memory_does_not_grow_with_what_rows_hold(tmp_path: Path) -> None:
    lists = {"positive_passages": [{"text": "one"}], "negative_passages": [{"text": "x" * 500_000}]}
    rows = [{"query_id": f"q{i}", "query": f"{i}?", **lists} for i in range(40)]
    found = source(tmp_path / "data", TEXTS, rows, np.repeat(SCORES, 40, axis=1))
    tracemalloc.start()
    negatives, _ = mined(found, tmp_path / "out", last_rank=10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(negatives) == 40 and peak < 8e6  # the rows hold 20 MB


def test_keys_are_found_in_all_parts(monkeypatch) -> None:
    monkeypatch.setattr(matches, "SCAN", 4)
    keys = np.array([3, 3, 7, 9, 3, 7, 5, 5])
    assert matches.positions_with(keys, np.array([2, 3, 5, 11, 3])).tolist() == [0, 1, 4, 6, 7]
    assert matches.positions_with(keys, np.array([], dtype=np.int64)).tolist() == []


def test_groups_are_in_the_order_of_their_first_rows() -> None:
    order, ends = grouped(np.array([5, -2, 5, 9, -2, 5]))
    assert order.tolist() == [0, 2, 5, 1, 4, 3] and ends.tolist() == [0, 3, 5, 6]


# Files ----------------------------------------------------------------------------------------------------------------


def test_the_summary_says_what_the_file_is(tmp_path: Path) -> None:
    of_one(tmp_path, margin=0.1)
    summary = json.loads((tmp_path / "out" / "mined.json").read_text())
    assert summary["sha256"] == sha256_of(tmp_path / "out" / "mined.jsonl")
    assert summary["settings"]["margin"] == 0.1 and summary["identity"] == {} and summary["questions"] == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["mined.json", "mined.jsonl"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    found, _, _ = random_source(tmp_path / "data", 0)
    corpus = tmp_path / "data" / "corpus.jsonl"
    stamp = corpus.stat().st_mtime_ns
    corpus.write_bytes(corpus.read_bytes().replace(b"a", b"b"))
    os.utime(corpus, ns=(stamp, stamp))
    with raises(DataError, "corpus.jsonl"):
        mined(found, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    (tmp_path / "file").write_text("")
    with raises(HardwareError, tmp_path / "file"):
        mined(found, tmp_path / "file" / "out")


def test_any_number_of_ranks_writes_the_same_bytes(tmp_path: Path) -> None:
    launch("dist_mining.py", 2)


def test_only_true_and_false_are_booleans() -> None:
    with raises(ConfigError, "drop_answers=yes"):
        parse_options(MineCommand, ["run=x", "drop_answers=yes"], "python -m eval.mine")

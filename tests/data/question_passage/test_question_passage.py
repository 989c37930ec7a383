"""Batches of questions and passages: what is drawn, from what alone it depends, and mined negatives."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.rows import corpus_row, dpr_row, texts_of, tokenize, write_beir, write_lines
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.batch import Batch
from dyad.data.config import (
    DataConfig,
    DrawnPositives,
    NegativeList,
    NegativesConfig,
    PassageConfig,
    QuestionConfig,
    Title,
)
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.dataset import QuestionPassage, TextInputs, passage_texts
from dyad.data.question_passage.negatives import MinedNegatives, draw_entries
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.questions import open_questions
from dyad.data.shards.content_keys import content_key, key_name

HARD, PLAIN, MINED = NegativeList.hard_negatives, NegativeList.negatives, NegativeList.mined


def configured(per_row: int = 0, lists: list[NegativeList] | None = None, file: Path | None = None, **passage: Any):
    return DataConfig(
        question=QuestionConfig(prefix="q: ", length=16),
        passage=PassageConfig(prefix="p: ", **{"length": 64, **passage}),
        negatives=NegativesConfig(per_row=per_row, lists=lists or [HARD], file=str(file) if file else None),
    )


def dataset(path: Path, config: DataConfig, seed: int = 3) -> QuestionPassage:
    questions = open_questions(str(path), config)
    mined = MinedNegatives(config.negatives.file, questions) if config.negatives.file else None
    return QuestionPassage(questions, tokenize, config, seed, mined)


@pytest.fixture(scope="module")
def dpr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row i has i hard negatives and 1 + i mod 3 right passages."""
    rows = (dpr_row(i, hard=i, positives=1 + i % 3) for i in range(7))
    return write_lines(tmp_path_factory.mktemp("dpr") / "train.jsonl", rows)


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "beir")


def flat(value: Any) -> list[Tensor]:
    """All tensors of a batch."""
    if value is None or isinstance(value, Tensor | tuple | int):
        return [value] if isinstance(value, Tensor) else []
    return [tensor for part in vars(value).values() for tensor in flat(part)]


def same(a: Batch, b: Batch) -> bool:
    return len(flat(a)) == len(flat(b)) and all(map(torch.equal, flat(a), flat(b)))


# ---- what a batch holds --------------------------------------------------------------------------------------------


def test_a_batch_without_negatives(dpr: Path) -> None:
    batch = dataset(dpr, configured()).__getitems__([(0, 0), (0, 3)])
    assert texts_of(batch.x) == ["q: what's 0", "q: what's 3"]
    assert texts_of(batch.y) == ["p: P0 right 0 0", "p: P3 right 3 0"]
    assert batch.sample_ids.tolist() == [0, 3] and batch.extra is None
    assert batch.y_keys.tolist() == [Passage(f"right {i} 0", f"P{i}").key for i in (0, 3)]
    assert batch.known_positives is not None
    assert batch.known_positives.row.tolist() == [0, 1] and batch.known_positives.keys.tolist() == batch.y_keys.tolist()
    assert batch.x_keys.dtype == batch.known_positives.keys.dtype == batch.sample_ids.dtype == torch.int64


def test_ragged_hard_negatives(dpr: Path) -> None:
    """A row with fewer gives all it has, none twice; passages and further ones are padded to one length."""
    batch = dataset(dpr, configured(per_row=2)).__getitems__([(0, i) for i in (0, 1, 5)])
    extra = batch.extra
    assert extra is not None and extra.row.tolist() == [1, 2, 2] and not extra.positive.any()
    texts = texts_of(extra.y)
    assert texts[0] == "p: H hard 1 0" and len(set(texts[1:])) == 2 and all("hard 5" in text for text in texts[1:])
    assert extra.keys.tolist() == [Passage(text.removeprefix("p: H "), "H").key for text in texts]
    assert extra.y.shape[1] == batch.y.shape[1]


def test_no_further_passage_is_still_an_extra(dpr: Path) -> None:
    """Ranks must agree that there is one: what the rows hold never decides."""
    batch = dataset(dpr, configured(per_row=2)).__getitems__([(0, 0)])
    extra = batch.extra
    assert extra is not None and extra.y.shape == (0, batch.y.shape[1])
    assert extra.row.shape == extra.keys.shape == extra.positive.shape == (0,)
    assert extra.row.dtype == extra.keys.dtype == torch.int64 and extra.positive.dtype == torch.bool


def test_that_no_row_has_the_hard_negatives_wanted_is_noted(dpr: Path, beir: Path) -> None:
    """One of 100 rows, evenly spaced, is enough; what is mined while it trains is not there yet."""
    source = dataset(beir, configured(per_row=2))
    (note,) = source.notes()
    assert "data.negatives.per_row=2" in note and f"{len(source.questions)} rows" in note and "eval.mine" in note
    assert not dataset(beir, configured()).notes() and not dataset(dpr, configured(per_row=2)).notes()
    config = configured()
    config.negatives = NegativesConfig(per_row=1, lists=[MINED], refresh_every=5)
    assert not dataset(beir, config).notes()


def test_all_positives(dpr: Path) -> None:
    batch = dataset(dpr, configured(per_row=1, positives=DrawnPositives.all)).__getitems__([(0, 2), (0, 0), (0, 1)])
    extra = batch.extra
    assert extra is not None and batch.known_positives is not None
    assert extra.row.tolist() == [0, 0, 0, 2, 2] and extra.positive.tolist() == [True, True, False, True, False]
    mine = {text for text in [*texts_of(batch.y)[:1], *texts_of(extra.y)[:2]]}
    assert mine == {f"p: P2 right 2 {j}" for j in range(3)}
    assert batch.known_positives.row.tolist() == [0, 0, 0, 1, 2, 2]
    assert set(batch.known_positives.keys[:3].tolist()) == {batch.y_keys[0].item(), *extra.keys[:2].tolist()}


def test_which_positive(dpr: Path) -> None:
    def drawn(positives: DrawnPositives) -> set[str]:
        source = dataset(dpr, configured(positives=positives))
        return {texts_of(source.__getitems__([(epoch, 2)]).y)[0] for epoch in range(30)}

    assert drawn(DrawnPositives.first) == {"p: P2 right 2 0"}
    assert drawn(DrawnPositives.one) == {f"p: P2 right 2 {j}" for j in range(3)}


def test_the_first_list_that_is_not_empty(dpr: Path) -> None:
    batch = dataset(dpr, configured(per_row=9, lists=[HARD, PLAIN])).__getitems__([(0, 0), (0, 1)])
    assert batch.extra is not None and texts_of(batch.extra.y) == ["p: N other 0", "p: H hard 1 0"]


def test_known_positives_and_repetitions_are_no_hard_negatives(tmp_path: Path) -> None:
    row = dpr_row(0, hard=2, positives=2)
    row["hard_negative_ctxs"] += [row["positive_ctxs"][1], row["hard_negative_ctxs"][0] | {"passage_id": "again"}]
    only_right = row | {"hard_negative_ctxs": row["positive_ctxs"]}
    source = dataset(write_lines(tmp_path / "a.jsonl", [row, only_right]), configured(per_row=9, lists=[HARD, PLAIN]))
    for epoch in range(20):
        extra = source.__getitems__([(epoch, 0), (epoch, 1)]).extra
        assert extra is not None and extra.row.tolist() == [0, 0, 1]
        assert sorted(texts_of(extra.y)) == ["p: H hard 0 0", "p: H hard 0 1", "p: N other 0"]


def test_scored_pools_are_drawn_each_epoch(tmp_path: Path) -> None:
    """EPR: one of the best and one of the worst, anew in every epoch, each about as often."""
    row = {"question": "q", "ctxs": [{"text": f"c{i}", "score": -i} for i in range(9)]}
    source = dataset(write_lines(tmp_path / "a.jsonl", [row]), configured(per_row=1, pos_pool=3, neg_pool=3))
    right, hard = Counter[str](), Counter[str]()
    for epoch in range(300):
        batch = source.__getitems__([(epoch, 0)])
        assert batch.extra is not None and batch.known_positives is not None and len(batch.known_positives.keys) == 3
        right.update(texts_of(batch.y))
        hard.update(texts_of(batch.extra.y))
    assert set(right) == {"p: c0", "p: c1", "p: c2"} and set(hard) == {"p: c6", "p: c7", "p: c8"}
    assert min(*right.values(), *hard.values()) > 70


def test_hard_negatives_are_drawn_evenly_without_replacement(dpr: Path) -> None:
    """Every ordered choice of 2 of 4 for the same share of all uniforms."""
    grid = [(i + 0.5) / 12 for i in range(12)]
    choices = Counter(tuple(draw_entries([4, 5, 6, 7], [a, b])) for a in grid for b in grid)
    assert len(choices) == 12 and set(choices.values()) == {12}
    assert all(len(set(choice)) == 2 for choice in choices)
    assert sorted(draw_entries([4, 5], [0.9, 0.9, 0.9])) == [4, 5] and draw_entries([], [0.5]) == []
    source = dataset(dpr, configured(per_row=2))
    drawn = Counter[str]()
    for epoch in range(100):
        extra = source.__getitems__([(epoch, 5)]).extra
        assert extra is not None
        drawn.update(texts_of(extra.y))
    assert len(drawn) == 5 and min(drawn.values()) > 20 and max(drawn.values()) < 60


@pytest.mark.parametrize(
    ("title", "expected"), [(Title.join, "p: P0 right"), (Title.drop, "p: right"), (Title.pair, "p: P0|right")]
)
def test_titles(dpr: Path, title: Title, expected: str) -> None:
    assert texts_of(dataset(dpr, configured(title=title)).__getitems__([(0, 0)]).y)[0].startswith(expected)


def test_lengths_are_cut(dpr: Path) -> None:
    batch = dataset(dpr, configured(length=8)).__getitems__([(0, 0)])
    assert batch.y.shape == (1, 8) and batch.x.shape == (1, 16)


# ---- what it depends on --------------------------------------------------------------------------------------------


def test_a_row_is_the_same_in_any_batch(dpr: Path) -> None:
    """Drawing depends on (seed, epoch, id) alone."""
    source = dataset(dpr, configured(per_row=2))
    positions = [(1, i) for i in range(7)]
    whole = source.__getitems__(positions)
    assert same(whole, source.__getitems__(positions))
    assert same(whole, dataset(dpr, configured(per_row=2)).__getitems__(positions))
    assert whole.extra is not None
    for i in range(7):
        alone = source.__getitems__([(1, i)])
        assert alone.extra is not None
        assert alone.y_keys[0] == whole.y_keys[i]
        assert torch.equal(alone.extra.keys, whole.extra.keys[whole.extra.row == i])
    assert not same(whole, dataset(dpr, configured(per_row=2), seed=4).__getitems__(positions))
    assert not same(whole, source.__getitems__([(2, i) for i in range(7)]))


def test_a_pickled_source_gives_the_same(dpr: Path, beir: Path) -> None:
    for path, config in ((dpr, configured(per_row=2)), (beir, configured())):
        source = dataset(path, config)
        data = pickle.dumps(source)
        assert len(data) < 8000
        assert same(pickle.loads(data).__getitems__([(0, 1), (1, 2)]), source.__getitems__([(0, 1), (1, 2)]))


def test_ranks_and_workers_never_change_a_global_batch(dpr: Path) -> None:
    source = dataset(dpr, configured(per_row=3))
    order = Order(source.questions.sizes, source.questions.weights, seed=3, global_batch_size=5)

    def batches(rank: int, world_size: int, workers: int) -> list[Batch]:
        made = build_loader(source, order, rank=rank, world_size=world_size, first_step=0, last_step=4, workers=workers)
        return list(made)

    expected = batches(0, 1, 0)
    assert all(same(*pair) for pair in zip(batches(0, 1, 2), expected, strict=True))
    for step, parts in enumerate(zip(batches(0, 2, 2), batches(1, 2, 0), strict=True)):
        for name in ("sample_ids", "x_keys", "y_keys"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(expected[step], name))
        extras = [part.extra.keys for part in (*parts, expected[step]) if part.extra is not None]
        assert torch.equal(torch.cat(extras[:2]), extras[2])


# ---- mined negatives -----------------------------------------------------------------------------------------------


def mined_row(question: str, *ids: str) -> dict[str, Any]:
    return {"query_id": question, "negatives": list(ids), "scores": [1.0] * len(ids)}


def test_mined_negatives(beir: Path) -> None:
    """By id of the question, in any order; a row without a line has none; the known ones are left out."""
    rows = [mined_row("q3", "d0", "d11", "d2"), mined_row("q7", "d1"), mined_row("q1", "d9"), mined_row("q2")]
    file = write_lines(beir / "mined.jsonl", rows)
    source = dataset(beir, configured(per_row=5, lists=[MINED], file=file))
    assert source.mined is not None
    assert [source.mined.passages(i).positions.tolist() for i in range(6)] == [[], [9], [], [0, 11, 2], [], []]
    extra = source.__getitems__([(0, i) for i in range(6)]).extra
    assert extra is not None and extra.row.tolist() == [1, 3, 3]
    assert sorted(texts_of(extra.y)) == ["p: text 0", "p: text 2", "p: title 9 text 9"], "d11 is right for q3"
    assert pickle.loads(pickle.dumps(source)).mined.passages(3).positions.tolist() == [0, 11, 2]


def test_a_file_that_was_mined_anew_is_read_anew(beir: Path) -> None:
    questions = open_questions(str(beir), DataConfig())
    file = write_lines(beir / "mined.jsonl", [mined_row("q3", "d0")])
    assert MinedNegatives(str(file), questions).passages(3).positions.tolist() == [0]
    write_lines(file, [mined_row("q3", "d5", "d6")])
    assert MinedNegatives(str(file), questions).passages(3).positions.tolist() == [5, 6]


def test_mined_negatives_of_inline_rows_need_a_corpus(dpr: Path, tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", map(corpus_row, range(4)))
    file = write_lines(tmp_path / "mined.jsonl", [mined_row(key_name(content_key(b"what's 1")), "d3")])
    config = configured(per_row=1, lists=[MINED], file=file)
    with raises(ConfigError, f"data.negatives.file={file}", "data.passage.corpus", corpus, "eval.mine"):
        dataset(dpr, config)
    extra = dataset(dpr, replace(config, passage=replace(config.passage, corpus=str(corpus)))).__getitems__(
        [(0, 1), (0, 2)]
    )
    assert extra.extra is not None and texts_of(extra.extra.y) == ["p: title 3 text 3"]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([mined_row("q1"), mined_row("q2", "d1", "d99")], ("line 2", "'d99'", "corpus.jsonl", "eval.mine")),
        ([mined_row("q1"), mined_row("q2"), mined_row("q1")], ("line 3", "line 1")),
        ([{"query_id": "q1"}], ("line 1", "query_id")),
        ([{"query_id": "q1", "negatives": "d1"}], ("line 1",)),
        ([{"query_id": 1, "negatives": []}], ("line 1",)),
        ([{"query_id": "q1", "negatives": ["\ud800"]}], ("line 1",)),
        ([{"query_id": "\ud800", "negatives": []}], ("line 1",)),
    ],
)
def test_mined_files_that_cannot_be_used(beir: Path, rows: list[Any], named: tuple[str, ...]) -> None:
    file = write_lines(beir / "mined.jsonl", rows)
    with raises(DataError, "mined.jsonl", *named):
        MinedNegatives(str(file), open_questions(str(beir), DataConfig()))


def test_a_file_that_was_mined_of_others(beir: Path) -> None:
    questions = open_questions(str(beir), DataConfig())
    with raises(ConfigError, "mined.jsonl"):
        MinedNegatives(str(write_lines(beir / "mined.jsonl", [mined_row("x")])), questions)
    with raises(ConfigError, "data.negatives.file="):
        MinedNegatives(str(beir / "gone.jsonl"), questions)
    other = write_lines(beir / "other.jsonl", [mined_row("q1")])
    for wrong in (f"{beir}/mined.jsonl::{other}", f"{other}@2"):
        with raises(ConfigError, "data.negatives.file="):
            MinedNegatives(wrong, questions)
    empty = MinedNegatives(str(write_lines(beir / "none.jsonl", [])), questions)
    assert [empty.passages(i).positions.tolist() for i in range(6)] == [[]] * 6


def test_mined_must_come_from_somewhere(beir: Path) -> None:
    config = configured(per_row=1, lists=[MINED])
    with raises(ConfigError, "data.negatives.lists", "data.negatives.file"):
        dataset(beir, config)
    config.negatives.refresh_every = 100
    extra = dataset(beir, config).__getitems__([(0, 0)]).extra
    assert extra is not None and len(extra.keys) == 0


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_texts(beir: Path) -> None:
    config = configured(title=Title.pair)
    corpus = open_corpus(str(beir), "corpus")
    texts = passage_texts(corpus, tokenize, config.passage)
    assert len(texts) == 20 and np.array_equal(texts.lengths, corpus.lengths)
    assert texts_of(texts.block(18, 25)) == ["p: |text 18", "p: title 19|text 19"]
    assert texts_of(texts.take([3, 0])) == ["p: title 3|text 3", "p: |text 0"]
    rows = open_questions(str(beir), config)
    questions = TextInputs(rows.question, rows.lengths, tokenize, config.question)
    assert len(questions) == 6 and questions.lengths.tolist() == [6] * 6
    assert texts_of(pickle.loads(pickle.dumps(questions)).block(4, 9)) == ["q: what 4", "q: what 5"]

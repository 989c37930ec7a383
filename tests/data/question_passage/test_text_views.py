"""Texts for two views: from which files, their keys, and rows that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.rows import texts_of, tokenize, write_beir, write_lines

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.config import BadSamples, DataConfig, PassageConfig
from dyad.data.loading.class_batches import ClassNumbers
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.question_passage.text_views import SingleTexts, open_texts


def views(path: Path | str, **config: Any) -> SingleTexts:
    made = DataConfig(**{"passage": PassageConfig(prefix="p: ", length=64), **config})
    return SingleTexts(open_texts(str(path), made), tokenize, made, seed=3)


def test_both_views_are_the_same_tokens_and_keys_are_of_the_content(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b", "title": "t"}, {"contents": "a"}, {"text": "c", "id": 7}]
    batch = views(write_lines(tmp_path / "a.jsonl", rows)).__getitems__([(0, i) for i in range(4)])
    assert texts_of(batch.x) == texts_of(batch.y) == ["p: a", "p: t b", "p: a", "p: c"]
    assert torch.equal(batch.x_keys, batch.y_keys) and len({*batch.x_keys.tolist()}) == 3
    assert batch.x_keys[0] == batch.x_keys[2] and batch.sample_ids.tolist() == [0, 1, 2, 3]


def test_a_folder_of_beir_gives_its_passages_and_a_table_its_column(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "beir", passages=3, queries=1)
    assert len(views(folder).rows) == 3
    (tmp_path / "a.csv").write_text("n,sentence\n1,one\n2,two\n")
    batch = views(tmp_path / "a.csv", columns=["sentence"]).__getitems__([(0, 0), (0, 1)])
    assert texts_of(batch.x) == ["p: one", "p: two"]
    with raises((ConfigError, DataError)):
        views(tmp_path / "a.csv")


def test_bad_rows_are_replaced(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": " "}, {"question": "b"}, {"text": 5}]
    data = views(write_lines(tmp_path / "a.jsonl", rows))
    batch = data.__getitems__([(0, i) for i in range(4)])
    assert texts_of(batch.x) == ["p: a"] * 4 and {b.id for b in batch.bad} == {1, 2, 3}
    with raises(DataError):
        views(write_lines(tmp_path / "b.jsonl", rows[2:]))


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_a_batch(tmp_path: Path, workers: int) -> None:
    data = views(write_lines(tmp_path / "a.jsonl", [{"text": "w" * (1 + i % 30)} for i in range(20)]))
    order = Order(data.rows.shards.sizes, [1.0], seed=0, global_batch_size=8)
    steps: dict[str, Any] = {"first_step": 0, "last_step": 2, "workers": workers}
    whole, *parts = (
        [texts_of(b.x) for b in build_loader(data, order, rank=r, world_size=w, **steps)]
        for r, w in ((0, 1), (0, 2), (1, 2))
    )
    assert whole == [first + second for first, second in zip(*parts, strict=True)]


def test_texts_have_the_numbers_of_their_classes(tmp_path: Path) -> None:
    """A row without a class, or of a class that is none, is replaced or said with its line."""
    rows = [{"text": "a", "mood": "sad"}, {"text": "b", "mood": 1}, {"text": "c"}, {"text": "d", "mood": "odd"}]
    path, numbers = write_lines(tmp_path / "a.jsonl", rows), ClassNumbers(["1", "sad", "old"])
    config = DataConfig(label="mood", passage=PassageConfig(length=64))
    batch = SingleTexts(open_texts(str(path), config), tokenize, config, 3, numbers).__getitems__([(0, 0), (0, 1)])
    assert texts_of(batch.x) == ["a", "b"] and batch.y.tolist() == [1, 0] and batch.y_lengths is None
    for i, named in ((2, ("line 3", "'mood'")), (3, ("line 4", "'odd'", "'old'"))):
        strict = replace(config, bad_samples=BadSamples.stop)
        with raises(SampleError, *named):
            SingleTexts(open_texts(str(path), strict), tokenize, strict, 3, numbers).__getitems__([(0, i)])

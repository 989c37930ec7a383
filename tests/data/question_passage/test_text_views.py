"""Texts for two views: from which files, their keys, and rows that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rows import texts_of, tokenize, write_beir, write_lines

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, PassageConfig
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.question_passage.views import TextViews, open_texts


def views(path: Path | str, **config: Any) -> TextViews:
    made = DataConfig(**{"passage": PassageConfig(prefix="p: ", length=64), **config})
    return TextViews(open_texts(str(path), made), tokenize, made, seed=3)


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
    with pytest.raises((ConfigError, DataError), match="no text"):
        views(tmp_path / "a.csv")


def test_bad_rows_are_replaced(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": " "}, {"question": "b"}, {"text": 5}]
    data = views(write_lines(tmp_path / "a.jsonl", rows))
    batch = data.__getitems__([(0, i) for i in range(4)])
    assert texts_of(batch.x) == ["p: a"] * 4 and {b.id for b in batch.bad} == {1, 2, 3}
    with pytest.raises(DataError, match="no text"):
        views(write_lines(tmp_path / "b.jsonl", rows[2:]))


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_a_batch(tmp_path: Path, workers: int) -> None:
    data = views(write_lines(tmp_path / "a.jsonl", [{"text": "w" * (1 + i % 30)} for i in range(20)]))
    order = Order(data.rows.shards.sizes, [1.0], seed=0, global_batch_size=8)
    steps = {"first_step": 0, "last_step": 2, "workers": workers}
    whole, *parts = (
        [texts_of(b.x) for b in build_loader(data, order, rank=r, world_size=w, **steps)]
        for r, w in ((0, 1), (0, 2), (1, 2))
    )
    assert whole == [first + second for first, second in zip(*parts, strict=True)]

"""Batches of task=labelled: classes as columns, a rare class against all others, and the order that draws it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from hypothesis import given, settings, strategies as st

from dyad.data.base.errors import ConfigError, SampleError
from dyad.data.batch import Batch, Noise
from dyad.data.config import DataConfig
from dyad.data.loading.class_batches import ClassNumbers, Labelled, RareOrder, distinct
from dyad.data.loading.order import local_rows

NAMES = ["ant", "bee", "cat", "dog", "elk"]


def batch(classes: list[int]) -> Batch:
    ids = torch.arange(len(classes))
    return Batch(10.0 * ids[:, None], torch.tensor(classes), ids, 100 + ids, 200 + ids)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_classes_are_shared_over_the_ranks(world_size: int) -> None:
    data = Labelled(None, NAMES, ClassNumbers(NAMES))  # type: ignore[arg-type]
    parts = [data.completed(batch([4, 0, 0]), rank, world_size) for rank in range(world_size)]
    assert torch.cat([part.y for part in parts]).tolist() == [0, 1, 2, 3, 4]
    for part in parts:
        assert part.positives is not None and part.positives.tolist() == [4, 0, 0]
        assert part.y_keys.tolist() == part.y.tolist() and part.x_keys.tolist() == [100, 101, 102]


def test_rare_samples_are_x_and_the_others_y() -> None:
    mixed = batch([1, 0, 1, 1, 0])
    mixed.x_noise = Noise(lambda x, draws: x + torch.from_numpy(draws), np.arange(5.0)[:, None])
    found = Labelled(None).completed(mixed, 0, 1)  # type: ignore[arg-type]
    assert found.x.flatten().tolist() == [10, 40] and found.y.flatten().tolist() == [0, 20, 30]
    assert found.sample_ids.tolist() == [1, 4] and len(found) == 2
    noisy = found.with_noise()
    assert noisy.x.flatten().tolist() == [11, 44] and noisy.y.flatten().tolist() == [0, 22, 33]
    assert found.x_keys.tolist() == [101, 104] and found.y_keys.tolist() == [100, 102, 103]


def test_names_of_classes_and_what_is_none() -> None:
    numbers = ClassNumbers(NAMES)
    assert numbers(["dog", "ant"]).tolist() == [3, 0]
    with raises(SampleError, "'cta'", "'cat'"):
        numbers(["cta"], "here: ")
    assert ClassNumbers(["bee"])(["ant", "bee", "cat"]).tolist() == [1, 0, 1]


def rare_order(sizes: list[int], is_rare: np.ndarray, rare: int, batch_size: int, seed: int = 0) -> RareOrder:
    shards: Any = SimpleNamespace(sizes=sizes, weights=[1.0] * len(sizes))
    data = DataConfig(rare="bee", rare_per_batch=rare)
    return RareOrder(shards, is_rare, data, seed=seed, global_batch_size=batch_size)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(20, 200), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(2, 12),
    st.integers(0, 2**31),
    st.integers(1, 5),
)
def test_every_batch_has_its_rare_samples(sizes: list[int], rare: int, others: int, seed: int, world_size: int) -> None:
    """Also every rank its share; an epoch has every other sample once, but for the rest; so do rare ones in theirs."""
    is_rare = np.random.default_rng(seed).random(sum(sizes)) < 0.3
    is_rare[:6], is_rare[6:18] = True, False
    total = rare + others
    order = rare_order(sizes, is_rare, rare, total, seed)
    steps = [order.ids(step) for step in range(order.steps_per_epoch)]
    assert all(is_rare[ids].sum() == rare and len(ids) == total for ids in steps)
    seen = np.concatenate(steps)
    assert np.unique(seen[~is_rare[seen]], return_counts=True)[1].max() == 1
    assert order.steps_per_epoch == (~is_rare).sum() // others
    rare_epoch = is_rare.sum() // rare
    first = np.concatenate([order.ids(step) for step in range(rare_epoch)])
    assert np.unique(first[is_rare[first]], return_counts=True)[1].max() == 1
    step = seed % 17
    epochs, parts = zip(*(order.local(step, rank, world_size) for rank in range(world_size)), strict=True)
    assert set(epochs) == {step}
    np.testing.assert_array_equal(np.concatenate(parts), order.ids(step))
    for rank, part in enumerate(parts):
        share = local_rows(total, rank, world_size)
        assert abs(is_rare[part].sum() - rare * (share.stop - share.start) / total) < 1.001
    np.testing.assert_array_equal(rare_order(sizes, is_rare, rare, total, seed).ids(step), order.ids(step))


def test_an_epoch_leaves_out_what_fills_no_batch_of_the_others() -> None:
    is_rare = np.arange(1000) < 100
    order = rare_order([1000], is_rare, 1, 60)
    seen = np.unique(np.concatenate([order.ids(step) for step in range(order.steps_per_epoch)]))
    others = (~is_rare).sum()
    assert order.samples_per_epoch == others
    assert order.left_out == pytest.approx(1 - (~is_rare[seen]).sum() / others) == pytest.approx(15 / 900)


def test_too_few_of_a_kind() -> None:
    is_rare = np.arange(40) < 5
    with raises(ConfigError, "data.rare=bee", "5 samples"):
        rare_order([40], is_rare, 6, 16)
    with raises(ConfigError, "data.rare=bee", "35 samples"):
        rare_order([40], is_rare, 4, 40)


def test_a_name_is_one_class_in_both_forms_of_unicode() -> None:
    one, two = "gr\u00fcn", "gru\u0308n"
    for names in ([one, "rot"], [two, "rot"]):  # as recorded by a run, too
        assert ClassNumbers(names)([one, two, "rot"]).tolist() == [0, 0, 1]
    assert distinct([one, "rot", two, two]) == [one, "rot"] and distinct([two, "rot"]) == [two, "rot"]

"""The order of samples: a pure function of seed, epoch and position, fair and local."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.messages import raises
from hypothesis import given, settings, strategies as st

from dyad.data.base.errors import ConfigError
from dyad.data.loading.order import CHUNK, Order, permuted, permuted_chunks

PINNED_SMALL = [154, 196, 223, 251, 258, 300, 756, 833]
PINNED_LARGE = [83884153, 119138839, 263092297, 346397835]


def one_source(size: int, batch: int, seed: int = 0, shuffle: str = "window") -> Order:
    return Order([size], [1.0], seed=seed, global_batch_size=batch, shuffle=shuffle)


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    steps = order.steps_per_epoch
    return np.concatenate([order.ids(epoch * steps + step) for step in range(steps)])


def test_the_share_that_an_epoch_leaves_out() -> None:
    for size, batch, share in ((120, 32, 0.2), (128, 32, 0), (63, 32, 31 / 63)):
        order = one_source(size, batch)
        assert order.left_out == pytest.approx(share) == pytest.approx(1 - len(epoch_of(order, 1)) / size)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(1, 300))
def test_permutations_are_permutations(size: int, seed: int, chunk: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 2**63, 6).tolist()
    everything = np.arange(size)
    assert np.array_equal(np.sort(permuted(everything, size, keys)), everything)
    moved = permuted_chunks(everything, size, chunk, keys)
    assert np.array_equal(np.sort(moved), everything)
    # runs stay whole: apart from the borders of chunks, the next position holds the next id
    assert (np.diff(moved) != 1).sum() <= -(-size // chunk)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.data(), st.integers(0, 2**31), st.sampled_from(["window", "full"]))
def test_every_id_once_per_epoch_apart_from_the_tail(size: int, data: st.DataObject, seed: int, shuffle: str) -> None:
    batch = data.draw(st.integers(1 + size // 20, size))
    order = one_source(size, batch, seed, shuffle)
    seen = epoch_of(order, data.draw(st.integers(0, 50)))
    assert order.steps_per_epoch == size // batch
    assert len(np.unique(seen)) == len(seen) == size // batch * batch
    assert seen.min() >= 0 and seen.max() < size


def test_batches_are_sorted_int64() -> None:
    ids = one_source(1000, 64).ids(5)
    assert ids.dtype == np.int64 and ids.shape == (64,) and (np.diff(ids) > 0).all()


@pytest.mark.parametrize(("size", "batch"), [(257, 256), (1000, 300), (7, 4)])
def test_tail_rotates_so_that_nothing_is_starved(size: int, batch: int) -> None:
    """Over one turn of the rotation every id is left out equally often, give or take one."""
    order = one_source(size, batch)
    left_out = np.zeros(size, int)
    epochs = -(-size // (size - order.steps_per_epoch * batch))
    for epoch in range(epochs):
        left_out[np.setdiff1d(np.arange(size), epoch_of(order, epoch))] += 1
    assert left_out.max() - left_out.min() <= 1
    assert left_out.sum() == epochs * (size - order.steps_per_epoch * batch)


def test_windows_of_a_large_epoch_cover_it_once() -> None:
    """Three windows and a rest, a short last chunk, a tail: each id still comes once."""
    order = one_source(3 * 65_536 + 10_017, 1000)
    seen = epoch_of(order, 2)
    assert len(np.unique(seen)) == len(seen) == 206_000


def test_reading_is_local_within_a_window() -> None:
    """A window of 65,536 samples consists of 256 whole chunks, up to the two at its borders and the short one."""
    order = one_source(1_000_000, 4096)
    window = np.concatenate([order.ids(step) for step in range(16)])
    assert len(np.unique(window // CHUNK)) <= 2 * (16 * 4096 // CHUNK + 2)  # a rotated or shifted chunk touches two
    assert len(np.unique(order.ids(0) // CHUNK)) > 200  # and a batch is spread over them


def test_full_shuffle_spreads_over_everything() -> None:
    ids = one_source(1_000_000, 4096, shuffle="full").ids(0)
    assert len(np.unique(ids // CHUNK)) > 2000


@pytest.mark.parametrize("size", [3, 10, 100])
def test_places_are_uniform(size: int) -> None:
    """χ² of where an id lands over 1,000 epochs, per id; the bound is far out in the tail (p < 1e-6)."""
    order = one_source(size, 1)
    places = np.zeros((size, size))
    for epoch in range(1000):
        places[np.concatenate([order.ids(epoch * size + s) for s in range(min(size, 3))]), range(min(size, 3))] += 1
    expected = 1000 / size
    chi2 = ((places[:, : min(size, 3)] - expected) ** 2 / expected).sum(axis=0)
    assert (chi2 < size + 6 * np.sqrt(2 * size) + 15).all(), chi2


def test_epochs_and_seeds_differ_and_repeat() -> None:
    a, b = one_source(10_000, 100, seed=1), one_source(10_000, 100, seed=2)
    assert not np.array_equal(a.ids(0), b.ids(0))
    assert not np.array_equal(a.ids(0), a.ids(a.steps_per_epoch))
    assert np.array_equal(a.ids(7), one_source(10_000, 100, seed=1).ids(7))
    assert a.local(99, 0, 1)[0] == 0 and a.local(100, 0, 1)[0] == 1


def test_same_in_another_process() -> None:
    code = (
        "import json; from dyad.data.loading.order import Order;"
        "print(json.dumps(Order([70_000, 500], [1.0, 2.5], seed=3, global_batch_size=64).ids(1234).tolist()))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == Order([70_000, 500], [1.0, 2.5], seed=3, global_batch_size=64).ids(1234).tolist()


def test_order_is_pinned() -> None:
    """Runs resume from a step number: these very ids must never change."""
    assert one_source(1000, 8).ids(0).tolist() == PINNED_SMALL
    assert (
        Order([400_000_000], [1.0], seed=1, global_batch_size=4, shuffle="window").ids(10**8 + 3).tolist()
        == PINNED_LARGE
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(0, 200))
def test_ranks_share_the_batch(world_size: int, step: int) -> None:
    order = one_source(5000, 64)
    parts = [order.local(step, rank, world_size) for rank in range(world_size)]
    assert {epoch for epoch, _ in parts} == {step // order.steps_per_epoch}
    assert np.array_equal(np.concatenate([ids for _, ids in parts]), order.ids(step))
    sizes = [len(ids) for _, ids in parts]
    assert max(sizes) - min(sizes) <= 1


def test_weighted_sources() -> None:
    """Weight 2.5: each id twice or three times; 0.25: another quarter each epoch; 1: once."""
    order = Order([400, 1000, 300], [2.5, 0.25, 1.0], seed=0, global_batch_size=50)
    assert order.samples_per_epoch == 1000 + 250 + 300 and order.steps_per_epoch == 31
    quarters = []
    for epoch in range(2):
        counts = np.bincount(epoch_of(order, epoch), minlength=1700)
        assert set(counts[:400]) == {2, 3} and (counts[:400] == 3).sum() == 200
        assert set(counts[400:1400]) == {0, 1} and counts[400:1400].sum() == 250
        assert (counts[1400:] == 1).all()
        quarters.append(np.flatnonzero(counts[400:1400]))
    assert not np.array_equal(*quarters)


def test_every_sample_of_a_light_source_has_its_turn() -> None:
    order = Order([5000], [0.1], seed=0, global_batch_size=100)
    seen = np.unique(np.concatenate([epoch_of(order, epoch) for epoch in range(100)]))
    assert len(seen) > 4950  # each is missed with probability 0.9^100


def test_what_cannot_work() -> None:
    with raises(ConfigError, "global_batch_size=11"):
        one_source(10, 11)
    with raises(ConfigError, "0.001", "100 samples"):
        Order([100, 500], [0.001, 1.0], seed=0, global_batch_size=10)


def test_an_empty_source_is_harmless() -> None:
    order = Order([0, 100], [1.0, 1.0], seed=0, global_batch_size=100)
    assert order.ids(0).tolist() == list(range(100))

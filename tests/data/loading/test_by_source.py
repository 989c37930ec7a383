"""data.batches=by_source: every batch of one source, a pure function of seed and step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from helpers.messages import raises
from hypothesis import given, settings, strategies as st

from dyad.data.base.errors import ConfigError
from dyad.data.loading.by_source import BySource
from dyad.data.loading.order import Order

SHUFFLES = st.sampled_from(["window", "full"])
PINNED = [[7, 11, 15, 18], [2, 6, 12, 19], [22, 29, 31, 34]]


def of(sizes: list[int], weights: list[float], batch: int, seed: int = 0, shuffle: str = "window") -> BySource:
    names = [f"{chr(97 + i)}.jsonl" for i in range(len(sizes))]
    return BySource(sizes, weights, names, seed=seed, global_batch_size=batch, shuffle=shuffle)


def epoch_of(order: BySource, epoch: int) -> list[np.ndarray]:
    return [order.ids(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(20, 200), st.sampled_from([1.0, 1.5, 2.0, 3.0])), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(0, 2**31),
    st.integers(0, 9),
    SHUFFLES,
)
def test_batches_of_one_source(
    sources: list[tuple[int, float]], batch: int, seed: int, epoch: int, shuffle: str
) -> None:
    """Each batch within one source, ⌊w·n/G⌋ batches of each, each id ⌊w⌋ or ⌈w⌉ times but for the rest."""
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    order = of(sizes, weights, batch, seed, shuffle)
    starts = np.cumsum([0, *sizes])
    batches = epoch_of(order, epoch)
    owners = [set((np.searchsorted(starts, ids, side="right") - 1).tolist()) for ids in batches]
    assert all(len(owner) == 1 and (np.diff(ids) >= 0).all() for owner, ids in zip(owners, batches, strict=True))
    counted = Counter(owner.pop() for owner in owners)
    assert [counted[i] for i in range(len(sizes))] == [round(w * n) // batch for n, w in sources]
    times = np.bincount(np.concatenate(batches), minlength=starts[-1])
    for i, (size, weight) in enumerate(sources):
        own = times[starts[i] : starts[i + 1]]
        assert own.max() <= np.ceil(weight)
        missing = np.maximum(int(weight) - own, 0).sum()
        assert missing <= round(weight * size) % batch  # only the rest that fills no batch


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 16), st.integers(0, 300), SHUFFLES)
def test_ranks_share_the_batch(world_size: int, step: int, shuffle: str) -> None:
    order = of([100, 37, 250], [1.0, 2.0, 0.5], 16, shuffle=shuffle)
    parts = [order.local(step, rank, world_size) for rank in range(world_size)]
    assert {epoch for epoch, _ in parts} == {step // order.steps_per_epoch}
    assert np.array_equal(np.concatenate([ids for _, ids in parts]), order.ids(step))


def test_batches_are_mixed_anew_and_sources_differ() -> None:
    order = of([640, 640], [1.0, 1.0], 32, seed=3)
    first, second = ([order.source(e * 40 + s)[0] for s in range(40)] for e in range(2))
    assert sorted(first) == sorted(second) == [0] * 20 + [1] * 20 and first != second
    assert first != sorted(first)
    a, b = (np.concatenate([ids for ids in epoch_of(order, 0) if (ids[0] >= 640) == side]) for side in (False, True))
    assert not np.array_equal(a, b - 640)  # two sources of one size are not in one order


def test_what_an_epoch_leaves_out_rotates() -> None:
    order = of([50, 23], [1.0, 1.0], 10)
    left_out = np.zeros(73, int)
    for epoch in range(69):  # whole turns of the second source: 3 of 23 are left out of an epoch
        left_out[np.setdiff1d(np.arange(73), np.concatenate(epoch_of(order, epoch)))] += 1
    assert (left_out[:50] == 0).all() and (left_out[50:] == 9).all()


def test_the_order_is_pinned() -> None:
    """Runs resume from a step number: these very ids must never change. One source is its own order."""
    assert [of([20, 30], [1.0, 1.0], 4, seed=1).ids(step).tolist() for step in (0, 5, 13)] == PINNED
    assert of([20, 30], [1.0, 1.0], 4).steps_per_epoch == 12 and of([20, 30], [1.0, 1.0], 4).samples_per_epoch == 50


def test_a_source_smaller_than_a_batch_is_named() -> None:
    with raises(ConfigError, "b.jsonl", "global_batch_size=7"):
        of([100, 7], [1.0, 1.0], 8)
    assert of([100, 7], [1.0, 2.0], 8).steps_per_epoch == 13
    assert of([100, 7], [1.0, 1.0], 7).steps_per_epoch == 15
    with raises(ConfigError, "b.jsonl", "5 samples"):
        of([100, 10], [1.0, 0.5], 8)
    Order([100, 7], [1.0, 1.0], seed=0, global_batch_size=8)  # mixed takes it

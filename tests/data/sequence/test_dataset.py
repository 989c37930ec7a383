"""Batches of sequences against loops over the log, drawn noise, frames, and histories of events to predict."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.messages import raises
from test_log import ROWS, write

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import SequenceConfig
from dyad.data.loading.drawn_items import DENSITIES, DrawnItems
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.sequence.dataset import NEXT, OWN, Sequences, catalogue_of
from dyad.data.sequence.frames import Frames, frame_files
from dyad.data.sequence.histories import next_items
from dyad.data.sequence.items import ItemFrames, ItemNumbers
from dyad.data.sequence.log import Log, read_log
from dyad.data.shards.content_keys import content_key

LENGTHS = (5, 2, 1, 9, 3)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    draws = np.random.default_rng(0).integers(0, 6, sum(LENGTHS))
    users = np.repeat([f"u{n}" for n in range(len(LENGTHS))], LENGTHS)
    rows = [(user, f"i{item}", time) for time, (user, item) in enumerate(zip(users, draws, strict=True))]
    return read_log([write(tmp_path / "log.csv", rows)], SequenceConfig())


def pairs(log: Log, ahead: int) -> list[tuple[int, int]]:
    """Numbers of the items of x and y of each step, of one sequence after the other."""
    bounds = zip(log.starts[:-1], log.starts[1:], strict=True)
    return [(int(log.item_e[e]), int(log.item_e[e + ahead])) for a, b in bounds for e in range(a, b - ahead)]


def test_batches_are_the_steps_of_their_windows(log: Log) -> None:
    data = Sequences(log, ItemNumbers(log.items), 4, NEXT)
    assert len(data.windows) == 5 and data.pairs == sum(LENGTHS) - len(LENGTHS)
    batch = data.__getitems__([(0, window) for window in range(5)])
    assert [*zip(batch.x.tolist(), batch.y.tolist(), strict=True)] == pairs(log, NEXT)
    assert batch.sample_ids.tolist() == [*range(data.pairs)] == batch.x_keys.tolist()
    assert batch.y_keys.tolist() == [content_key(log.items[item].encode()) for item in batch.y.tolist()]
    assert batch.x_places is not None and batch.x_places.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    one = data.__getitems__([(3, 3)])
    assert one.sample_ids.tolist() == batch.sample_ids[9:13].tolist() and torch.equal(one.x, batch.x[9:13])
    own = Sequences(log, ItemNumbers(log.items), 16, OWN)
    of_steps = own.__getitems__([(0, window) for window in range(len(own.windows))])
    assert torch.equal(of_steps.x, of_steps.y) and len(of_steps) == sum(LENGTHS) - 1  # without the sequence of one step
    assert own.notes()[0].endswith("4 samples of at most 9 steps; left out: 1 of one step")
    assert data.notes()[0].endswith("5 samples of at most 4 steps")
    assert data.where(3) == "data.train: the sequence of 'u3'"
    assert own.fingerprint != data.fingerprint == pickle.loads(pickle.dumps(data)).fingerprint


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_same_steps_for_any_number_of_ranks(log: Log, workers: int) -> None:
    data = Sequences(log, ItemNumbers(log.items), 4, NEXT)
    order = Order([len(data.windows)], [1.0], seed=0, shuffle="full", global_batch_size=4)

    def loaded(world: int) -> list[list[int]]:
        ranks = [
            build_loader(data, order, rank=rank, world_size=world, first_step=0, last_step=3, workers=workers)
            for rank in range(world)
        ]
        steps = []
        for parts in zip(*ranks, strict=True):
            for part in parts:
                assert part.x_places is not None and len(part.x_places) == len(part.x) == len(part)
            steps.append([*chain.from_iterable(part.sample_ids.tolist() for part in parts)])
        return steps

    assert loaded(1) == loaded(2) == loaded(3)


def test_noise_is_drawn_by_how_often_items_come_next(log: Log, tmp_path: Path) -> None:
    data = Sequences(log, ItemNumbers(log.items), 4, NEXT)
    catalogue = catalogue_of(data, [str(tmp_path / "log.csv")], None)
    draws = dict(zip(catalogue.keys.tolist(), catalogue.draws_N.tolist(), strict=True))
    next_ones = [y for _, y in pairs(log, NEXT)]
    assert draws == {content_key(name.encode()): next_ones.count(i) for i, name in enumerate(log.items)}
    drawn = DrawnItems(catalogue, DENSITIES["uniform"](catalogue, None), 10, 4, seed=0)
    windows = [(0, 3), (0, 0), (0, 4), (0, 1)]
    whole = drawn.added(data.__getitems__(windows), 0, slice(0, 4))
    parts = [drawn.added(data.__getitems__(windows[rows]), 0, rows) for rows in (slice(0, 3), slice(3, 4))]
    extras = [part.extra for part in (whole, *parts) if part.extra is not None]
    assert len(extras[0].y) == 10 and torch.equal(extras[0].y, torch.cat([extra.y for extra in extras[1:]]))
    starts = np.flatnonzero(whole.x_places == 0)
    assert {*extras[0].row.tolist()} <= {*starts.tolist()}


def test_frames_are_read_by_number(tmp_path: Path) -> None:
    arrays = [
        np.random.default_rng(n).normal(size=(steps, 3)).astype(t)
        for n, (steps, t) in enumerate(((4, "f2"), (2, "f8")))
    ]
    for n, array in enumerate(arrays):
        np.save(tmp_path / f"{n}.npy", array)
    frames = Frames(frame_files(str(tmp_path)))
    whole = np.concatenate([array.astype(np.float32) for array in arrays])
    assert np.array_equal(frames.read(np.array([5, 0, 3, 5])), whole[[5, 0, 3, 5]]) and frames.width == 3
    data = Sequences(frames.as_log(), ItemFrames(frames), 3, OWN)
    batch = data.__getitems__([(0, n) for n in range(len(data.windows))])
    assert np.array_equal(batch.x.numpy(), whole[1:]) and torch.equal(batch.x, batch.y)  # 1 + 3 steps, and 2
    arrays[1][1, 2] = np.nan
    np.save(tmp_path / "1.npy", arrays[1])
    with raises(DataError, "1.npy", "not finite"):
        Frames(frame_files(str(tmp_path))).read(np.arange(6))


def test_frames_have_no_weights(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    with raises(ConfigError, f"data.train={tmp_path}@2", "weights"):
        frame_files(f"{tmp_path}@2")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 4)), ["4 features"]),
        (np.zeros(3), ["(3,)"]),
        (np.zeros((3, 3), np.int64), ["int64"]),
        (np.array([{}]), ["cannot be read"]),
    ],
)
def test_files_that_are_no_frames(array: np.ndarray, words: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", array, allow_pickle=True)
    with raises(DataError, "b.npy", *words):
        Frames(frame_files(str(tmp_path)))


def test_histories_are_the_items_before_an_event(tmp_path: Path) -> None:
    later = [("ann", "b", 9), ("ann", "new", 10), ("ann", "a", 11), ("bob", "b", 0), ("dan", "a", 1), ("dan", "c", 2)]
    files = [write(tmp_path / "train.csv", ROWS), write(tmp_path / "val.csv", later)]
    log = read_log(files, SequenceConfig())
    events = next_items(log, ItemNumbers(log.items[:3]), 2, 1, 1)
    shown = [
        (
            log.users[events.user_n[i]],
            "".join(log.items[item] for item in events.before(i)),
            log.items[events.target_n[i]],
        )
        for i in range(len(events))
    ]
    # bob's b is before all else, dan's first has nothing before it; the unknown item is in no history
    assert shown == [("ann", "abc", "b"), ("ann", "abcb", "new"), ("ann", "abcb", "a"), ("dan", "a", "c")]
    numbers = {name: number for number, name in enumerate(log.items)}
    assert events.block(0, 4).tolist() == [[numbers[c] for c in text] for text in ("bc", "cb", "cb")] + [
        [numbers["a"], -1]
    ]
    event, item = events.seen()
    seen = [{log.items[i] for i in item[event == n]} for n in range(4)]
    assert seen == [{"a", "c"}, {"a", "b", "c"}, {"b", "c"}, {"a"}]
    assert events.repeated_n.tolist() == [True, False, True, False]
    assert events.without_history == 2  # bob's b and dan's a
    assert events.train_e.sum() == len(ROWS)
    with raises(DataError, "val.csv", "nothing can be predicted"):
        next_items(
            read_log([files[0], write(tmp_path / "val.csv", [("eve", "a", 1)])], SequenceConfig()),
            ItemNumbers(["a"]),
            2,
            1,
            1,
        )

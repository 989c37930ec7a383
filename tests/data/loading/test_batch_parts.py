"""Batches made in parts: the same batch, two batches of shared memory at most, a time limit for a sample."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers.tiny_runs import wait_for
from torch import Tensor

from dyad.data.batch import PADDING, BadSample, Batch, Extra, ExtraX, KnownPositives, Noise
from dyad.data.image_text.stream import StreamBatch
from dyad.data.loading.batch_parts import _packed, assembled
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.loading.workers import begin_item


@pytest.fixture
def order() -> Order:
    return Order([37], [1.0], seed=3, global_batch_size=10)


class Numbers:
    """A data set of its sample ids."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        ids = torch.tensor([sample_id for _, sample_id in positions])
        return Batch(ids, ids, ids, ids, ids)

    def where(self, sample_id: int) -> str:
        return f"sample {sample_id}"


class Images(Numbers):
    """Images whose pixels are the sample id, and how large each part was."""

    side = 64

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        batch = super().__getitems__(positions)
        batch.x = batch.x.to(torch.uint8)[:, None, None, None].repeat(1, 3, self.side, self.side)
        batch.y = torch.full((len(batch), 1), len(batch))
        return batch


def shared_files() -> dict[int, int]:
    """The files in /dev/shm, also without a name, of this process and its loader processes: their bytes by number."""
    sizes: dict[int, int] = {}
    for process in [psutil.Process(), *psutil.Process().children()]:
        for kind in ("fd", "map_files"):
            folder = f"/proc/{process.pid}/{kind}"
            with suppress(OSError):
                for name in os.listdir(folder):
                    with suppress(OSError):
                        if os.readlink(f"{folder}/{name}").startswith("/dev/shm/torch_"):
                            file = os.stat(f"{folder}/{name}")
                            sizes[file.st_ino] = file.st_blocks * 512
    return sizes


@contextmanager
def most_shared() -> Iterator[list[int]]:
    """The most bytes in shared memory at one time of the block, as a list of one: what two looks in a row find was
    there between them. One look takes time: it may find a part that is given back, and then the next."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        before: dict[int, int] = {}
        while not done.wait(0.002):
            now = shared_files()
            peak[0] = max(peak[0], sum(min(size, before.get(number, 0)) for number, size in now.items()))
            before = now

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join()


@pytest.fixture(params=[False, True], ids=["", "closed late"])
def closed_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether workers do not come to closing the files that they have sent, as beside much other work."""
    if request.param:
        sent = reduction.DupFd
        monkeypatch.setattr(reduction, "DupFd", lambda fd: (os.dup(fd), sent(fd))[1])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("workers", "batch"), [(1, 600), (2, 600), (3, 16)])
@pytest.mark.usefixtures("closed_late")
def test_shared_memory_holds_two_batches_at_most(workers: int, batch: int) -> None:
    """While batches are taken slowly, fast, and put together."""
    order = Order([4 * batch], [1.0], seed=3, global_batch_size=batch)
    sizes = []
    loader = build_loader(Images(), order, rank=0, world_size=1, first_step=0, last_step=8, workers=workers)
    with most_shared() as peak:
        for step, made in enumerate(loader):
            assert torch.equal(made.x[:, 0, 0, 0], torch.from_numpy(order.ids(step)).to(torch.uint8))
            sizes += made.y[:, 0].tolist()
            time.sleep(0.1 * (step % 2))
            if step == 1:  # parts of the next batches lie there now, or will soon
                wait_for(lambda: peak[0] > 0, "nothing was ever shared")
    image = 3 * Images.side**2
    assert 0 < peak[0] <= 2 * batch * image + 4096 * 64, (peak[0] / batch / image, "batches")
    assert 256 >= max(sizes) > batch // (workers + 2) // 2


def brighter(images: Tensor, draws: np.ndarray) -> Tensor:
    return images + torch.from_numpy(draws).to(torch.uint8)[:, :, None, None]


class Texts(Numbers):
    """Tokens of another length in each part; hard negatives and known positives of every second row, and images that
    are wrong for it."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        batch = super().__getitems__(positions)
        width = 8 * (1 + len(positions) % 3)
        rows = torch.arange(0, len(batch), 2)
        batch.x = batch.x[:, None].repeat(1, width)
        batch.y = batch.x
        batch.extra = Extra(batch.y[rows], rows, batch.x_keys[rows], rows > 1)
        batch.known_positives = KnownPositives(rows, batch.x_keys[rows])
        images = batch.x_keys[rows, None, None, None].to(torch.uint8).repeat(1, 3, 4, 4)
        batch.extra_x = ExtraX(images, rows, batch.x_keys[rows], Noise(brighter, np.ones((len(rows), 1))))
        batch.bad = (BadSample(1, 0, "shard", "key", "reason", 3),)
        return batch


def test_parts_become_the_batch(order: Order) -> None:
    """10 rows in parts of 3, 3 and 4: tokens are filled up, rows counted on."""
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "first_step": 0, "last_step": 1, "workers": 2}
    (batch,) = build_loader(Texts(), order, **how)
    ids = torch.from_numpy(order.ids(0))
    assert batch.x.shape == batch.y.shape == (10, 16) and torch.equal(batch.y[:, 0], ids)
    assert batch.x[:6, 8:].eq(PADDING).all() and torch.equal(batch.x[6:, 15], ids[6:])
    rows = torch.tensor([0, 2, 3, 5, 6, 8])
    assert batch.extra is not None and batch.known_positives is not None
    assert torch.equal(batch.extra.row, rows) and torch.equal(batch.known_positives.row, rows)
    assert torch.equal(batch.extra.keys, ids[rows]) and torch.equal(batch.extra.y, batch.y[rows])
    assert [bad.row for bad in batch.bad] == [1, 4, 7]
    assert batch.extra_x is not None and torch.equal(batch.extra_x.row, rows)
    assert torch.equal(batch.extra_x.keys, ids[rows]) and batch.extra_x.x.shape == (6, 3, 4, 4)
    assert torch.equal(batch.extra_x.x[:, 0, 0, 0], ids[rows].to(torch.uint8) + 1)
    (later,) = build_loader(Texts(), order, **how, noise_later=True)
    assert later.extra_x is not None and later.extra_x.noise is not None
    assert torch.equal(later.with_noise().extra_x.x, batch.extra_x.x)  # type: ignore[union-attr]


def test_counts_of_parts_are_added() -> None:
    zero = torch.zeros(1)
    parts = [StreamBatch(zero, zero, zero, zero, zero, taken={1: n}, ended={n: 0}) for n in (2, 3)]
    batch = assembled((_packed(lambda *_, part=part: part, [0, 1], False, 0) for part in parts), 2, False)
    assert batch.taken == {1: 5} and batch.ended == {2: 0, 3: 0} and len(batch) == 2


def test_the_limit_is_for_a_sample_not_for_a_batch() -> None:
    """Two parts of 2.4 s each; a sample is far from its limit, however busy the machine is."""
    order = Order([37], [1.0], seed=3, global_batch_size=32)

    class Slow(Numbers):
        def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
            for _, sample_id in positions:
                begin_item(sample_id)
                time.sleep(0.15)
            return super().__getitems__(positions)

    made = build_loader(Slow(), order, rank=0, world_size=1, first_step=0, last_step=1, workers=1, timeout=2.0)
    assert len(list(made)) == 1

"""The same global batches for any number of ranks and workers, and from any step on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import psutil
import pytest
import torch
from helpers.messages import raises
from helpers.shards import image, write_tar
from helpers.tiny_runs import wait_for
from torch import Tensor

from dyad.data.base.errors import DataError, HardwareError
from dyad.data.batch import Batch, Extra, KnownPositives
from dyad.data.config import AugmentConfig, DataConfig
from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.loading.workers import begin_item, prefetched
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources

SAMPLES, GLOBAL = 37, 10
NOISY = AugmentConfig(crop_scale=[0.4, 1.0], rotate=20, gain=[0.5, 1.5], flip=0.5, grey=0.2)


def tokenize(texts: list[str]) -> Tensor:
    return torch.tensor([[ord(c) for c in text.ljust(12)] for text in texts])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ImageText:
    folder = tmp_path_factory.mktemp("shards")
    for shard, (first, last) in enumerate([(0, 20), (20, 21), (21, SAMPLES)]):
        members = [
            (f"{n:03d}.{suffix}", data)
            for n in range(first, last)
            for suffix, data in (
                ("jpg", image(n, (30, 20), "JPEG")),
                ("txt", "\n\n".join(f"{n} {k}" for k in range(5)).encode()),
            )
        ]
        write_tar(folder / f"{shard}.tar", members)
    config = DataConfig(augment=NOISY)
    shards = open_shards(parse_sources(str(folder)), workers=0)
    return ImageText(shards, PairMaker(ImageSpec(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), tokenize, config, seed=3))


@pytest.fixture
def order() -> Order:
    return Order([SAMPLES], [1.0], seed=3, global_batch_size=GLOBAL)


def load(dataset, order: Order, rank=0, world_size=1, first=0, last=9, workers=0, timeout=60.0) -> Iterator[Batch]:
    how = {"rank": rank, "world_size": world_size, "workers": workers, "timeout": timeout}
    return build_loader(dataset, order, first_step=first, last_step=last, **how)


def batches(*arguments, **options) -> list[Batch]:
    return list(load(*arguments, **options))


def joined(parts: Sequence[Batch]) -> Batch:
    x, y, ids, x_keys, y_keys = (torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Batch)[:5])
    return Batch(x, y, ids, x_keys, y_keys)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Batch)[:5])


@pytest.fixture(scope="module")
def expected(dataset: ImageText) -> list[Batch]:
    """Nine steps, three epochs, one process."""
    return batches(dataset, Order([SAMPLES], [1.0], seed=3, global_batch_size=GLOBAL))


def test_a_run_visits_what_the_order_says(dataset: ImageText, order: Order, expected: list[Batch]) -> None:
    assert [batch.sample_ids.tolist() for batch in expected] == [order.ids(step).tolist() for step in range(9)]
    assert order.steps_per_epoch == 3 and all(len(batch) == GLOBAL for batch in expected)
    assert not torch.equal(expected[0].x[0], expected[1].x[0])


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (2, 2), (4, 0), (3, 1)])
def test_ranks_and_workers_never_change_a_global_batch(dataset, order, expected, world_size: int, workers: int) -> None:
    ranks = [batches(dataset, order, rank, world_size, workers=workers) for rank in range(world_size)]
    assert all(len(rank) == 9 for rank in ranks)
    for step, whole in enumerate(expected):
        parts = [rank[step] for rank in ranks]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert same(joined(parts), whole)


@pytest.mark.parametrize(("first", "workers"), [(1, 0), (3, 2), (7, 2), (8, 0)])
def test_a_run_goes_on_at_any_step(dataset, order, expected, first: int, workers: int) -> None:
    rest = batches(dataset, order, first=first, workers=workers)
    assert len(rest) == 9 - first
    assert all(same(found, whole) for found, whole in zip(rest, expected[first:], strict=True))


def test_no_steps_are_no_batches(dataset: ImageText, order: Order) -> None:
    assert batches(dataset, order, first=4, last=4) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generator_is_left_alone(dataset: ImageText, order: Order, workers: int) -> None:
    state = torch.get_rng_state()
    batches(dataset, order, last=2, workers=workers)
    assert torch.equal(torch.get_rng_state(), state)


class Numbers:
    """A data set of its sample ids."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        ids = torch.tensor([sample_id for _, sample_id in positions])
        return Batch(ids, ids, ids, ids, ids)

    def where(self, sample_id: int) -> str:
        return f"sample {sample_id} of shard x"


class Damaged(Numbers):
    """One shard cannot be read."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        if self.bad in (sample_id for _, sample_id in positions):
            raise DataError(f"shard x: sample {self.bad} is broken")
        return super().__getitems__(positions)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_sample_is_one_clear_error_at_its_step(order: Order, workers: int) -> None:
    bad = order.ids(2)[0].item()
    loader = load(Damaged(bad), order, last=3, workers=workers)
    assert len([next(loader), next(loader)]) == 2
    with raises(DataError, "shard x", f"sample {bad}"):
        next(loader)


class Process(Numbers):
    """Says in which process and with how many threads it was asked."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        here = torch.tensor([[os.getpid(), torch.get_num_threads()]] * len(positions))
        return Batch(here, here, here, here, here)


def test_workers_are_single_threaded_processes(order: Order) -> None:
    found = joined(batches(Process(), order, workers=2)).x
    assert len(found[:, 0].unique()) == 2 and os.getpid() not in found[:, 0] and found[:, 1].eq(1).all()
    assert joined(batches(Process(), order)).x[:, 0].unique().tolist() == [os.getpid()]


@pytest.mark.gpu
def test_batches_are_pinned(dataset: ImageText, order: Order) -> None:
    assert all(batch.x.is_pinned() and batch.y_keys.is_pinned() for batch in batches(dataset, order, last=2))


def test_pinning_reaches_every_tensor_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    zero = torch.zeros(1)
    batch: Any = Batch(
        zero, zero, zero, zero, zero, Extra(zero, zero, zero, zero), KnownPositives(zero, zero)
    ).pin_memory()
    values = [getattr(batch, f.name) for f in fields(Batch)[:5]]
    parts = (batch.extra, batch.known_positives)
    values += [value for part in parts for f in fields(part) if isinstance(value := getattr(part, f.name), Tensor)]
    assert len(values) == 11 and all(value.item() == 1 for value in values)


class Completed(Process):
    """Completes batches with a y of its own."""

    def completed(self, batch: Batch, rank: int, world_size: int) -> Batch:
        return replace(batch, y=torch.zeros(2, 2))


def test_completed_batches_are_pinned_too(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert all(batch.y.eq(1).all() for batch in load(Completed(), order, last=2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_workers_live_on_when_the_whole_job_is_signalled(dataset, order, expected, number: signal.Signals) -> None:
    iterator = build_loader(dataset, order, rank=0, world_size=1, first_step=0, last_step=9, workers=2)
    others = psutil.Process().children()  # that earlier tests have left
    found = [next(iterator)]  # the other worker may not have begun yet
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    for worker in workers:  # as a scheduler does, from a process that is not their parent
        subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
    found += iterator
    assert len(found) == 9
    assert all(same(got, want) for got, want in zip(found, expected, strict=True))


def test_a_worker_ends_when_its_parent_says_so(dataset, order) -> None:
    others = multiprocessing.active_children()
    iterator = load(dataset, order, workers=1)
    next(iterator)
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    worker.terminate()
    worker.join(timeout=60)
    assert worker.exitcode == 0


def test_a_connection_ends_when_it_is_closed_here_whatever_workers_there_are(dataset, order) -> None:
    """They inherit it: another rank would wait for a process that has broken off."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    theirs.settimeout(30)
    iterator = load(dataset, order, workers=2)
    found = [next(iterator), next(iterator)]  # of each worker one: both have begun
    ours.close()
    listener.close()
    assert theirs.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(theirs.getsockname(), timeout=30)
    theirs.close()
    assert len([*found, *iterator]) == 9


# ---- workers that are lost -----------------------------------------------------------------------------------------


STUCK_IN = (3 * 3 + 1) % 2  # of two workers: batches have three parts, and the sample is in the second of batch 3


class Stuck(Numbers):
    """Whoever comes to `sample` in epoch 1 stays there, and says so: `reached` is a pipe."""

    def __init__(self, sample: int, reached: int) -> None:
        self.sample, self.reached = sample, reached

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        for epoch, sample_id in positions:
            begin_item(sample_id)
            if (epoch, sample_id) == (1, self.sample):
                os.write(self.reached, os.getpid().to_bytes(8, "little"))
                time.sleep(3600)
        return super().__getitems__(positions)


@pytest.fixture
def stuck(order: Order) -> Iterator[tuple[Stuck, Callable[[], int]]]:
    """A source that hangs in batch 3, the first of epoch 1, and what waits for that and tells in which process."""
    read, write = os.pipe()
    yield Stuck(int(order.ids(3)[4]), write), lambda: int.from_bytes(os.read(read, 8), "little")
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, None])
def test_a_worker_that_is_lost_is_named_with_what_it_was_at(order, stuck, fault: signal.Signals | None) -> None:
    source, process = stuck
    of_others = multiprocessing.active_children()  # of loaders that nothing has collected yet
    loader = load(source, order, rank=0, workers=2, timeout=3.0)
    found = [next(loader) for _ in range(3)]
    pid = process()
    where = f"rank 0: loader worker {STUCK_IN}", f"process {pid}", f"sample {source.sample} of shard x"
    with raises(HardwareError, *where, "SIGKILL" if fault == signal.SIGKILL else "3 s"):
        if fault:
            os.kill(pid, fault)
        while True:
            found.append(next(loader))
    assert len(found) <= 3
    for child in set(multiprocessing.active_children()).difference(of_others):
        child.join(timeout=60)
        assert child.exitcode == -signal.SIGKILL  # one that is stopped would keep this process from ending


def test_a_worker_that_dies_while_nobody_waits_for_it(order, stuck) -> None:
    """As in the middle of a step."""
    source, process = stuck
    loader = load(source, order, workers=2)
    for _ in range(3):
        next(loader)
    with raises(HardwareError, f"worker {STUCK_IN}", "SIGKILL"):
        os.kill(process(), signal.SIGKILL)
        time.sleep(60)
    with raises(HardwareError, f"worker {STUCK_IN}"):  # should somebody have let that error pass
        next(loader)


def thread_fails(kind: type[BaseException]) -> str:
    """As multiprocessing's thread, which hands out shared tensors, reports an error."""
    sys.excepthook(kind, kind("of a thread"), None)
    return kind.__name__


def test_a_worker_whose_parent_is_gone_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """The connection to it breaks while a tensor is handed over, as once in some hundred kills of a rank."""
    kinds = [ConnectionResetError, EOFError, ValueError]
    found = prefetched(thread_fails, kinds, where=str, workers=1, timeout=60)
    assert list(found) == [kind.__name__ for kind in kinds]
    said = capfd.readouterr().err
    assert "ValueError: of a thread" in said and "ConnectionResetError" not in said and "EOFError" not in said


def test_slow_batches_are_waited_for(order) -> None:
    class Slow(Numbers):
        def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
            time.sleep(0.1)
            return super().__getitems__(positions)

    for timeout in (20.0, 0):
        assert len(batches(Slow(), order, last=3, workers=1, timeout=timeout)) == 3


def test_a_worker_that_is_stopped_when_all_is_done_stays_nowhere(order) -> None:
    others = multiprocessing.active_children()
    loader = load(Numbers(), order, last=2, workers=1)
    assert len([next(loader), next(loader)]) == 2
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    os.kill(worker.pid or 0, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "stopped")
    assert next(loader, None) is None
    worker.join(timeout=60)
    assert worker.exitcode == -signal.SIGKILL

"""The listener of each rank: the orderly end, and a store that is gone with rank 0."""

from __future__ import annotations

import socket
import time
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from helpers.messages import raises

from dyad.train.distributed import failures, listener
from dyad.train.distributed.listener import Listener, ReportStore
from dyad.train.distributed.world import World


def test_a_rank_that_left_late_does_not_count_for_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a sweep share the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(listener, "STUCK_SECONDS", 0.5)
    world = World(0, 2, torch.device("cpu"))
    first = Listener(world, 5)
    first.stop_together()
    ReportStore(5).add(first._left, 1)  # rank 1, after rank 0 has gone on
    second, begun = Listener(world, 5), time.monotonic()
    second.stop_together()
    assert time.monotonic() - begun >= 0.5


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_has_answered_and_notices_late_is_waited_for(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where it would find the store gone with rank 0 and name that as the rank at fault."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(failures, "REGISTER_SECONDS", 0.6)
    rank_1 = ReportStore(5)

    def notice_late() -> None:
        if answers:
            rank_1.register("answered", 1)
        time.sleep(1.5)
        rank_1.register("registered", 1)
        rank_1.register("read", 1)

    late = Thread(target=notice_late)
    late.start()
    found = failures._exchange_reports(World(0, 2, torch.device("cpu")))
    late.join()
    assert found.registered == ({0, 1} if answers else {0})


def test_a_store_that_is_gone_is_one_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with raises(RuntimeError, f"localhost:{port}"):
        ReportStore(2.0)
    assert capfd.readouterr() == ("", "")

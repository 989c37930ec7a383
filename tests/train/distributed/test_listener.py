"""A store that is gone with rank 0 is one error, without lines of C++."""

import socket

import pytest
from helpers.messages import raises

from dyad.train.distributed.listener import ReportStore


def test_a_store_that_is_gone_is_one_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with raises(RuntimeError, f"localhost:{port}"):
        ReportStore(2.0)
    assert capfd.readouterr() == ("", "")

"""A request to stop is never lost, whenever it comes. With whole jobs: tests/faults/test_signals.py."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers_cli import ROOT

from train import signals
from train.signals import ASKING, Start, StopRequest


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ASKING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Late(Start):
    """A request comes just as the loop takes over."""

    def end(self) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return super().end()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", signals.EARLY)
def test_in_the_last_moment_of_the_start(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    for _ in range(200):
        monkeypatch.setattr(signals, "START", Start())
        signals.START.begin()
        signal.raise_signal(number)
        with StopRequest() as stop:
            assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_while_the_loop_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        monkeypatch.setattr(signals, "START", Late())
        signals.START.begin()
        with StopRequest() as stop:
            assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_while_the_configuration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "START", Start())
    signals.START.begin()  # train.__main__.main
    signal.raise_signal(signal.SIGTERM)
    signals.START.begin()  # train.__main__.train
    with StopRequest() as stop:
        assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_nohup_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(signals, "START", Start())
    signals.START.begin()
    signal.raise_signal(signal.SIGHUP)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_came_before_python_could_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch/torchrun.sh blocks signals for a new trainer."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(signals, "START", Start())
    signals.START.begin()
    with StopRequest() as stop:
        assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_who_is_not_asked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "START", Start())
    signals.START.begin()
    with StopRequest() as stop:
        assert not stop.requested


def test_ctrl_c_ends_a_command_that_has_nothing_to_save_with_130() -> None:
    script = "import signal; from data.errors import run; run(lambda: signal.raise_signal(signal.SIGINT))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"")

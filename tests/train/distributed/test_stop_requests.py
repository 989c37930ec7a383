"""No stop request is lost, at any moment of a run. Whole jobs: tests/faults/test_signals.py."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers.cli import ROOT

from dyad.train.distributed import signals
from dyad.train.distributed.signals import STOP_SIGNALS, StartupStop, StopRequest


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Late(StartupStop):
    """A request comes just as the loop takes over."""

    def end(self) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return super().end()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", signals.STARTUP_SIGNALS)
def test_in_the_last_moment_of_the_start(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    for _ in range(200):
        monkeypatch.setattr(signals, "STARTUP", StartupStop())
        signals.STARTUP.begin()
        signal.raise_signal(number)
        with StopRequest() as stop:
            assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_further_signals_of_the_start_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler sends several. The thread that waits for the first has read it after some of them."""
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()
    for _ in range(20):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)
    with StopRequest() as stop:
        assert stop.requested and capfd.readouterr().err == ""


@pytest.mark.usefixtures("handlers")
def test_while_the_loop_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        monkeypatch.setattr(signals, "STARTUP", Late())
        signals.STARTUP.begin()
        with StopRequest() as stop:
            assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_while_the_configuration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()  # train.run.main
    signal.raise_signal(signal.SIGTERM)
    signals.STARTUP.begin()  # run.__main__.run
    with StopRequest() as stop:
        assert stop.requested


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("at_the_end", [True, False], ids=["in the last step of a run", "after it"])
def test_between_two_runs_of_a_sweep(monkeypatch: pytest.MonkeyPatch, at_the_end: bool) -> None:
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()
    with StopRequest():
        if at_the_end:
            signal.raise_signal(signal.SIGTERM)
    if not at_the_end:
        signal.raise_signal(signal.SIGTERM)
    signals.STARTUP.begin()
    assert signals.STARTUP.stop_requested()
    with StopRequest() as stop:
        assert stop.requested


BEGIN = """import signal, sys, time
from dyad.train.distributed import signals
signals.GRACE_SECONDS = 0.2
signals.STARTUP.begin()
"""
WAIT = "time.sleep(60)"
DEAF = "signal.pthread_sigmask(signal.SIG_BLOCK, signals.STARTUP_SIGNALS)"  # the other thread alone hears of it
BUFFERED = "sys.stdout.write('no line')"
ASKED = "while not signals.STARTUP.stop_requested(): time.sleep(0.01)"
READY = "print('ready', flush=True)"


def test_a_run_that_was_asked_between_two_leaves_when_no_agreement_comes() -> None:
    first = "with signals.StopRequest(): pass\nsignal.raise_signal(signal.SIGHUP)\nsignals.STARTUP.begin()\n"
    assert subprocess.run([sys.executable, "-c", BEGIN + first + WAIT], cwd=ROOT, timeout=30).returncode == 75


@pytest.mark.parametrize("busy", [f"{DEAF}\n{READY}\n{BUFFERED}", f"{READY}\n{ASKED}\nprint('a line')"])
def test_a_start_leaves_a_terminal_that_is_closed(busy: str) -> None:
    keyboard, screen = os.openpty()
    with subprocess.Popen([sys.executable, "-Ec", f"{BEGIN}{busy}\n{WAIT}"], stdout=screen, cwd=ROOT) as started:
        assert os.read(keyboard, 16) == b"ready\r\n"
        os.close(screen)
        os.close(keyboard)
        started.send_signal(signal.SIGHUP)
        assert started.wait(30) == 75


@pytest.mark.usefixtures("handlers")
def test_nohup_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()
    signal.raise_signal(signal.SIGHUP)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_came_before_python_could_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch/torchrun.sh blocks signals for a new trainer."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()
    with StopRequest() as stop:
        assert stop.requested


@pytest.mark.usefixtures("handlers")
def test_who_is_not_asked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "STARTUP", StartupStop())
    signals.STARTUP.begin()
    with StopRequest() as stop:
        assert not stop.requested


def test_ctrl_c_ends_a_command_that_has_nothing_to_save_with_130() -> None:
    script = "import signal; from dyad.process import run; run(lambda: signal.raise_signal(signal.SIGINT))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"")

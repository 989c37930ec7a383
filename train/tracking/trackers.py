"""Trackers as guests of a run: decided on before the data are read, kept in their own thread, dropped when they fail.

What a tracker may cost a run, in all: PROBE + PATIENCE + LEAVE seconds of waiting. metrics.jsonl has everything anyway.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.client import HTTPException
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol
from urllib.parse import urlparse

from data.errors import ConfigError, first_line
from data.secrets import netrc_hosts, without_credentials
from train.config import TrackingConfig, Wandb
from train.panels import Panels
from train.tracking.progress import Record

PROBE, PATIENCE, LEAVE = 5.0, 24.0, 1.0  # seconds
WAITING = 10_000  # records that a tracker may lag behind
CLOUD = {"api.wandb.ai", "api.forge.coreweave.com"}  # one service under two names: a key for either will do


def wandb_mode(config: TrackingConfig) -> Wandb:
    """What tracking.wandb comes to here: auto is WANDB_MODE if set, online with an API key, offline without.

    Looks at the environment and ~/.netrc, never at the network. Raises ConfigError for online without a key.
    """
    named = os.environ.get("WANDB_MODE", "")
    wanted = Wandb[named] if config.wandb is Wandb.auto and named in ("online", "offline", "disabled") else config.wandb
    if wanted in (Wandb.offline, Wandb.disabled):
        return wanted
    if _has_key():
        return Wandb.online
    if wanted is Wandb.online:
        raise ConfigError(
            "tracking.wandb=online needs an API key: `wandb login`, or set WANDB_API_KEY, or choose offline"
        )
    return Wandb.offline


def check_tracking(config: TrackingConfig) -> None:
    """Raises ConfigError for what cannot work. Without the network; call it on rank 0, before anything heavy."""
    wandb_mode(config)
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tracking.tensorboard=true needs the package: pip install tensorboard")


def decided(config: TrackingConfig, run_dir: Path, note: Callable[[str], None]) -> TrackingConfig:
    """`config` with W&B settled on online, offline or disabled, said in one line; call it before data are read.

    A server that does not answer means offline; a package that does not load, disabled. Raises ConfigError as
    `wandb_mode`.
    """
    mode, why = wandb_mode(config), ""
    if mode is not Wandb.disabled and (problem := _problem_with_wandb()):
        mode, why = Wandb.disabled, f" ({problem})"
    elif mode is Wandb.online and not answers(server(), PROBE):
        mode, why = Wandb.offline, f" ({without_credentials(server())} does not answer within {PROBE:.0f} s)"
    elif config.wandb is Wandb.auto:
        why = " (WANDB_MODE)" if os.environ.get("WANDB_MODE") else "" if mode is Wandb.online else " (no API key)"
    if mode is Wandb.online:
        note(f"W&B: online{why} at {without_credentials(server())}, project {config.project}")
    elif mode is Wandb.offline:
        note(f"W&B: offline{why}; later: wandb sync {run_dir}/wandb/offline-run-*")
    elif config.wandb is not mode:
        note(f"W&B: disabled{why}")
    return replace(config, wandb=mode)


class Tracker(Protocol):
    """Something that shows a run. A method may fail or never return: a Guest calls it.

    where: to look, for people; "" when they know. rest: how they see what it lacks when it fails; "" when they do not.
    """

    where: str
    rest: str

    def log(self, record: Record) -> None: ...

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None: ...

    def close(self, failed: bool) -> None: ...


class Guest:
    """A tracker in a thread of its own. It is waited for PATIENCE seconds in all, when it starts and when it closes.

    One that fails, lags behind or does not answer is dropped with one line. start: makes it, in that thread.
    leave: called once it is dropped; returns within LEAVE seconds and sees to it that the process can end.
    """

    def __init__(
        self, name: str, start: Callable[[], Tracker], note: Callable[[str], None], leave: Callable[[], None]
    ) -> None:
        self._name, self._note, self._leave = name, note, leave
        self._patience = PATIENCE
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(WAITING)
        self._started, self._ended = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._where = self._rest = ""
        self._dropped = False
        threading.Thread(target=self._work, args=(start,), name=name, daemon=True).start()
        self._wait_for(self._started)
        if self._where:
            note(f"{name}: {self._where}")

    def log(self, record: Record) -> None:
        self._ask(lambda tracker: tracker.log(record))

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        self._ask(lambda tracker: tracker.conclude(panels, report))

    def close(self, failed: bool) -> None:
        self._ask(lambda tracker: tracker.close(failed))
        self._ask(None)
        self._wait_for(self._ended)

    def _work(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            self._where, self._rest = tracker.where, tracker.rest
            self._started.set()
            while not self._dropped and (job := self._jobs.get()):
                job(tracker)
        except Exception as error:  # whatever a tracker throws, training goes on
            self._error = error
        finally:
            self._started.set()
            self._ended.set()

    def _ask(self, job: Callable[[Tracker], None] | None) -> None:
        if self._dropped:
            return
        if self._error:
            return self._drop(self._error)
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._drop(TimeoutError(f"it lags {WAITING} records behind"))

    def _wait_for(self, event: threading.Event) -> None:
        if self._dropped:
            return
        begun = time.monotonic()
        if not event.wait(self._patience):
            self._error = TimeoutError(f"the run has waited {PATIENCE:.0f} s for it")
        self._patience -= time.monotonic() - begun
        if self._error:
            self._drop(self._error)

    def _drop(self, error: Exception) -> None:
        self._dropped = True
        rest = self._rest and f", and {self._rest}"
        self._note(f"{self._name} is left out from here: {first_line(error)}. metrics.jsonl has everything{rest}")
        self._leave()


def server() -> str:
    """The address of the W&B server, from the environment or from what `wandb login --host` left."""
    wanted = os.environ.get("WANDB_BASE_URL")
    return wanted or wandb_package().setup(wandb_package().Settings(silent=True)).settings.base_url


def wandb_package() -> Any:
    """The package. Error reports are off: they call home, offline too, and wait 10 s for an answer at exit."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return import_module("wandb")


def _problem_with_wandb() -> str:
    """Loads the package, a second's work or two; what went wrong, or ""."""
    try:
        wandb_package()
    except Exception as error:  # a clash of versions, as a rule
        return f"the package does not load: {first_line(error)}"
    return ""


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = netrc_hosts().keys()
    host = urlparse(server()).netloc if hosts else ""
    return bool(hosts & (CLOUD if host in CLOUD else {host}))


def answers(url: str, seconds: float) -> bool:
    """Whether anything at all comes back. In a thread of its own: looking up a name cannot be given a time limit."""
    answered = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            answered.append(True)
        except (urllib.error.HTTPError, HTTPException):
            answered.append(True)
        except OSError as error:  # a certificate Python does not know is an answer too: W&B has its own
            answered.extend([True] if isinstance(getattr(error, "reason", error), ssl.SSLError) else [])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered)

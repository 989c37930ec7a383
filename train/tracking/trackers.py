"""Trackers run in threads of their own; one that fails or hangs is dropped, since metrics.jsonl has every number.

A tracker costs a run at most PROBE + PATIENCE + LEAVE seconds of waiting. W&B's mode is resolved before data are read.
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

from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.secrets import netrc_hosts, without_credentials
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.panels import Panels
from dyad.train.tracking.progress import Record, Sink

PROBE, PATIENCE, LEAVE = 5.0, 24.0, 1.0  # seconds: for the server's answer, for start and close, to be dropped
WAITING = 10_000  # records in a tracker's queue
CLOUD = {"api.wandb.ai", "api.forge.coreweave.com"}  # one service under two names: a key for either will do


def wandb_mode(config: TrackingConfig) -> Wandb:
    """The mode of tracking.wandb on this machine: auto is WANDB_MODE if set, else online with an API key, else offline.

    Reads the environment and ~/.netrc, never the network. Raises ConfigError for online without a key.
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
    """Raise ConfigError for trackers that cannot work. Uses no network; call it on rank 0, before heavy imports."""
    wandb_mode(config)
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tracking.tensorboard=true needs the package: pip install tensorboard")


def resolve_wandb_mode(config: TrackingConfig, run_dir: Path, log: Callable[[str], None]) -> TrackingConfig:
    """`config` with tracking.wandb resolved to online, offline or disabled. Logs one line. Call before data are read.

    A server that does not answer means offline; a package that does not load means disabled. Raises ConfigError, as
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
        log(f"W&B: online{why} at {without_credentials(server())}, project {config.project}")
    elif mode is Wandb.offline:
        log(f"W&B: offline{why}; later: wandb sync {run_dir}/wandb/offline-run-*")
    elif config.wandb is not mode:
        log(f"W&B: disabled{why}")
    return replace(config, wandb=mode)


class Tracker(Protocol):
    """Shows a run to people. A method may fail or never return, so a BackgroundTracker calls it.

    where: address or command to see it, "" if it needs none. rest: command that completes it after a failure, or "".
    """

    where: str
    rest: str

    def log(self, record: Record) -> None: ...

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None: ...

    def close(self, failed: bool) -> None: ...


class BackgroundTracker(Sink):
    """Runs a tracker in a thread. The run waits PATIENCE seconds in all for its start and its close.

    A tracker that fails, does not answer, or falls WAITING records behind is dropped with one line. start: creates it,
    in that thread. leave: called when it is dropped; it returns within LEAVE seconds and lets the process end.
    """

    def __init__(
        self, name: str, start: Callable[[], Tracker], log: Callable[[str], None], leave: Callable[[], None]
    ) -> None:
        self._name, self._log, self._leave = name, log, leave
        self._patience = PATIENCE
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(WAITING)
        self._started, self._ended = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._where = self._rest = ""
        self._dropped = False
        threading.Thread(target=self._work, args=(start,), name=name, daemon=True).start()
        self._wait_for(self._started)
        if self._where:
            log(f"{name}: {self._where}")

    def log(self, record: Record) -> None:
        self._submit(lambda tracker: tracker.log(record))

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        self._submit(lambda tracker: tracker.conclude(panels, report))

    def close(self, failed: bool) -> None:
        self._submit(lambda tracker: tracker.close(failed))
        self._submit(None)
        self._wait_for(self._ended)

    def _work(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            self._where, self._rest = tracker.where, tracker.rest
            self._started.set()
            while not self._dropped and (job := self._jobs.get()):
                job(tracker)
        except Exception as error:  # training goes on after any error of a tracker
            self._error = error
        finally:
            self._started.set()
            self._ended.set()

    def _submit(self, job: Callable[[Tracker], None] | None) -> None:
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
        self._log(f"{self._name} is left out from here: {first_line(error)}. metrics.jsonl has everything{rest}")
        self._leave()


def server() -> str:
    """Address of the W&B server, from the environment or the settings that `wandb login --host` wrote."""
    wanted = os.environ.get("WANDB_BASE_URL")
    return wanted or wandb_package().setup(wandb_package().Settings(silent=True)).settings.base_url


def wandb_package() -> Any:
    """Import wandb without its error reports, which use the network, offline too, and wait 10 s at exit."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return import_module("wandb")


def _problem_with_wandb() -> str:
    """The reason why the package does not load, or "". Takes a second or two."""
    try:
        wandb_package()
    except Exception as error:  # usually versions that do not fit together
        return f"the package does not load: {first_line(error)}"
    return ""


def _has_key() -> bool:
    """Whether there is an API key. W&B's own check is private, and another one in each version."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = netrc_hosts().keys()
    host = urlparse(server()).netloc if hosts else ""
    return bool(hosts & (CLOUD if host in CLOUD else {host}))


def answers(url: str, seconds: float) -> bool:
    """Whether a server answers within `seconds`, with any status. In a thread, as name lookups have no time limit."""
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

"""Weights & Biases and TensorBoard: guests of a run, which may neither hold it up nor stop it.

W&B: no step= (a lower step would be dropped after a resume) but an axis metric of our own; files inside the run folder.
A server that does not answer costs at most PROBE + 2 × TIMEOUT seconds in all. metrics.jsonl has everything anyway.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import re
import secrets
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from data.errors import ConfigError
from train.config import TrackingConfig, Wandb
from train.files import write_json
from train.progress import Record, is_training

PROBE, TIMEOUT = 5.0, 10.0  # seconds
SECRET = re.compile("key|token|secret|password", re.IGNORECASE)
CLOUD = {"api.wandb.ai", "api.forge.coreweave.com"}  # one service under two names: a key for either will do
Place = tuple[float, bool]


def place(record: Record) -> Place:
    """Where in a run a record stands: its step, and whether it is of training (else of evaluation)."""
    return record["step"], is_training(record)


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
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tracking.tensorboard=true needs the package: pip install tensorboard")


def redacted(tree: Any) -> Any:
    """A copy in which every text under a name like key, token, secret, password is blacked out."""
    if isinstance(tree, Mapping):
        secret = {k for k, v in tree.items() if isinstance(v, str) and SECRET.search(str(k))}
        return {k: "[redacted]" if k in secret else redacted(v) for k, v in tree.items()}
    return [redacted(v) for v in tree] if isinstance(tree, list | tuple) else tree


class Guest:
    """A tracker that is dropped, with one line, when it fails."""

    def __init__(self, name: str, tracker: WandbRun | TensorBoard, note: Callable[[str], None]) -> None:
        self._name, self._tracker, self._note = name, tracker, note

    def log(self, record: Record) -> None:
        self._guarded(lambda tracker: tracker.log(record))

    def close(self, failed: bool) -> None:
        self._guarded(lambda tracker: tracker.close(failed))

    def _guarded(self, act: Callable[[WandbRun | TensorBoard], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # whatever a tracker throws, training goes on
            self._tracker = None
            self._note(f"{self._name} is left out from here: {_first_line(error)}. metrics.jsonl has everything")


class WandbRun:
    """One W&B run, begun or gone on with. `sent`: what an earlier start has sent and this one makes again."""

    def __init__(self, run: Any, sent: set[Place]) -> None:
        self._run, self._sent = run, sent
        self._named: set[str] = set()
        run.define_metric("trainer/global_step", hidden=True)
        run.define_metric("*", step_metric="trainer/global_step")

    def log(self, record: Record) -> None:
        if place(record) in self._sent:
            return
        values = {k: v for k, v in record.items() if k not in ("step", "samples_seen")}
        for name in values:
            if name.startswith(("val/", "eval/")) and name not in self._named:
                self._named.add(name)
                best = "min" if name.endswith("_rank") else "max"
                self._run.define_metric(name, step_metric="trainer/global_step", summary=best)
        axes = {"trainer/global_step": record["step"], "trainer/samples_seen": record["samples_seen"]}
        self._run.log({**values, **axes})

    def close(self, failed: bool) -> None:
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:
            folder = self._run.settings.sync_dir
            raise RuntimeError(f"not everything has arrived, `wandb sync {folder}` sends the rest") from error


class TensorBoard:
    """Event files in `tensorboard/` of the run; what an earlier start wrote past `first_step` is hidden."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def log(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(record["step"]))

    def close(self, failed: bool) -> None:
        self._writer.close()


def new_wandb_id() -> str:
    return secrets.token_hex(4)


def start_wandb(
    mode: Wandb,
    run_dir: Path,
    project: str,
    run_id: str,
    run_config: Mapping[str, Any],
    taken_back: set[Place],
    note: Callable[[str], None],
) -> WandbRun | None:
    """Begin or go on with W&B run `run_id`; None when it is disabled or fails, with one line through `note`."""
    if mode is Wandb.disabled:
        return None
    if mode is Wandb.online and not _answers(_server(), PROBE):
        note(f"W&B does not answer within {PROBE:.0f} s: tracking offline")
        mode = Wandb.offline
    try:
        wandb = _wandb()
        run = wandb.init(
            project=project,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode="online" if mode is Wandb.online else "offline",
            dir=str(run_dir),
            config=redacted(run_config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=TIMEOUT,
                finish_timeout=TIMEOUT,
                finish_timeout_raises=True,
                login_timeout=TIMEOUT,
                disable_code=True,
            ),
        )
    except Exception as error:  # whatever a tracker throws, training goes on
        note(f"W&B does not start: {_first_line(error)}. metrics.jsonl has everything")
        return None
    note(f"W&B: {run.url}" if run.url else f"W&B is offline; later: wandb sync {run_dir}/wandb/offline-run-*-{run_id}")
    return WandbRun(run, _sent(run_dir / "wandb" / f"sent-{run_id}.json", taken_back))


def _sent(path: Path, taken_back: set[Place]) -> set[Place]:
    """What all earlier starts have sent of what comes again: kept in a file, since a run may be killed many times."""
    before = {(step, training) for step, training in json.loads(path.read_text())} if path.exists() else set()
    write_json(path, sorted(before | taken_back))
    return before | taken_back


def _server() -> str:
    """The address of the W&B server, from the environment or from what `wandb login --host` left."""
    return os.environ.get("WANDB_BASE_URL") or _wandb().setup().settings.base_url


def _wandb() -> Any:
    """The package, quiet. Error reports are off: they call home, offline too, and wait 10 s for an answer at exit."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    return wandb


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    host = urlparse(_server()).netloc
    return bool(entries.keys() & (CLOUD if host in CLOUD else {host}))


def _answers(url: str, seconds: float) -> bool:
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__

"""Trackers run in threads of their own; one that fails or hangs is dropped, since metrics.jsonl has every number.

A tracker costs a run at most PATIENCE + LEAVE seconds of waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Any

from dyad.data.base.errors import first_line
from dyad.train.config import TrackingConfig
from dyad.train.panels import Panels
from dyad.train.tracking.progress import Record, RecordPosition, Sink

PATIENCE, LEAVE = 24.0, 1.0  # seconds to wait for a tracker: for its start and its close together, when it is dropped
WAITING = 10_000  # records in a tracker's queue


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is created from.

    config: with the mode of W&B resolved. run_config: the configuration of the run as plain values; a tracker redacts
    its secrets. first_step: the step to continue from. taken_back: positions of records that an earlier start sent and
    that this one logs again. wandb_id: of the W&B run, None without W&B.
    """

    folder: Path
    config: TrackingConfig
    run_config: Mapping[str, Any]
    first_step: int
    taken_back: set[RecordPosition]
    wandb_id: str | None


class Tracker(Sink):
    """Shows a run to people. Any method may fail or never return, so a BackgroundTracker calls them.

    A subclass is created from a TrackedRun. where: address or command to see the run, "" if it needs none. rest: the
    command that completes what is shown after a failure, or "".
    """

    where = rest = ""

    @staticmethod
    def is_on(config: TrackingConfig) -> bool:
        """Whether `config` asks for this tracker. Raises ConfigError if it cannot work. Uses no network."""
        raise NotImplementedError

    @staticmethod
    def leave(folder: Path) -> None:
        """Clean up after a tracker of this run folder that is dropped, within LEAVE seconds. By default nothing."""


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
        """Create the tracker and run its jobs until None comes. The function of the thread."""
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
        """Queue a job, or drop the tracker if it has failed or lags behind."""
        if self._dropped:
            return
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._error = self._error or TimeoutError(f"it lags {WAITING} records behind")
        self._drop_if_failed()

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event of the thread, as long as patience is left."""
        if self._dropped:
            return
        begun = time.monotonic()
        if not event.wait(self._patience):
            self._error = TimeoutError(f"the run has waited {PATIENCE:.0f} s for it")
        self._patience -= time.monotonic() - begun
        self._drop_if_failed()

    def _drop_if_failed(self) -> None:
        if self._error:
            self._dropped = True
            rest = self._rest and f", and {self._rest}"
            reason = first_line(self._error)
            self._log(f"{self._name} is left out from here: {reason}. metrics.jsonl has everything{rest}")
            self._leave()

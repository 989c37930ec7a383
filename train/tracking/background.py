"""Run trackers (W&B, TensorBoard) in threads of their own, and drop a tracker that fails or hangs.

Dropping a tracker loses no metric, because metrics.jsonl has every record. A tracker costs a run at most
TIMEOUT + CLEAN_UP seconds of waiting.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Any

from dyad.data.base.errors import first_line
from dyad.train.config import TrackingConfig
from dyad.train.tracking.panel_types import Panels
from dyad.train.tracking.progress import Record, RecordPosition, Sink

TIMEOUT = 24.0  # seconds that a run waits for the start and the close of a tracker, together
CLEAN_UP = 1.0  # seconds that a run waits for `Tracker.clean_up`
QUEUE_SIZE = 10_000  # records in a tracker's queue


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run from which a tracker (W&B, TensorBoard) is created.

    folder: the run folder. config: the tracking settings, with config.wandb resolved to online, offline or disabled.
    run_config: the run's configuration as plain values; a tracker removes the secrets in it. first_step: the step from
    which the run continues. taken_back: (step, whether it is a record of training) for each record that the run sent
    before it was stopped and will log again. wandb_id: id of the W&B run; None if the run has none.
    """

    folder: Path
    config: TrackingConfig
    run_config: Mapping[str, Any]
    first_step: int
    taken_back: set[RecordPosition]
    wandb_id: str | None


class Tracker(Sink, ABC):
    """Base class of trackers (W&B, TensorBoard), which display a run in a program of their own.

    The constructor of a subclass takes a TrackedRun. Constructor and methods may fail or never return, so a
    BackgroundTracker calls them in a thread, except `is_on` and `clean_up`. where: address or command to see the run,
    "" if none is needed. recovery: a clause with the command that sends missing records after a failure, or "".
    """

    where = recovery = ""

    @staticmethod
    @abstractmethod
    def is_on(config: TrackingConfig) -> bool:
        """Whether `config` asks for the tracker that this class implements. Must use no network.

        Raises ConfigError if it asks for the tracker, but something that the tracker needs is missing: an API key of
        W&B, the package of TensorBoard.
        """

    @staticmethod
    def clean_up(folder: Path) -> None:
        """Release what a tracker may still hold, such as a process, after it failed and was dropped from the run.

        Does nothing here. A subclass that starts a process overrides it to stop that process, within CLEAN_UP seconds.
        It is called in the run's thread, even if the constructor has failed. folder: the run folder.
        """


class BackgroundTracker(Sink):
    """Runs a tracker in a thread of its own. The constructor waits until the tracker has started or was dropped.

    The run waits at most TIMEOUT seconds for start and close of the tracker together. A tracker that fails, does not
    answer, or falls QUEUE_SIZE records behind is dropped: it gets no more records. The methods log and conclude queue a
    job for the thread. name: the tracker's name, for messages. start: creates the tracker; called in the thread. log: a
    function that gets a line with `Tracker.where` at the start, if that is not "", and one if the tracker is dropped.
    clean_up: called when the tracker is dropped, so that the process can end; must return within CLEAN_UP seconds.
    """

    def __init__(
        self, name: str, start: Callable[[], Tracker], log: Callable[[str], None], clean_up: Callable[[], None]
    ) -> None:
        self._name, self._log, self._clean_up = name, log, clean_up
        self._time_left = TIMEOUT
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(QUEUE_SIZE)
        self._started, self._ended = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._where = self._recovery = ""
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
        """Create the tracker by `start`, then run the queued jobs until one is None. The tracker's thread runs this."""
        try:
            tracker = start()
            self._where, self._recovery = tracker.where, tracker.recovery
            self._started.set()
            while not self._dropped and (job := self._jobs.get()):
                job(tracker)
        except Exception as error:  # training goes on after any error of a tracker
            self._error = error
        finally:
            self._started.set()
            self._ended.set()

    def _submit(self, job: Callable[[Tracker], None] | None) -> None:
        """Queue a job for the tracker's thread (None ends it). Drop the tracker if it failed or the queue is full.

        Does nothing for a tracker that has been dropped.
        """
        if self._dropped:
            return
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._error = self._error or TimeoutError(f"it lags {QUEUE_SIZE} records behind")
        self._drop_if_failed()

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event that the tracker's thread sets. Drop the tracker if it takes too long or has failed.

        All calls for one tracker share a budget of TIMEOUT seconds: when it is used up, the tracker is dropped.
        """
        if self._dropped:
            return
        begun = time.monotonic()
        if not event.wait(self._time_left):
            self._error = TimeoutError(f"the run has waited {TIMEOUT:.0f} s for it")
        self._time_left -= time.monotonic() - begun
        self._drop_if_failed()

    def _drop_if_failed(self) -> None:
        """If an error was noted, drop the tracker: log one line, and call `clean_up`."""
        if self._error:
            self._dropped = True
            recovery = self._recovery and f", and {self._recovery}"
            reason = first_line(self._error)
            self._log(f"{self._name} is left out from here: {reason}. metrics.jsonl has everything{recovery}")
            self._clean_up()

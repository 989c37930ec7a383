"""Log a run, on rank 0 only, to metrics.jsonl (every scalar, the source of truth), log.txt, console and trackers."""

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from dyad.data.base.errors import printable
from dyad.data.base.files import LineFile, read_lines, whole_file
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.run_folder.run_state import LOG
from dyad.train.run_schedule import RunSchedule
from dyad.train.tracking.background import BackgroundTracker, TrackedRun
from dyad.train.tracking.panel_types import Panels
from dyad.train.tracking.progress import Lines, LogFile, Record, RecordPosition, Sink, build_console, position
from dyad.train.tracking.trackers import TRACKERS


class Logger(AbstractContextManager["Logger"]):
    """Passes the records and text lines of the training loop to sinks: files, console, trackers.

    Rank 0 has sinks, from `build_logger`; every other rank has `Logger()`, which does nothing. Leaving the `with` block
    closes the sinks. batch: the global batch size. wandb_id: id of the W&B run, saved in checkpoints; None if there is
    none. epoch: optimiser steps of an epoch.
    """

    def __init__(self, sinks: Sequence[Sink] = (), batch: int = 0, wandb_id: str | None = None, epoch: int = 1) -> None:
        self.wandb_id = wandb_id
        self._sinks, self._batch, self._epoch = sinks, batch, epoch

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log one record: `scalars` by metric name, after `step` finished optimiser steps.

        The record also has samples_seen, epoch (passes over the data) and time (seconds since 1970 UTC).
        """
        when = {"samples_seen": step * self._batch, "epoch": step / self._epoch, "time": round(time.time(), 3)}
        record = {"step": step, **when, **scalars}
        for sink in self._sinks:
            sink.log(record)

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Pass the last evaluation of the run to all sinks (files, console, trackers).

        panels: one Panels (tables, histograms) for each data set. report: path of report.html, None if it was not made.
        """
        for sink in self._sinks:
            sink.conclude(panels, report)

    def print(self, line: str) -> None:
        """Print text to log.txt and the console, without credentials and with control characters escaped."""
        for sink in self._sinks:
            sink.print(printable(line))

    def flush(self) -> None:
        """Wait until every record logged so far is on the disk. Raises OSError when that fails."""
        for sink in self._sinks:
            sink.flush()

    def close(self, failed: bool = False) -> None:
        """Close all sinks, for which trackers may take seconds. failed: whether the run ends with an error."""
        for sink in self._sinks:
            sink.close(failed)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class JsonLines(Sink):
    """Writes metrics.jsonl: each record at once, as a flat JSON object on a line of its own.

    Metrics that are not finite become null. log: called with a line of text when the file cannot be written; records
    then wait in memory.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._file = LineFile(path, log)

    def log(self, record: Record) -> None:
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}))

    def flush(self) -> None:
        self._file.sync()

    def close(self, failed: bool) -> None:
        self._file.close()


def build_logger(
    folder: Path,
    config: TrackingConfig,
    schedule: RunSchedule,
    run_config: Mapping[str, Any],
    wandb_id: str | None = None,
) -> Logger:
    """Return the logger of rank 0 for a run that starts at schedule.first_step; remove later records of metrics.jsonl.

    If schedule.evaluation_owed, the record of the evaluation at that step is removed too, as it will run again. The
    trackers that `config` asks for are started. folder: the run folder. config: tracking settings, with config.wandb
    already resolved (`resolve_wandb_mode`); TRACKERS are asked again, and may raise ConfigError (`Tracker.is_on`).
    run_config: the run's configuration as plain values, for the trackers, which remove the secrets in it. wandb_id: id
    of the W&B run, from the checkpoint; None: a new id if W&B is on.
    """
    path = folder / "metrics.jsonl"
    console = build_console(schedule)
    text = [LogFile(folder / LOG, Lines(schedule), console.print), console]

    log = Logger(text).print
    taken_back = drop_after(path, schedule.first_step, log, schedule.evaluation_owed)
    sinks: list[Sink] = [JsonLines(path, log)]
    if config.wandb is not Wandb.disabled:
        wandb_id = wandb_id or secrets.token_hex(4)
    run = TrackedRun(folder, config, run_config, schedule.first_step, taken_back, wandb_id)
    for name, tracker in TRACKERS.items():
        if tracker.is_on(config):
            sinks.append(BackgroundTracker(name, partial(tracker, run), log, partial(tracker.clean_up, folder)))
    # Text last: the other sinks may print while they close.
    return Logger([*sinks, *text], schedule.global_batch_size, wandb_id, schedule.steps_per_epoch)


def drop_after(path: Path, step: int, log: Callable[[str], None], evaluation_owed: bool = False) -> set[RecordPosition]:
    """Remove the records after step number `step` from metrics.jsonl, because the resumed run logs them again.

    path: the file metrics.jsonl; without it the result is empty. Returns the set of the removed records' positions:
    (step, whether it is a record of training). evaluation_owed: also remove the evaluation's record at `step` itself.
    Damaged lines are removed too; log: called as by `read_lines`. If an error is raised, the file stays as it was.
    """
    if not path.exists():
        return set()
    removed: set[RecordPosition] = set()
    with whole_file(path) as file:
        for line, record in read_lines(path, log):
            at, is_training = position(record)
            if at < step or (at == step and (is_training or not evaluation_owed)):
                file.write(line.rstrip() + b"\n")
            else:
                removed.add((at, is_training))
    return removed

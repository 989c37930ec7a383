"""Write the text output of a run to log.txt and to the console, in open_clip's format.

On a terminal the console shows a progress bar of the steps instead. This module does not import torch.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from dyad.data.base.files import LineFile
from dyad.data.base.progress import on_terminal, progress_bar
from dyad.train.run_folder.run_state import stamped
from dyad.train.run_schedule import RunSchedule
from dyad.train.tracking.panel_types import Panels

Record = Mapping[str, float]
WHEN = ("step", "samples_seen", "epoch", "time")  # entries of every record; all others are metrics

RecordPosition = tuple[float, bool]  # the step of a record, and whether it has metrics of training (see is_training)


def is_training(record: Record) -> bool:
    """Whether a record has the metrics of a training step. Other records have the metrics of an evaluation."""
    return "train/loss" in record


def position(record: Record) -> RecordPosition:
    """Return (the step of a record, whether it has metrics of training): two records of a run differ in one of them."""
    return record["step"], is_training(record)


class Sink:
    """Base class of destinations of a run's records, text lines and last results. Its methods do nothing."""

    def log(self, record: Record) -> None:
        """Output one record; subclasses of Sink write it to a file, the console or a tracker.

        record: the entries of WHEN and metrics, name → value, as in a line of metrics.jsonl.
        """

    def print(self, line: str) -> None:
        """Output one line of text; subclasses of Sink write it to log.txt or the console."""

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Output the last evaluation of the run. Does nothing here; subclasses of Sink for trackers send its panels.

        panels: one Panels (tables, histograms) for each data set. report: path of report.html, None if it was not made.
        """

    def flush(self) -> None:
        """Wait until every record logged so far is on the disk.

        Does nothing here; only the subclass of Sink for metrics.jsonl overrides it.
        """

    def close(self, failed: bool) -> None:
        """End the output: subclasses of Sink close their file, progress bar or tracker. It is the last call.

        failed: whether the run ends with an error.
        """


class Lines:
    """Formats records as text in open_clip's format: `lines(record)` returns the line of one record.

    A record of training needs the metrics that every logged step has (data_time, batch_time, lr, …). "Loss: 3.21
    (3.30)" shows the loss, and the mean of the finite losses in this epoch's lines up to this one. So each object must
    get the records of a run in order, each once.
    """

    def __init__(self, schedule: RunSchedule) -> None:
        self.schedule = schedule
        self._epoch, self._losses = -1, [0.0]

    def epoch(self, step: int) -> int:
        """Return the epoch, counted from 0, of the optimiser step number `step`, counted from 1."""
        return (step - 1) // self.schedule.steps_per_epoch

    def remaining(self, record: Record) -> timedelta:
        """Return the time from a record of training to the last step, at the record's seconds per step."""
        return timedelta(seconds=round((self.schedule.total_steps - record["step"]) * record["train/batch_time"]))

    def __call__(self, record: Record) -> str:
        step = int(record["step"])
        epoch = self.epoch(step)
        if not is_training(record):
            values = {k.removeprefix("val/"): v for k, v in record.items() if k not in WHEN}
            return f"Eval Epoch: {epoch} " + "\t".join(f"{name}: {value:.4f}" for name, value in values.items())
        if epoch != self._epoch:
            self._epoch, self._losses = epoch, []
        loss = record["train/loss"]
        self._losses += [loss] if math.isfinite(loss) else []
        of_epoch, batch = self.schedule.steps_per_epoch, self.schedule.global_batch_size
        samples, total = (step - epoch * of_epoch) * batch, of_epoch * batch
        parts = [
            f"Train Epoch: {epoch} [{samples:>{len(str(total))}}/{total} ({100 * samples / total:.0f}%)]",
            f"Data (t): {record['train/data_time']:.3f}",
            f"Batch (t): {record['train/batch_time']:.3f},",
            f"{record['train/samples_per_second']:#g}/s, {record['train/samples_per_second_per_device']:#g}/s/device",
            f"LR: {record['train/lr']:5f}",
        ]
        if "train/logit_scale" in record:
            parts.append(f"Logit Scale: {record['train/logit_scale']:.3f}")
        mean = math.fsum(self._losses) / len(self._losses) if self._losses else math.nan
        parts.append(f"Loss: {loss:#.5g} ({mean:#.5g})")
        if "train/mi_bound" in record:
            parts.append(f"MI: {record['train/mi_bound']:.2f} of {record['train/log_k']:.2f}")
        if "train/mfu" in record:
            parts.append(f"MFU: {record['train/mfu']:.1%}")
        return " ".join([*parts, f"ETA {self.remaining(record)}"])


class TextSink(Sink):
    """A sink that prints each record as a line of text."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def log(self, record: Record) -> None:
        self.print(self._lines(record))


class LogFile(TextSink):
    """Writes every line to log.txt, with open_clip's time stamp.

    log: called with a line of text when the file cannot be written; lines then wait in memory.
    """

    def __init__(self, path: Path, lines: Lines, log: Callable[[str], None]) -> None:
        super().__init__(lines)
        self._file = LineFile(path, log)

    def print(self, line: str) -> None:
        for part in line.splitlines():
            self._file.write(stamped(part))

    def close(self, failed: bool) -> None:
        self._file.close()


class PlainConsole(TextSink):
    """Prints lines to a standard output that is not a terminal, such as a file or the log of a scheduler.

    The record of an evaluation after total_steps steps is left out, as tables of it are printed when the run has ended.
    """

    def log(self, record: Record) -> None:
        if is_training(record) or record["step"] < self._lines.schedule.total_steps:
            super().log(record)

    def print(self, line: str) -> None:
        with suppress(OSError):  # a full disk or a reader that went away is no reason to stop
            print(line, flush=True)


class BarConsole(PlainConsole):
    """Shows a progress bar of the training steps on a terminal; other lines scroll above it."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._bar = progress_bar(sys.stdout)
        schedule = lines.schedule
        self._task = self._bar.add_task("Train", total=schedule.total_steps, completed=schedule.first_step, facts="")
        self._bar.start()

    def log(self, record: Record) -> None:
        if not is_training(record):
            return super().log(record)
        speed = f"{record['train/samples_per_second']:#.4g}/s ETA {self._lines.remaining(record)}"
        step = int(record["step"])
        facts, epoch = f"Loss: {record['train/loss']:#.5g} {speed}", f"Train Epoch: {self._lines.epoch(step)}"
        self._bar.update(self._task, completed=step, description=epoch, facts=facts)

    def print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self, failed: bool) -> None:
        self._bar.stop()


def build_console(schedule: RunSchedule) -> Sink:
    """Return the Sink for the console: a progress bar if standard output is a terminal, plain lines otherwise.

    The bar is shown at once, and until `close`.
    """
    return (BarConsole if on_terminal(sys.stdout) else PlainConsole)(Lines(schedule))

"""Console output of a run: lines in the format of open_clip, or a progress bar on a terminal. Torch-free."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from dyad.data.base.files import LineFile
from dyad.data.base.progress import on_terminal, progress_bar
from dyad.train.panels import Panels

Record = Mapping[str, float]


class Lines:
    """Formats a record as a line. "Loss: 3.21 (3.30)" has the loss and its mean over this epoch's lines so far."""

    def __init__(self, total_steps: int, steps_per_epoch: int, global_batch_size: int) -> None:
        self.total_steps = total_steps
        self._steps_per_epoch, self._batch = steps_per_epoch, global_batch_size
        self._epoch, self._losses = -1, [0.0]

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that optimiser step number `step` (from 1) belongs to."""
        return (step - 1) // self._steps_per_epoch

    def remaining(self, record: Record) -> timedelta:
        return timedelta(seconds=round((self.total_steps - record["step"]) * record["train/batch_time"]))

    def __call__(self, record: Record) -> str:
        return self._training(record) if is_training(record) else self._evaluation(record)

    def _training(self, record: Record) -> str:
        step, loss, epoch = int(record["step"]), record["train/loss"], self.epoch(int(record["step"]))
        if epoch != self._epoch:
            self._epoch, self._losses = epoch, []
        self._losses.append(loss)
        seen = (step - epoch * self._steps_per_epoch) * self._batch
        total = self._steps_per_epoch * self._batch
        parts = [
            f"Train Epoch: {epoch} [{seen:>{len(str(total))}}/{total} ({100 * seen / total:.0f}%)]",
            f"Data (t): {record['train/data_time']:.3f}",
            f"Batch (t): {record['train/batch_time']:.3f},",
            f"{record['train/samples_per_second']:#g}/s, {record['train/samples_per_second_per_device']:#g}/s/device",
            f"LR: {record['train/lr']:5f}",
        ]
        if "train/logit_scale" in record:
            parts.append(f"Logit Scale: {record['train/logit_scale']:.3f}")
        parts.append(f"Loss: {loss:#.5g} ({math.fsum(self._losses) / len(self._losses):#.5g})")
        if "train/mi_bound" in record:
            parts.append(f"MI: {record['train/mi_bound']:.2f} of {record['train/log_k']:.2f}")
        return " ".join([*parts, f"ETA {self.remaining(record)}"])

    def _evaluation(self, record: Record) -> str:
        values = {k.removeprefix("val/"): v for k, v in record.items() if k not in ("step", "samples_seen")}
        return f"Eval Epoch: {self.epoch(int(record['step']))} " + "\t".join(f"{k}: {v:.4f}" for k, v in values.items())


def is_training(record: Record) -> bool:
    return "train/loss" in record


class Sink:
    """Takes records while a run trains, and its results and report at the end. A method does nothing by default."""

    def log(self, record: Record) -> None:
        pass

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


class Output(Protocol):
    """A destination of lines: log file or console."""

    def log(self, record: Record, line: str) -> None: ...

    def print(self, line: str) -> None: ...

    def close(self) -> None: ...


class LogFile:
    """`log.txt`: every line, with open_clip's time stamp."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._file = LineFile(path, log)

    def log(self, record: Record, line: str) -> None:
        self.print(line)

    def print(self, line: str) -> None:
        for part in line.splitlines():
            self._file.write(f"{datetime.now():%Y-%m-%d,%H:%M:%S} | INFO | {part}")

    def close(self) -> None:
        self._file.close()


class PlainConsole:
    """Lines, for files and schedulers' logs."""

    def log(self, record: Record, line: str) -> None:
        self.print(line)

    def print(self, line: str) -> None:
        with suppress(OSError):  # a full disk or a reader that went away is no reason to stop
            print(line, flush=True)

    def close(self) -> None:
        pass


class BarConsole:
    """A progress bar on a terminal; other lines scroll above it."""

    def __init__(self, lines: Lines, first_step: int) -> None:
        self._lines = lines
        self._bar = progress_bar(sys.stdout)
        self._task = self._bar.add_task("Train", total=lines.total_steps, completed=first_step, facts="")
        self._bar.start()

    def log(self, record: Record, line: str) -> None:
        if not is_training(record):
            return self.print(line)
        facts = (
            f"Loss: {record['train/loss']:#.5g} {record['train/samples_per_second']:#.4g}/s "
            f"ETA {self._lines.remaining(record)}"
        )
        step = int(record["step"])
        self._bar.update(self._task, completed=step, facts=facts, description=f"Train Epoch: {self._lines.epoch(step)}")

    def print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def build_console(lines: Lines, first_step: int) -> Output:
    """A bar on a terminal, lines otherwise."""
    return BarConsole(lines, first_step) if on_terminal(sys.stdout) else PlainConsole()

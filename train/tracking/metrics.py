"""Logging of a run, rank 0 only: metrics.jsonl (every scalar, the source of truth), log.txt, the console, trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data.errors import printable
from data.files import LineFile, read_lines, whole_file
from train.config import TrackingConfig, Wandb
from train.panels import Panels
from train.tracking.progress import Lines, LogFile, Output, Record, build_console, is_training
from train.tracking.tensorboard import TensorBoard
from train.tracking.trackers import Guest
from train.tracking.wandb_run import Place, WandbRun, leave, new_wandb_id, place


class Sink(Protocol):
    """Something that takes records, and the panels and the report that a run ends with."""

    def log(self, record: Record) -> None: ...

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None: ...

    def close(self, failed: bool) -> None: ...


class Logger:
    """What the loop talks to. Built with nothing in it (`Logger()`, every rank but 0) it does nothing.

    wandb_id: identity of the W&B run, to be kept in checkpoints; None when it has never had one.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        outputs: Sequence[Output] = (),
        metrics: JsonLines | None = None,
        global_batch_size: int = 0,
        wandb_id: str | None = None,
    ) -> None:
        self.wandb_id = wandb_id
        self._sinks, self._outputs, self._metrics = sinks, outputs, metrics
        self._global_batch_size = global_batch_size

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One record: the scalars after `step` finished optimiser steps."""
        record = {"step": step, "samples_seen": step * self._global_batch_size, **scalars}
        for sink in self._sinks:
            sink.log(record)

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Show the last evaluation. panels: one for each data set; report: report.html, None if not made."""
        for sink in self._sinks:
            sink.conclude(panels, report)

    def print(self, line: str) -> None:
        for output in self._outputs:
            output.print(printable(line))

    def flush(self) -> None:
        """Wait until the disk holds every record logged so far. Raises OSError when it does not take them."""
        if self._metrics:
            self._metrics.sync()

    def close(self, failed: bool = False) -> None:
        for sink in self._sinks:
            sink.close(failed)
        for output in self._outputs:
            output.close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class JsonLines:
    """`metrics.jsonl`: one flat object per line, written at once; null where a number is not finite."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._file = LineFile(path, say)

    def log(self, record: Record) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
        self._file.write(json.dumps(finite))

    def sync(self) -> None:
        self._file.sync()

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        pass

    def close(self, failed: bool) -> None:
        self._file.close()


class Spoken:
    """Records as lines, for all outputs."""

    def __init__(self, lines: Lines, outputs: Sequence[Output]) -> None:
        self._lines, self._outputs = lines, outputs

    def log(self, record: Record) -> None:
        line = self._lines(record)
        for output in self._outputs:
            output.log(record, line)

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


def build_logger(
    run_dir: Path,
    config: TrackingConfig,
    *,
    run_config: Mapping[str, Any],
    first_step: int,
    total_steps: int,
    steps_per_epoch: int,
    global_batch_size: int,
    evaluation_owed: bool = False,
    wandb_id: str | None = None,
) -> Logger:
    """The logger of rank 0 of a run that goes on from `first_step`; what was logged past it is taken back.

    config: as `tracking.decided` leaves it. run_config: plain and resolved, for the trackers (secrets are blacked out).
    wandb_id: from the checkpoint.
    """
    path = run_dir / "metrics.jsonl"
    lines = Lines(total_steps, steps_per_epoch, global_batch_size)
    console = build_console(lines, first_step)
    outputs = [LogFile(run_dir / "log.txt", console.print), console]

    note = Logger(outputs=outputs).print
    taken_back = cut(path, first_step, note, evaluation_owed)
    metrics = JsonLines(path, note)
    sinks: list[Sink] = [metrics, Spoken(lines, outputs)]
    if config.wandb is not Wandb.disabled:
        wandb_id = wandb_id or new_wandb_id()
        run = partial(WandbRun, config.wandb, run_dir, config.project, wandb_id, run_config, first_step, taken_back)
        sinks.append(Guest("W&B", run, note, partial(leave, run_dir / "wandb")))
    if config.tensorboard:
        sinks.append(Guest("TensorBoard", partial(TensorBoard, run_dir, first_step), note, lambda: None))
    return Logger(sinks, outputs, metrics, global_batch_size, wandb_id)


def cut(path: Path, step: int, say: Callable[[str], None], evaluation_owed: bool = False) -> set[Place]:
    """Take back, in one move, the lines of `metrics.jsonl` past `step`; they will come again. Returns what they were.

    evaluation_owed: the evaluation at `step` itself comes again too. Damaged lines go as well, and `say` hears of them.
    """

    def stays(record: Record) -> bool:
        at_step = is_training(record) or not evaluation_owed
        return record["step"] < step or (record["step"] == step and at_step)

    if not path.exists():
        return set()
    taken_back: set[Place] = set()
    with whole_file(path) as kept:
        for line, record in read_lines(path, say):
            if stays(record):
                kept.write(line.rstrip() + b"\n")
            else:
                taken_back.add(place(record))
    return taken_back

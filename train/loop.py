"""fit: the training loop. It knows steps and intervals; every part it runs is handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

from data.batch import Batch
from train.signals import Stopped
from train.tracking.metrics import Logger


@dataclass(frozen=True)
class Plan:
    """Where a run begins and ends, and how often what happens; steps are finished optimiser steps.

    every 0 means "at the end only". evaluation_owed: the run was stopped before the evaluation due at first_step.
    """

    first_step: int
    total_steps: int
    global_batch_size: int
    world_size: int
    log_every: int
    evaluate_every: int
    save_every: int
    evaluation_owed: bool = False

    def due(self, step: int, every: int) -> bool:
        return step == self.total_steps or (every > 0 and step % every == 0)

    def next_save(self, step: int) -> int:
        """When the next checkpoint is due after `step`."""
        following = (step // self.save_every + 1) * self.save_every if self.save_every else self.total_steps
        return min(following, self.total_steps)


@dataclass(frozen=True)
class Outcome:
    """status: "finished" or "preempted"; step: finished optimiser steps."""

    status: str
    step: int


def fit(
    plan: Plan,
    batches: Iterable[Batch],
    *,
    step: Callable[[Batch, int], Mapping[str, float]],
    diagnose: Callable[[], Mapping[str, float]],
    evaluate: Callable[[int], Mapping[str, float]],
    save: Callable[[int, bool, bool], None],
    should_stop: Callable[[], bool],
    logger: Logger,
) -> Outcome:
    """Run steps first_step … total_steps - 1 and return how it ended. Call on every rank.

    batches: one per step. step(batch, index): takes optimiser step `index` and returns its scalars. diagnose(): further
    scalars of the last step, asked for when it is logged. evaluate(step): scalars of the weights after `step` steps, as
    they are now. save(step, evaluation_owed, last): writes a checkpoint, which must never know more than metrics.jsonl;
    the last one is on the disk when it returns. should_stop(): whether to stop, the same on all ranks. evaluate and
    batches may raise Stopped, on all of them. What is logged at a step is logged before the checkpoint of that step:
    once over all restarts.
    """
    done, owed = plan.first_step, plan.evaluation_owed
    watch = Stopwatch(plan.global_batch_size, plan.world_size)

    def save_now(last: bool) -> None:
        start = perf_counter()
        save(done, owed, last)
        watch.add_saving(perf_counter() - start)

    try:
        if owed:
            _log_evaluation(logger, done, evaluate(done))
            owed = False
            save_now(last=done == plan.total_steps)
        if done == plan.total_steps:
            return Outcome("finished", done)
        for index, (batch, waited) in zip(range(done, plan.total_steps), timed(batches), strict=True):
            start = perf_counter()
            scalars = step(batch, index)
            watch.add(waited, perf_counter() - start)
            done = index + 1
            if plan.due(done, plan.log_every):
                everything = {**scalars, **diagnose(), **watch.read()}
                logger.log(done, {f"train/{name}": value for name, value in everything.items()})
            owed = plan.due(done, plan.evaluate_every)
            if should_stop():
                raise Stopped
            if owed:
                _log_evaluation(logger, done, evaluate(done))
                owed = False
            if plan.due(done, plan.save_every):
                save_now(last=done == plan.total_steps)
    except Stopped:
        save_now(last=True)
        logger.print(f"Stopped on request at step {done}; the same command goes on from there")
        return Outcome("preempted", done)
    return Outcome("finished", plan.total_steps)


class Stopwatch:
    """Since the last reading: means over the steps, in seconds; samples per second over all ranks and per device; and
    the seconds that the steps waited for checkpoints, in all."""

    def __init__(self, global_batch_size: int, world_size: int) -> None:
        self._samples, self._devices = global_batch_size, world_size
        self._steps, self._waited, self._worked, self._saving = 0, 0.0, 0.0, 0.0

    def add(self, waited: float, worked: float) -> None:
        self._steps, self._waited, self._worked = self._steps + 1, self._waited + waited, self._worked + worked

    def add_saving(self, seconds: float) -> None:
        self._saving += seconds

    def read(self) -> dict[str, float]:
        data_time, batch_time = self._waited / self._steps, (self._waited + self._worked) / self._steps
        saving, self._saving = self._saving, 0.0
        self._steps, self._waited, self._worked = 0, 0.0, 0.0
        rate = self._samples / batch_time
        return {
            "data_time": data_time,
            "batch_time": batch_time,
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self._devices,
            "checkpoint_seconds": saving,
        }


def timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Each batch with the seconds waited for it."""
    iterator = iter(batches)
    while True:
        start = perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch, perf_counter() - start


def _log_evaluation(logger: Logger, step: int, results: Mapping[str, float]) -> None:
    if results:
        logger.log(step, results)

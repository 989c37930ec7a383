"""fit: the training loop. It knows steps and intervals; every part it runs is handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

from data.batch import Batch
from train.metrics import Logger


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
    save: Callable[[int, bool], None],
    should_stop: Callable[[], bool],
    logger: Logger,
) -> Outcome:
    """Run steps first_step … total_steps - 1 and return how it ended. Call on every rank.

    batches: one per step. step(batch, index): takes optimiser step `index` and returns its scalars. diagnose(): further
    scalars of the last step, asked for when it is logged. evaluate(step): scalars of the weights after `step` steps, as
    they are now. save(step, evaluation_owed): writes a checkpoint. should_stop(): whether to stop, the same on all
    ranks. What is logged at a step is logged before the checkpoint of that step: once over all restarts.
    """
    if plan.evaluation_owed:
        _log_evaluation(logger, plan.first_step, evaluate(plan.first_step))
        _save(logger, plan.first_step, False, save)
    if plan.first_step >= plan.total_steps:
        return Outcome("finished", plan.first_step)
    watch = Stopwatch(plan.global_batch_size, plan.world_size)
    for index, (batch, waited) in zip(range(plan.first_step, plan.total_steps), timed(batches), strict=True):
        start = perf_counter()
        scalars = step(batch, index)
        watch.add(waited, perf_counter() - start)
        done = index + 1
        if plan.due(done, plan.log_every):
            everything = {**scalars, **diagnose(), **watch.read()}
            logger.log(done, {f"train/{name}": value for name, value in everything.items()})
        stop = should_stop()
        owed = plan.due(done, plan.evaluate_every)
        if owed and not stop:
            _log_evaluation(logger, done, evaluate(done))
            owed = False
        if stop or plan.due(done, plan.save_every):
            _save(logger, done, owed, save)
        if stop and (owed or done < plan.total_steps):
            logger.print(f"Stopped on request at step {done}; the same command goes on from there")
            return Outcome("preempted", done)
    return Outcome("finished", plan.total_steps)


class Stopwatch:
    """Means over the steps since the last reading: seconds; samples per second over all ranks and per device."""

    def __init__(self, global_batch_size: int, world_size: int) -> None:
        self._samples, self._devices = global_batch_size, world_size
        self._steps, self._waited, self._worked = 0, 0.0, 0.0

    def add(self, waited: float, worked: float) -> None:
        self._steps, self._waited, self._worked = self._steps + 1, self._waited + waited, self._worked + worked

    def read(self) -> dict[str, float]:
        data_time, batch_time = self._waited / self._steps, (self._waited + self._worked) / self._steps
        self._steps, self._waited, self._worked = 0, 0.0, 0.0
        rate = self._samples / batch_time
        return {
            "data_time": data_time,
            "batch_time": batch_time,
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self._devices,
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


def _save(logger: Logger, step: int, owed: bool, save: Callable[[int, bool], None]) -> None:
    logger.flush()  # a checkpoint must never know more than metrics.jsonl
    save(step, owed)

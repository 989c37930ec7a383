"""The training loop, `fit`: when to log, evaluate and save, and the last checkpoint when a stop is asked for.

It knows steps and intervals only; data, step, evaluation and checkpoints are passed in.
"""

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from dyad.data.batch import Batch
from dyad.train.distributed.signals import Stopped
from dyad.train.monitor.monitor import Monitor
from dyad.train.monitor.stopwatch import Stopwatch
from dyad.train.run_schedule import RunSchedule
from dyad.train.tracking.logger import Logger


def fit(
    schedule: RunSchedule,
    batches: Iterable[Batch],
    *,
    step: Callable[[Batch, int], Mapping[str, float]],
    monitor: Monitor,
    diagnose: Callable[[], Mapping[str, float]],
    evaluate: Callable[[int], Mapping[str, float]],
    save: Callable[[int, bool, bool], None],
    should_stop: Callable[[], bool],
    logger: Logger,
    telemetry: Callable[[Batch, int, float], Mapping[str, float]] = lambda *_: {},
    is_best: Callable[[int, Mapping[str, float]], bool] = lambda *_: False,
    ends: Callable[[int], bool] = lambda _: False,
) -> tuple[str, int]:
    """Run the optimiser steps first_step … total_steps - 1 of the schedule, counted from 0. Every rank must call it.

    Returns (how the run ended, "finished" or "preempted"; the number of finished optimiser steps). A checkpoint is
    written every schedule.save_every steps, after a best evaluation, after one that an earlier start owed, and after
    the last step, before its evaluation and after it. If a stop is requested, the last checkpoint is written at once
    and the run is "preempted". Raises ValueError if `batches` ends before the run does, or has more batches than these
    steps.

    batches: one per step. step(batch, index): takes optimiser step `index` and returns its scalars. monitor: observes
    each step. diagnose(): returns further scalars of the last step, computed when the step is logged. evaluate(step):
    evaluates the weights after `step` steps and returns scalars. save(step, evaluation_owed, last): writes a
    checkpoint; evaluation_owed says that the evaluation of this step is still to be done, and `last` that the
    checkpoint must be on the disk on return. should_stop(): whether to stop, the same on all ranks. logger: takes the
    scalars. telemetry(batch, steps, batch_time): returns metrics of the device when a step is logged; steps: the number
    of steps since the last call; batch_time: their mean duration in seconds. is_best(step, results): whether the
    results of an evaluation are the best so far. ends(step): whether the run ends after `step` steps, before
    total_steps, the same on all ranks; it is asked at the start, and after every step and, if the step has one, its
    evaluation.

    A stop is requested by should_stop(), which is asked after each step, or by the error Stopped, which evaluate and
    batches may raise on all ranks. The scalars of a step are logged before its checkpoint is written.
    """
    done, owed = schedule.first_step, schedule.evaluation_owed
    save_due = owed  # so that a start which is stopped right after this evaluation does not owe it
    stopwatch, batches = Stopwatch(schedule), iter(batches)
    try:
        while True:
            if done > schedule.first_step and should_stop():  # before an evaluation: it may outlast a preempted job
                raise Stopped
            if owed:
                if schedule.first_step < done == schedule.total_steps:  # an evaluation that fails loses no training
                    save(done, owed, True)
                results = evaluate(done)  # if it raises Stopped, the checkpoint says that the evaluation is still due
                if results:
                    logger.log(done, results)
                owed = False
                save_due |= is_best(done, results)
            ended = ends(done)
            if save_due or (ended and done > schedule.first_step):
                start = perf_counter()
                save(done, owed, ended or done == schedule.total_steps)
                stopwatch.saving += perf_counter() - start
            if ended:
                return "finished", done
            requested = perf_counter()
            batch = next(batches, None) if schedule.first_step < schedule.total_steps else None
            if (batch is None) != (done == schedule.total_steps):
                raise ValueError(f"{done} steps are done of {schedule.total_steps}, and the batches end elsewhere")
            if batch is None:
                return "finished", done
            start = perf_counter()
            scalars = step(batch, done)
            done += 1
            monitor.observe(batch, start - requested, done)
            stopwatch.add(start - requested, perf_counter() - start)
            if schedule.logs(done):
                steps, times = stopwatch.steps, stopwatch.read()
                of_device = telemetry(batch, steps, times["batch_time"])
                everything = {**scalars, **diagnose(), **monitor.check(), **times, **of_device}
                logger.log(done, {f"train/{name}": value for name, value in everything.items()})
            owed, save_due = schedule.due(done, schedule.evaluate_every), schedule.due(done, schedule.save_every)
    except Stopped:
        save(done, owed, True)
        logger.print(f"Stopped on request at step {done}")
        return "preempted", done

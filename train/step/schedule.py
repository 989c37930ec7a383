"""The learning rate of each step, and the lines about it that a run logs when it starts."""

import math
from collections.abc import Iterator

from dyad.train.config import OptimConfig, Schedule, TrainConfig
from dyad.train.losses.options.estimators import EstimatorOptions
from dyad.train.run_schedule import RunSchedule
from dyad.train.step.target import describe_target


def warmup_steps(total_steps: int, config: OptimConfig) -> int:
    """Return the number of warm-up steps of a run of `total_steps` steps.

    If config.warmup is an int, it is this number. If it is a float, it is a share of the run, and the number is rounded
    up, as in transformers.
    """
    return config.warmup if isinstance(config.warmup, int) else math.ceil(config.warmup * total_steps)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Compute the learning rate of optimiser step `step` (from 0): linear warm-up to config.lr, then config.schedule.

    cosine and linear fall to 0 at the end of the run, and const stays at config.lr. const-cooldown and wsd fall to
    config.cooldown_end in the last config.cooldown steps: const-cooldown by a polynomial of power
    config.cooldown_power, wsd as 1 − √t, where t is the share of the cooldown that is over (warmup-stable-decay;
    Hägele et al. 2024, arXiv:2405.18392). total_steps: the number of optimiser steps of the run, warm-up included.
    """
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    decay_steps, cooldown_start = total_steps - warmup, total_steps - config.cooldown
    if config.schedule is Schedule["cosine"]:
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay_steps)) * config.lr
    if config.schedule is Schedule["linear"]:  # to 0, as in DPR and transformers' get_linear_schedule_with_warmup
        return config.lr * (total_steps - step) / decay_steps
    if config.schedule is Schedule["const"] or step < cooldown_start:
        return config.lr
    over = (step - cooldown_start) / (total_steps - cooldown_start)
    left = 1 - math.sqrt(over) if config.schedule is Schedule["wsd"] else (1 - over) ** config.cooldown_power
    return left * (config.lr - config.cooldown_end) + config.cooldown_end


def describe_schedule(config: TrainConfig, run: RunSchedule, options: object, total_before: object) -> Iterator[str]:
    """Yield lines for the log on warm-up and cooldown, the average of weights, the target network and objective.gamma.

    Some are warnings, e.g. of a warm-up longer than half the run; none is yielded for what the run does not use. If the
    run was resumed with another number of steps, the last line says how this changes the learning rate. run: the steps
    of the run. options: the options of the objective. total_before: the total steps of the run before it was resumed;
    anything but an int: unknown.
    """
    optim, first, total = config.optim, run.first_step, run.total_steps
    warmup = warmup_steps(total, optim)
    if 2 * warmup > total:
        peak = learning_rate(min(warmup, total) - 1, total, optim)
        yield (
            f"warning: optim.warmup={optim.warmup} is {warmup} of {total} steps: the learning rate comes to "
            f"{peak:.2g}, optim.lr is {optim.lr:.2g}. Set optim.warmup=0.1, a tenth of the run, or train longer"
        )
    elif isinstance(optim.warmup, float):
        yield f"optim.warmup={optim.warmup}: {warmup} of {total} steps"
    cools = optim.schedule in (Schedule["const-cooldown"], Schedule["wsd"])
    if cools and warmup + optim.cooldown > total:
        yield (
            f"warning: {warmup} steps of optim.warmup and {optim.cooldown} of optim.cooldown are more than {total}: "
            "the learning rate falls at once after the warm-up"
        )
    if optim.ema is not None:
        yield f"optim.ema={optim.ema}: evaluation, mining and exports use the average of the weights"
    if line := describe_target(config.target):
        yield line
    if isinstance(options, EstimatorOptions):
        yield options.describe_gamma()
    if isinstance(total_before, int) and 0 < first < total != total_before >= first:
        rates = [learning_rate(first - 1, total_before, optim), learning_rate(first, total, optim)]
        shown = f"{rates[0]:.3g} at step {first}, is {rates[1]:.3g} from here"
        yield f"{total} steps, not {total_before}: the learning rate, {shown} (optim.schedule={optim.schedule.name})"

"""Print the plan of a run: all rows, then a summary with the changes of the configuration that matter most."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dyad.data.base.errors import ConfigError
from dyad.plan.dry_run import dry_run
from dyad.plan.plan import RunPlan
from dyad.plan.rows import Rows, amount_text
from dyad.train.cli.unread_keys import unmet
from dyad.train.config import Parallel, Precision, TrainConfig

COMPUTED = ("towers", "forward again", "objective")  # the rows of computing in the time of a step
SHOWN = 3  # changes of a key in the summary


def print_plan(config: TrainConfig) -> None:
    """Print the plan of a run; with plan.dry_run, take one step and print its loss and traffic instead.

    Neither makes a run folder. Raises ConfigError as RunPlan and `dry_run` do.
    """
    for line in dry_run(config) if config.plan.dry_run else plan_lines(RunPlan(config)):
        print(line)


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """Yield the plan as lines of text: memory, traffic, time, data, and a summary."""
    config, devices, (stays, phases) = plan.config, plan.devices, plan.memory(plan.pairs, plan.chunk)
    yield f"{devices.count} × {devices.name}, {devices.precision}, {config.dist.name}; {config.task}"
    memory = f"Memory of a rank, objective={config.objective.name}"
    sent = "Sent in a step: bytes of the whole tensors"
    parts = {memory: stays | phases | plan.largest(), sent: plan.sent(), "Time": plan.time(), "Data": plan.data()}
    for title, rows in (parts | {"In short": summary(plan)}).items():
        yield f"\n{title}"
        for what, (number, unit, formula) in rows.items():
            yield f"  {what:<28}{amount_text(number, unit):>16}  {formula}"
    if config.also:
        yield f"not counted: also.{', also.'.join(config.also)}"


def summary(plan: RunPlan) -> Rows:
    """Return the rows of "In short": peak memory, the longest part of a step, GPU hours, and changes of one key.

    The changes are the three (SHOWN) of `changed_plans` that change the time of a step or its memory most, with both as
    factors. Measures a plan for each change.
    """
    time, ranks = plan.time(), plan.devices.count
    parts = {row.removeprefix("a step, "): np.mean(time[row][0]) for row in time if row.startswith("a step, ")}
    computed = {what: parts.pop(what) for what in COMPUTED}
    longest, mostly = max(parts, key=parts.__getitem__), max(computed, key=computed.__getitem__)
    rows: Rows = {
        "memory": plan.largest()["peak"],
        "a step waits for": (parts[longest], "s", longest + f", mostly {mostly}" * (longest == "computing")),
        "cost": (ranks * time["the run"][0], "GPU h", f"{ranks} · hours of the run"),
    }
    before, changes = seconds_and_memory(plan), {}
    for key, other in changed_plans(plan):
        longer, larger = seconds_and_memory(other) / before
        changes[key] = longer, "· hours", f"{larger:.3g} · memory: {other.fits}", max(abs(np.log([longer, larger])))
    most = sorted(changes, key=lambda key: -changes[key][-1])[:SHOWN]
    return rows | {key: changes[key][:-1] for key in most}


def seconds_and_memory(plan: RunPlan) -> NDArray[np.float64]:
    """Return (seconds of a step, peak bytes of a rank), float64 (2,); the seconds are the mean of least and most."""
    return np.array([np.mean(plan.time()["a step"][0]), plan.peak(plan.pairs, plan.chunk)])


def changed_plans(plan: RunPlan) -> Iterator[tuple[str, RunPlan]]:
    """Yield ("key=value", its plan) for each change of one key of `plan` that may save memory or time.

    The changes: activation checkpointing on or off, if the towers support it; the batch in one chunk or two; sharded or
    not; and fp16 on GPUs that train in fp32.
    """
    config, again = plan.config, not plan.config.model.grad_checkpointing
    model = replace(config.model, grad_checkpointing=again)
    if not unmet("model.grad_checkpointing", [config]):
        with suppress(ConfigError):  # a tower does not support it
            yield f"model.grad_checkpointing={str(again).lower()}", RunPlan(replace(config, model=model), plan)
    if plan.pairs > 1:
        size = None if plan.chunks > 1 else -(-plan.pairs // 2)
        yield f"chunk_size={size or 'null'}", RunPlan(replace(config, chunk_size=size), plan)
    if plan.devices.count > 1:
        name = Parallel.fsdp2 if plan.devices.shards == 1 else Parallel.ddp
        yield f"dist={name}", RunPlan(replace(config, dist=replace(config.dist, name=name)), plan)
    if plan.devices.precision is Precision.fp32 and plan.devices.is_gpu:
        yield "precision=fp16", RunPlan(replace(config, precision=Precision.fp16), plan)

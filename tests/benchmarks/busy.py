"""Seconds of an emoji step on an idle and on a busy machine, with our wait of OpenMP's threads and with libgomp's own.

python -m tests.benchmarks.busy [NAME=VALUE …]   other settings to compare, such as GOMP_SPINCOUNT=1000

Every setting has a process of its own that reads and steps as `python -m train experiment=emoji` does. They take turns,
one step at a time: first alone, then beside four processes that compute all the time. Run it on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter

from dyad.process import run

ROUNDS, WARM_UP, OTHERS = 15, 6, 4
SETTINGS: dict[str, Mapping[str, str]] = {"ours": {}, "libgomp's own": {"GOMP_SPINCOUNT": "300000"}}
STEPPER = "from dyad.process import run; from tests.benchmarks.busy import steps; run(steps)"


def steps() -> None:
    """One step for each line of standard input; prints its seconds."""
    from dyad.data.image_text.dataset import ImageText
    from dyad.data.loading.loader import build_loader, worker_count
    from dyad.data.loading.order import Order
    from dyad.run.components import build_components
    from dyad.train.cli.compose import compose_config
    from dyad.train.distributed.world import World

    config = compose_config(["experiment=emoji", "data.val=null", "eval.suite=[]"])
    components = build_components(config, World())
    dataset, order = components.data.dataset, components.data.order
    assert isinstance(dataset, ImageText) and isinstance(order, Order)
    loader = build_loader(
        dataset,
        order,
        rank=0,
        world_size=1,
        first_step=0,
        last_step=config.steps or 0,
        workers=worker_count(config.data.workers, World().device),
    )
    batches = iter(loader)
    for index, _ in enumerate(sys.stdin):
        start = perf_counter()
        components.step(next(batches), index)
        print(perf_counter() - start, flush=True)


class Stepper:
    """A process that trains under some environment, a step whenever it is asked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STEPPER],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        assert self._process.stdin and self._process.stdout
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def medians(steppers: Mapping[str, Stepper]) -> dict[str, float]:
    """Seconds of a step by setting; all settings take a step in each round."""
    rounds = [{name: stepper.step() for name, stepper in steppers.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in steppers}


def main(words: Sequence[str]) -> None:
    settings = {**SETTINGS, **{word: dict([word.split("=", 1)]) for word in words}}
    steppers = {name: Stepper(environment) for name, environment in settings.items()}
    for stepper in [*steppers.values()] * WARM_UP:
        stepper.step()
    idle = medians(steppers)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(OTHERS)]
    try:
        busy = medians(steppers)
    finally:
        for other in others:
            other.kill()
            other.wait()
        for stepper in steppers.values():
            stepper.close()
    print(f"{os.cpu_count()} cores, median of {ROUNDS} steps, {OTHERS} other processes\n")
    print("| setting | idle s | busy s | busy / idle | idle / libgomp's own idle |\n|---|---|---|---|---|")
    for name in settings:
        ratio = idle[name] / idle["libgomp's own"]
        print(f"| {name} | {idle[name]:.3f} | {busy[name]:.3f} | {busy[name] / idle[name]:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))

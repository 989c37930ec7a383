"""Job for torchrun: the plan of W ranks on CPUs is what a real step of each model takes and sends."""

from __future__ import annotations

import os

import torch
from helpers.plan import measured_step, planned

from dyad.train.distributed.world import init_world, shutdown
from dyad.train.plan.plan import RunPlan

MODELS = ("in chunks", "minilm", "small_cnn")


def main() -> None:
    torch.set_num_threads(1)
    is_first = os.environ["RANK"] == "0"
    plans = {name: RunPlan(planned(name)) for name in MODELS} if is_first else {}
    world = init_world(200, cpu=True)
    for name in MODELS:
        peak, sent = measured_step(planned(name), world)
        if is_first:
            plan = plans[name]
            assert plan.devices.count == world.size and not plan.devices.is_gpu
            expected = plan.peak(plan.pairs, plan.chunk)
            print(f"{name}: planned {expected / 2**20:.1f} MiB, taken {peak / 2**20:.1f}")
            assert abs(expected / peak - 1) < 0.15, (name, expected, peak)
            for kind in ("all-gather", "all-reduce", "reduce-scatter"):
                of_plan = sum(size for what, (size, _) in plan.sent().items() if what.startswith(kind))
                assert of_plan == sent[kind], (name, kind, of_plan, sent)
    shutdown(world)
    print("all checks hold")


main()

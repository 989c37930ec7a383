"""Job for torchrun: the plan of W ranks on CPUs is what a real step of each model takes and sends.

Arguments: names of RUNS; without, all.
"""

from __future__ import annotations

import os
import sys

import torch
from helpers.plan import measured_step, planned

from dyad.plan.plan import RunPlan
from dyad.train.distributed.world import init_world, shutdown

# of shards: frozen layers and chunks; one tower of both sides, in bf16
RUNS = {"in chunks": [], "minilm": [], "small_cnn": []}
RUNS |= {f"{name}, sharded": ["dist=fsdp2"] for name in ("frozen in chunks", "minilm")}


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or RUNS
    configs = {run: planned(run.removesuffix(", sharded"), *RUNS[run]) for run in names}
    is_first = os.environ["RANK"] == "0"
    plans = {run: RunPlan(config) for run, config in configs.items()} if is_first else {}
    world = init_world(200, cpu=True)
    for run, config in configs.items():
        peak, sent = measured_step(config, world)
        if is_first:
            plan = plans[run]
            assert plan.devices.count == world.size and not plan.devices.is_gpu
            expected = plan.peak(plan.pairs, plan.chunk)
            print(f"{run}: planned {expected / 2**20:.1f} MiB, taken {peak / 2**20:.1f}")
            # on CPUs a convolution copies what it takes inside its kernel; other small things are below 1 %
            assert (0.9 if run == "small_cnn" else 0.99) < expected / peak < 1.15, (run, expected, peak)
            for kind in ("all-gather", "all-reduce", "reduce-scatter"):
                of_plan = sum(size for what, (size, *_) in plan.sent().items() if what.startswith(kind))
                assert of_plan == sent[kind], (run, kind, of_plan, sent)
    shutdown(world)
    print("all checks hold")


main()

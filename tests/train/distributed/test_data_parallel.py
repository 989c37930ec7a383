"""What DistributedDataParallel prints. Its gradients: tests/jobs/dist_step.py."""

import subprocess
import sys

CODE = """
import os, sys, torch, torch.distributed as dist
from dyad.train.cli.compose import compose_config
from dyad.train.distributed.data_parallel import _wrapped
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_model
tower = build_model(compose_config(["experiment=emoji_scratch"])).towers.x_tower
ours = lambda: _wrapped(tower, World(0, 2))
plain = lambda: torch.nn.parallel.DistributedDataParallel(tower, gradient_as_bucket_view=True)
for wrapped in (ours, plain):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        print("|", file=sys.stderr, flush=True)
        continue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tower = wrapped()
    for _ in range(2):
        tower(torch.zeros(4, 3, 64, 64, dtype=torch.uint8)).sum().backward()
        tower.zero_grad()
    dist.destroy_process_group()
    break
"""


def test_nothing_of_strides_is_printed() -> None:
    """torch warns of 1×1 kernels in channels_last, whose order in memory is the same."""
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    ours, plain, _ = run.stderr.split("|")
    assert (run.returncode, run.stdout, ours) == (0, "", "") and "strides" in plain, run.stderr

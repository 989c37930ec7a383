"""What DistributedDataParallel prints. Its gradients: tests/jobs/dist_step.py."""

import subprocess
import sys

CODE = """
import torch, torch.distributed as dist
from dyad.train.cli.compose import compose_config
from dyad.train.distributed.data_parallel import _wrapped
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_model
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tower = build_model(compose_config(["experiment=emoji_scratch"])).towers.x_tower
tower = WRAPPED
for _ in range(2):
    tower(torch.zeros(4, 3, 64, 64, dtype=torch.uint8)).sum().backward()
    tower.zero_grad()
dist.destroy_process_group()
"""
OURS, PLAIN = (
    "_wrapped(tower, World(0, 2))",
    "torch.nn.parallel.DistributedDataParallel(tower, gradient_as_bucket_view=True)",
)


def test_nothing_of_strides_is_printed() -> None:
    """torch warns of 1×1 kernels in channels_last, whose order in memory is the same."""
    ours, plain = (
        subprocess.run([sys.executable, "-c", CODE.replace("WRAPPED", wrapped)], capture_output=True, text=True)
        for wrapped in (OURS, PLAIN)
    )
    assert (ours.returncode, ours.stdout + ours.stderr) == (0, "") and "strides" in plain.stderr
